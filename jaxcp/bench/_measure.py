"""Time on the device, from the profiler, and what a figure needs beside it: where, when and with what it was taken.

The profiler's kernel durations leave out dispatch, which costs tens of microseconds and says nothing about a kernel.
"""

import collections
import dataclasses
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxcp import doctor
from jaxcp.bench import trace
from jaxcp.errors import BackendError


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to measure with its arguments, which are on the device already.

    Attributes:
      fn: programs that share it are compiled once, if their arguments have the same shapes.
      args: of `fn`.
      carried: leading arguments that are donated; as many leading results take their place in the next run.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int = 0


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Device time of one run of a program.

    Attributes:
      us: µs, the sum over kernels of each one's median.
      kernels: (name, launches per run, median µs) in order of the name.
      result: what the last timed run returned, carried results left out; check it.
      temporary: bytes that the program takes beside arguments and results.
    """

    us: float
    kernels: tuple[tuple[str, float, float], ...]
    result: Any
    temporary: int = 0

    @property
    def launches(self) -> float:
        """Kernels of one run."""
        return sum(count for _, count, _ in self.kernels)


def device_times(
    programs: Sequence[Program], *, repeat: int = 50, warm_up: int = 3, limit_s: float = math.inf
) -> list[DeviceTime]:
    """Device time of every program on a GPU: each is compiled, warmed up, then run `repeat` times under a trace.

    Inputs that fit in the L2 cache are read from it, as after an exchange; larger ones come from memory.

    Args:
      repeat: timed runs of each program.
      warm_up: runs before them.
      limit_s: seconds, about, that the timed runs of one program may take; a slow one runs less often.

    Raises:
      BackendError: the default device is no GPU.
    """
    if (platform := jax.default_backend()) != "gpu":
        raise BackendError(f"device times: the profiler times kernels of GPUs only, and jax runs on {platform!r} here.")
    compiled = _compiled(programs)
    runs = [Run(exe, program) for (_, exe), program in zip(compiled, programs, strict=True)]
    counts = [run.warmed(warm_up, repeat, limit_s) for run in runs]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            results = [run.repeated(count) for run, count in zip(runs, counts, strict=True)]
        events = kernel_events(folder, "/device:GPU")
    times = []
    for i, (name, executable) in enumerate(compiled):
        sharing = [counts[j] if other == name else 0 for j, (other, _) in enumerate(compiled)]
        kernels = _part(events.get(f"jit_{name}", {}), sharing, i)
        temporary = executable.memory_analysis().temp_size_in_bytes
        times.append(_device_time(kernels, counts[i], results[i], temporary))
    return times


def _part(kernels: Mapping[str, list[float]], counts: Sequence[int], i: int) -> dict[str, list[float]]:
    """Kernels of the i-th of several programs that ran one executable in turn, `counts` times each."""
    total, before = sum(counts), sum(counts[:i])
    if total == counts[i]:
        return dict(kernels)
    found = {}
    for name, times in kernels.items():
        if len(times) % total:
            raise BackendError(f"device times: {len(times)} kernels {name} in a trace of {total} runs; some are lost.")
        each = len(times) // total
        found[name] = times[before * each : (before + counts[i]) * each]
    return found


class Run:
    """An executable with the arguments of its next run."""

    def __init__(self, executable: Any, program: Program):
        self._executable, self._args, self._carried = executable, program.args, program.carried

    def repeated(self, count: int) -> Any:
        """Runs it, waits for the end; the last result without what is carried on."""
        result = None
        for _ in range(count):
            result = self.once()
        return jax.block_until_ready(result)

    def once(self) -> Any:
        """Runs it and does not wait; the result without what is carried on."""
        result = self._executable(*self._args)
        if self._carried:
            *carried, result = result
            self._args = (*carried, *self._args[self._carried :])
        return result

    def warmed(self, warm_up: int, repeat: int, limit_s: float) -> int:
        """Warms up; how often it may run then."""
        start = time.perf_counter()
        self.repeated(1)
        if time.perf_counter() - start > limit_s:
            return 1
        start = time.perf_counter()
        self.repeated(1)
        self.repeated(warm_up - 2)
        return max(1, int(min(repeat, limit_s * (warm_up - 1) / (time.perf_counter() - start))))


def _compiled(programs: Sequence[Program]) -> list[tuple[str, Any]]:
    """(name, executable) of every program; those of one function with arguments of the same shapes share it."""
    name_of: dict[Any, str] = {}
    lowered, names = {}, []
    for program in programs:
        shapes = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x).name), program.args)
        name = name_of.setdefault((id(program.fn), str(shapes)), f"measured_{len(name_of)}")
        if name not in lowered:
            lowered[name] = _named(program, name).lower(*program.args)
        names.append(name)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA locks the device while it times candidates
        made = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    return [(name, made[name]) for name in names]


def kernel_events(folder: str, plane_prefix: str) -> Mapping[str, Mapping[str, list[float]]]:
    """Durations in µs in the one trace below `folder`: {HLO module: {kernel: [one per launch, in order of start]}}."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for launch in trace.launches(folder, plane_prefix):
        found[launch.module][launch.name].append((launch.start_us, launch.us))
    return {
        module: {name: [us for _, us in sorted(times)] for name, times in kernels.items()}
        for module, kernels in found.items()
    }


def _named(program: Program, name: str) -> Any:
    """The program's function jitted under `name`, by which the profiler tells its kernels from others'."""

    def measured(*args):
        return program.fn(*args)

    measured.__name__ = name
    return jax.jit(measured, donate_argnums=tuple(range(program.carried)))


def _device_time(kernels: Mapping[str, list[float]], repeat: int, result: Any, temporary: int = 0) -> DeviceTime:
    rows = tuple((name, len(times) / repeat, statistics.median(times)) for name, times in sorted(kernels.items()))
    if not rows:
        raise BackendError("device times: the trace holds no kernel of a measured program.")
    return DeviceTime(sum(count * median for _, count, median in rows), rows, result, temporary)


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
    environment = doctor.environment() | {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    return {"date": now, "command": " ".join(command), "environment": environment} | figures


def write(path: str | os.PathLike[str], recorded: dict[str, Any]) -> None:
    """Writes a record as JSON, folders included; whoever reads the file meanwhile gets the one before."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(recorded, indent=1) + "\n")
    part.replace(path)
