"""Libraries of this process by name: built on first use, kernels loaded on every device, FFI handlers registered."""

import functools

import jax

from jaxcp.errors import BackendError, BuildError, JaxcpError, invalid
from jaxcp.native import builder
from jaxcp.native.library import Library
from jaxcp.native.workspace_library import WorkspaceLibrary

HANDLERS = {
    "cpu": ("jaxcp_fused",),
    "cuda": ("jaxcp_fused",),
    "flashinfer": ("jaxcp_flashinfer",),
    "qsa": (
        "jaxcp_qsa_attend",
        "jaxcp_qsa_mix",
        "jaxcp_qsa_prepare",
        "jaxcp_qsa_select",
        "jaxcp_qsa_store_index",
        "jaxcp_qsa_store_kv",
    ),
    "flashinfer_topk": ("jaxcp_qsa_flashinfer_topk",),
}
"""FFI targets of each library, under the names of their symbols."""

_WORKSPACES = "workspace_api.cc"
"""The source with which a library has workspaces."""

_targets: dict[tuple[str, str], str] = {}
"""What each (target, platform) of this process was registered for."""


@functools.cache
def load(variant: str, **options) -> Library:
    """The library, built if need be, its handlers registered and its kernels loaded on every local device.

    Args:
      variant: a name in `builder.SOURCES`.
      options: see `builder.recipe`; hashable.

    Raises:
      BuildError: it does not build or load, or has no code for a GPU that is present.
      BackendError: this process has its targets already, e.g. for programs that are only compiled.
    """
    devices = jax.local_devices()  # the backend must exist before handlers are registered
    wanted = builder.recipe(variant, **options)
    kind = WorkspaceLibrary if _WORKSPACES in builder.SOURCES[variant] else Library
    library = kind(builder.ensure(wanted), variant, wanted.key)
    for symbol in HANDLERS[variant]:
        _register(symbol, library.capsule(symbol), "cpu" if variant == "cpu" else "CUDA", f"{variant} library")
    if variant != "cpu":
        for device in devices:
            _preload(library, device)
    return library


def load_exchange(variant: str, **options) -> WorkspaceLibrary:
    """`load` of a library with workspaces: "cpu", "cuda" or "flashinfer".

    Raises:
      ValueError: a library without.
    """
    library = load(variant, **options)
    if not isinstance(library, WorkspaceLibrary):
        having = [name for name, sources in builder.SOURCES.items() if _WORKSPACES in sources]
        raise invalid("variant", repr(variant), f"one of {having}", "The others have no workspaces.")
    return library


def _preload(library: Library, device) -> None:
    try:
        library.preload(device.local_hardware_id)
    except JaxcpError as error:
        wanted = builder.architecture(device.compute_capability)
        raise BuildError(
            f"architectures: the kernels of {library.path} do not load on {device} ({error}); expected "
            f"code for {wanted}. "
            f"Build with architectures including {wanted!r}, and check the driver's version."
        ) from error


@functools.cache
def register_compile_only() -> None:
    """Lets programs with our GPU calls be compiled on a machine without a GPU; running them is an error."""
    library = load("cpu")
    for symbol in (symbol for variant, symbols in HANDLERS.items() if variant != "cpu" for symbol in symbols):
        if (symbol, "CUDA") not in _targets:  # a library that can run them can also be compiled for
            _register(symbol, library.capsule("jaxcp_compile_only"), "CUDA", "compile-only mesh")


def _register(symbol: str, capsule, platform: str, what_for: str) -> None:
    """Registers an FFI target; XLA cannot replace or forget one."""
    if known := _targets.get((symbol, platform)):
        raise BackendError(
            f"jaxcp: this process registered {symbol} for a {known}; XLA cannot replace it by that of the "
            f"{what_for}. Use another process: one that compiled for a compile-only mesh, e.g., cannot run on GPUs."
        )
    jax.ffi.register_ffi_target(symbol, capsule, platform=platform)
    _targets[symbol, platform] = what_for
