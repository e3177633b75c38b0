"""Time on the device, from the profiler, and what a figure needs beside it: where, when and with what it was taken.

The profiler's kernel durations leave out dispatch, which costs tens of microseconds and says nothing about a kernel.
"""

import collections
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcp import doctor
from jaxcp.errors import BackendError


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to measure with its arguments, which are on the device already."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Device time of one run of a program.

    Attributes:
      us: µs, the sum over kernels of each one's median.
      kernels: (name, launches per run, median µs) in order of the name.
      result: what the last timed run returned; check it.
    """

    us: float
    kernels: tuple[tuple[str, float, float], ...]
    result: Any

    @property
    def launches(self) -> float:
        """Kernels of one run."""
        return sum(count for _, count, _ in self.kernels)


def device_times(programs: Sequence[Program], *, repeat: int = 50, warm_up: int = 3) -> list[DeviceTime]:
    """Device time of every program on a GPU: each is compiled, warmed up, then run `repeat` times under one trace.

    Inputs that fit in the L2 cache are read from it, as after an exchange; larger ones come from memory.

    Raises:
      BackendError: the default device is no GPU.
    """
    if (platform := jax.default_backend()) != "gpu":
        raise BackendError(f"device times: the profiler times kernels of GPUs only, and jax runs on {platform!r} here.")
    lowered = [_named(program.fn, f"measured_{i}").lower(*program.args) for i, program in enumerate(programs)]
    compiled = [program.compile() for program in lowered]  # one by one: XLA times candidates on the device
    for fn, program in zip(compiled, programs, strict=True):
        _repeated(fn, program.args, warm_up)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            results = [_repeated(fn, program.args, repeat) for fn, program in zip(compiled, programs, strict=True)]
        events = kernel_events(folder, "/device:GPU")
    return [_device_time(events.get(f"jit_measured_{i}", {}), repeat, result) for i, result in enumerate(results)]


def kernel_events(folder: str, plane_prefix: str) -> Mapping[str, Mapping[str, list[float]]]:
    """Durations in µs in the one trace below `folder`: {HLO module: {kernel: [one per launch]}}."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith(plane_prefix):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # other lines repeat the events under other names
                continue
            for event in line.events:
                module = dict(event.stats).get("hlo_module")
                if module:
                    found[str(module)][event.name].append(event.duration_ns / 1e3)
    return found


def _named(fn: Callable, name: str) -> Any:
    """`fn` jitted under `name`, by which the profiler tells its kernels from others'."""

    def measured(*args):
        return fn(*args)

    measured.__name__ = name
    return jax.jit(measured)


def _repeated(fn: Callable, args: tuple[Any, ...], repeat: int) -> Any:
    result = None
    for _ in range(repeat):
        result = fn(*args)
    return jax.block_until_ready(result)


def _device_time(kernels: Mapping[str, list[float]], repeat: int, result: Any) -> DeviceTime:
    rows = tuple((name, len(times) / repeat, statistics.median(times)) for name, times in sorted(kernels.items()))
    if not rows:
        raise BackendError("device times: the trace holds no kernel of a measured program.")
    return DeviceTime(sum(count * median for _, count, median in rows), rows, result)


def copy_rate(megabytes: int = 512) -> float:
    """Bytes per second, read plus written, of the best large device-to-device copy: the floor of memory-bound work."""
    x = jnp.arange(megabytes << 18, dtype=jnp.int32)
    copies = [Program(jnp.copy, (x,)), Program(lambda x: x + 1, (x,))]
    return max(2 * x.nbytes / (time.us * 1e-6) for time in device_times(copies, repeat=20))


def shortest_kernel_us() -> float:
    """Device time of a kernel that adds one number: nothing is faster."""
    [time] = device_times([Program(lambda x: x + 1, (jnp.ones(1),))])
    return time.us


def record(figures: dict[str, Any]) -> dict[str, Any]:
    """`figures` with the environment they were taken in."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    program = pathlib.Path(sys.argv[0]).name
    command = ["jaxcp" if program == "cli.py" else program, *sys.argv[1:]]
    return {"date": now, "command": " ".join(command), "environment": doctor.environment()} | figures


def write(path: str | os.PathLike[str], recorded: dict[str, Any]) -> None:
    """Writes a record as JSON, folders included."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recorded, indent=1) + "\n")
