"""The native library of QSA's kernels: what stands against it, and getting it before a call is traced."""

import jax

from jaxcp import native
from jaxcp.errors import BuildError
from jaxcp.native import compiler, registry
from jaxcp.qsa.resolve import platform


def blocker(target: str) -> str | None:
    """Why kernels of the library cannot run on platform `target`, or None; host facts only."""
    if target != "gpu":
        return f"it needs an NVIDIA GPU, not platform {target}"
    if jax.default_backend() != "gpu":  # compiled only
        return None
    # 227 KiB of shared memory per block: Hopper and data-center Blackwell.
    if others := {
        d.compute_capability for d in jax.local_devices() if not d.compute_capability.startswith(("9.", "10."))
    }:
        return f"it needs compute capability 9.x or 10.x, not {', '.join(sorted(others))}"
    try:
        compiler.nvcc()
    except BuildError as error:
        return f"its library cannot be built: {error}"
    return None


def prepare() -> None:
    """Builds and loads the library where programs run; where they are only compiled, makes its calls known."""
    if jax.default_backend() == "gpu":
        native.load("qsa")
    elif platform() == "gpu":
        registry.register_compile_only()
