"""How the benchmark measures, whatever it measures, and what a record says of one program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxcp.bench.prefill.clocks import Device, Forward
from jaxcp.bench.qsa import floors
from jaxcp.errors import BackendError
from jaxcp.layout import positive_int
from jaxcp.qsa import QSAConfig

LAYERS = 12
KERNELS = 12
"""Kernels that a record names: the longest."""

LIMIT_S = 2.0
"""Seconds, about, that the runs under one clock take at most."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
      config: geometry.
      layers: of the stack.
      dtype: of the layers.
      repeat: runs per clock; medians are reported. Long forwards run less often.
      say: takes lines of progress.

    Raises:
      ValueError: a count that is not positive.
    """

    config: QSAConfig
    layers: int = LAYERS
    dtype: str = "bfloat16"
    repeat: int = 20
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self):
        positive_int("layers", self.layers)
        positive_int("repeat", self.repeat)

    def facts(self) -> dict[str, Any]:
        """What a record says about all of its cases."""
        c = self.config
        return {
            "measurement": jax.default_backend() == "gpu", "layers": self.layers, "dtype": self.dtype,
            "hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim,
            "index_heads": c.index_heads, "index_dim": c.index_dim, "budget": c.budget, "ratio": c.ratio,
            "products_tflop_s": floors.PRODUCTS_PER_S / 1e12, "cases": [],
        }  # fmt: skip


def clocked(forward: Forward, options: Options) -> dict[str, Any]:
    """Times of one forward, and what the slowest device did in it."""
    _, once = forward.host_us(1)
    repeat = max(3, min(options.repeat, int(LIMIT_S * 1e6 / once)))
    host_us, wall_us = forward.host_us(repeat)
    figures: dict[str, Any] = {"runs": repeat, "host_us": round(host_us, 1), "wall_ms": round(wall_us / 1e3, 4)}
    try:
        devices = forward.devices(repeat)
    except BackendError as error:  # wall times are still good
        options.say(f"  {error}")
        return figures | {"no_kernel_times": str(error)}
    return figures | (of_device(max(devices, key=lambda d: d.us), options.layers) if devices else {})


def of_device(device: Device, layers: int) -> dict[str, Any]:
    """What a record says of a device: ms of a forward, and of one layer by part; gathers apart from its mixer."""
    mixer = sum(us for part, us in device.parts.items() if part not in ("projections", "gathers"))
    return {
        "device_ms": round(device.us / 1e3, 4), "programs": device.programs,
        "layer_ms": {part: round(us / 1e3 / layers, 4) for part, us in device.parts.items()},
        "mixer_ms": round(mixer / 1e3 / layers, 4),
        "kernels": [f"{count:g} x {name}: {us:.1f} us in all" for name, count, us in device.kernels[:KERNELS]],
    }  # fmt: skip
