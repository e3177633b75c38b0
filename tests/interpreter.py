"""Running Mosaic GPU kernels on the CPU with the race detector, the same way on every supported jax.

Newer versions raise on a race; jax 0.11.2 only prints it and leaves it in the interpreter's state.
"""

import contextlib

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"

DETECT = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
"""For a kernel's `interpret` argument: the interpreter with race detection, or the device itself."""


class RaceError(AssertionError):
    """The race detector found a race."""


@contextlib.contextmanager
def no_races():
    """Raises `RaceError` if a kernel run inside has a race; the kernel's results must be ready when it ends."""
    try:
        yield
        found = not ON_GPU and getattr(state.get_races(), "races_found", False)
    except Exception as error:
        if "race" in str(error).lower():
            raise RaceError(str(error)) from error
        raise
    finally:
        if not ON_GPU:
            state.reset_gpu_interpret_mode_state()
    if found:
        raise RaceError("see RACE DETECTED in the output")
