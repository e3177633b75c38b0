"""The native library of QSA's kernels: what stands against it, and calls into it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from jaxcp import native, varying
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


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: Array,
    attributes: Mapping[str, Any],
    in_place: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Results of a call into the library, which is built and loaded first; they differ between ranks where operands do.

    Args:
      target: FFI target.
      results: shapes and dtypes.
      operands: of the call.
      attributes: of the call, numpy scalars.
      in_place: result that is the same memory as an operand, by the operand's number.
    """
    _ready()
    # Barriers: XLA:GPU fuses a call with slices of its operands or results, after which jax 0.11's runs the call twice.
    operands = lax.optimization_barrier(operands)
    run = jax.ffi.ffi_call(target, list(results), input_output_aliases=in_place)
    return varying.over(varying.axes(*operands), *lax.optimization_barrier(tuple(run(*operands, **attributes))))


def _ready() -> None:
    """Builds and loads the library where programs run; where they are only compiled, makes its calls known."""
    if jax.default_backend() == "gpu":
        native.load("qsa")
    elif platform() == "gpu":
        registry.register_compile_only()
