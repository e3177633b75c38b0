"""Loads a built library: checks that it is the right one, registers its FFI handlers, calls its C interface."""

import ctypes
import functools
from pathlib import Path

import jax

from jaxcp.errors import BackendError, BuildError, JaxcpError
from jaxcp.native import builder

HANDLE_BYTES = 64
_MESSAGE_BYTES = 512


class Config(ctypes.Structure):
    """One rank's workspace; the fields of `struct Config` in kernels/csrc/workspace.h, where they are explained."""

    _fields_ = [
        ("exchange", ctypes.c_int64), ("device", ctypes.c_int32), ("rank", ctypes.c_int32), ("cp", ctypes.c_int32),
        ("heads", ctypes.c_int32), ("head_dim", ctypes.c_int32), ("max_tokens", ctypes.c_int32),
        ("dtype", ctypes.c_int32), ("across_processes", ctypes.c_int32), ("timeout_ns", ctypes.c_uint64),
        ("first_timeout_ns", ctypes.c_uint64),
    ]  # fmt: skip


class Library:
    """A loaded library. Methods raise `JaxcpError` with the system's own words.

    Attributes:
      path: file.
      variant: "cpu", "cuda" or "flashinfer".
      protocol_version: of workspace layout and transport; ranks must agree on it.
    """

    def __init__(self, path: Path, variant: str, key: str):
        self.path, self.variant = path, variant
        try:
            self._lib = ctypes.CDLL(str(path))
            self._lib.jaxcp_build_key.restype = ctypes.c_char_p
            found = self._lib.jaxcp_build_key().decode()
        except (OSError, AttributeError) as error:
            raise BuildError(
                f"library: {path} does not load ({error}); expected the {variant} library. Delete the "
                "file, it will be "
                "built again."
            ) from error
        if found != key:
            raise BuildError(
                f"library: {path} was built as {found}; expected {key} (this source, compiler, jaxlib "
                "and architecture). "
                "Delete the file, it will be built again."
            )
        self.protocol_version = int(self._lib.jaxcp_protocol_version())
        self._lib.jaxcp_workspace_bytes.restype = ctypes.c_uint64

    def capsule(self, symbol: str):
        """FFI handler `symbol` as jax.ffi.register_ffi_target takes it."""
        return jax.ffi.pycapsule(getattr(self._lib, symbol))

    def workspace_bytes(self, config: Config) -> int:
        """Bytes of the workspace that `config` asks for."""
        return int(self._lib.jaxcp_workspace_bytes(ctypes.byref(config)))

    def preload(self, device: int) -> None:
        """Loads every kernel on GPU `device`: a first launch that loads code waits for peers' kernels to end."""
        self._call("preload", ctypes.c_int32(device))

    def create(self, config: Config) -> None:
        """Allocates the workspace of one rank, blank."""
        self._call("create", config)

    def handle(self, config: Config) -> bytes:
        """What another process needs to map the workspace; 64 bytes."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._call("export", config, handle)
        return handle.raw

    def attach(self, config: Config, peer: Config) -> None:
        """Lets a rank write the workspace of a peer of this process."""
        self._call("attach", config, peer)

    def attach_handle(self, config: Config, rank: int, handle: bytes) -> None:
        """Lets a rank write the workspace of a peer of another process."""
        self._call("attach_handle", config, ctypes.c_int32(rank), ctypes.create_string_buffer(handle, HANDLE_BYTES))

    def connected(self, config: Config) -> None:
        """All peers are attached."""
        self._call("connected", config)

    def forget_name(self, config: Config) -> None:
        """Everybody who needs the handle has used it."""
        self._call("forget_name", config)

    def blank(self, config: Config) -> None:
        """Puts the workspace into its first state; no rank may be in a call."""
        self._call("blank", config)

    def expiry(self, config: Config) -> str | None:
        """Who waited in vain for whom, or None."""
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._call("expiry", config, text, ctypes.c_uint64(_MESSAGE_BYTES))
        return text.value.decode() or None

    def call_number(self, config: Config) -> int:
        """Calls that the rank has finished, modulo 2^32; waits for the device."""
        number = ctypes.c_uint32()
        self._call("call", config, ctypes.byref(number))
        return number.value

    def set_call_number(self, config: Config, number: int) -> None:
        """For tests near the wrap: the same on all ranks, between calls."""
        self._call("set_call", config, ctypes.c_uint32(number))

    def launches(self, config: Config) -> int:
        """Handler calls so far; replays of a captured launch are not among them."""
        count = ctypes.c_int64()
        self._call("launches", config, ctypes.byref(count))
        return count.value

    def synchronize(self, config: Config) -> None:
        """Waits for everything launched on the rank's device."""
        self._call("synchronize", config)

    def detach(self, config: Config) -> None:
        """Waits for the device and unmaps blocks of other processes; the workspace can only be destroyed then."""
        self._call("detach", config)

    def destroy(self, config: Config) -> None:
        """Waits for the device and frees the rank's workspace and its maps of peers'."""
        self._call("destroy", config)

    def _call(self, name: str, *arguments) -> None:
        function = getattr(self._lib, f"jaxcp_{name}")
        function.restype = ctypes.c_char_p
        passed = [ctypes.byref(argument) if isinstance(argument, Config) else argument for argument in arguments]
        if message := function(*passed):
            raise JaxcpError(message.decode())


HANDLERS = {
    "cpu": ("jaxcp_fused",),
    "cuda": ("jaxcp_fused", "jaxcp_fused_simulated"),
    "flashinfer": ("jaxcp_flashinfer",),
}
"""FFI targets of each library, under the names of their symbols."""

_targets: dict[tuple[str, str], str] = {}
"""What each (target, platform) of this process was registered for."""


@functools.cache
def load(variant: str, **options) -> Library:
    """The library, built if need be, its handlers registered and its kernels loaded on every local device.

    Args:
      variant: "cpu", "cuda" or "flashinfer".
      options: see `builder.recipe`; hashable.

    Raises:
      BuildError: it does not build or load, or has no code for a GPU that is present.
      BackendError: this process has its targets already, e.g. for programs that are only compiled.
    """
    devices = jax.local_devices()  # the backend must exist before handlers are registered
    wanted = builder.recipe(variant, **options)
    library = Library(builder.ensure(wanted), variant, wanted.key)
    for symbol in HANDLERS[variant]:
        _register(symbol, library.capsule(symbol), "cpu" if variant == "cpu" else "CUDA", f"{variant} library")
    if variant != "cpu":
        for device in devices:
            _preload(library, device)
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
    for symbol in (*HANDLERS["cuda"], *HANDLERS["flashinfer"]):
        if (symbol, "CUDA") not in _targets:  # a library that can run them can also be compiled for
            _register(symbol, library.capsule("jaxcp_compile_only"), "CUDA", "compile-only mesh")


def _register(symbol: str, capsule, platform: str, what_for: str) -> None:
    """Registers an FFI target; XLA cannot replace or forget one."""
    if known := _targets.get((symbol, platform)):
        raise BackendError(
            f"exchange: this process registered {symbol} for a {known}; XLA cannot replace it by that of the "
            f"{what_for}. Use another process: one that compiled for a compile-only mesh, e.g., cannot run on GPUs."
        )
    jax.ffi.register_ffi_target(symbol, capsule, platform=platform)
    _targets[symbol, platform] = what_for
