"""How long a forward takes: for the host to start it, until it is done, and on the device, part by part."""

import collections
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxcp.bench import parts, trace
from jaxcp.bench._measure import Program, Run
from jaxcp.bench.trace import Launch
from jaxcp.errors import BackendError
from jaxcp.overlap.hlo import executed, parsed, scheduled_text

WARM_UP = 3
"""Runs before any clock: the first launches, the second may be captured as a graph, later ones replay it."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What one device did in a forward.

    Attributes:
      us: of all its kernels, µs; overlapping ones count in full.
      parts: µs by part of the layer (`jaxcp.bench.parts.PARTS`).
      programs: programs that were started.
      kernels: (name, launches, µs of all of them), the longest first.
    """

    us: float
    parts: Mapping[str, float]
    programs: float
    kernels: tuple[tuple[str, float, float], ...]


class Forward:
    """A program to time as its users call it: jitted, arguments on the device, carried ones donated."""

    def __init__(self, program: Program, **jit_options: Any):
        self._jitted = jax.jit(program.fn, donate_argnums=tuple(range(program.carried)), **jit_options)
        start = time.perf_counter()
        self.compiled = self._jitted.lower(*program.args).compile()  # the calls below take it from there
        self.compile_s = time.perf_counter() - start
        self.arguments(program)

    @property
    def temporary_bytes(self) -> int:
        """Bytes that a forward takes beside arguments and results."""
        memory = self.compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    def arguments(self, program: Program) -> None:
        """Goes on with the arguments of another program, of the same function and shapes; warms up."""
        self._run = Run(self._jitted, program)
        self.result = self._run.repeated(WARM_UP)

    def host_us(self, repeat: int) -> tuple[float, float]:
        """(to start a forward on idle devices, until it is done), µs, medians. Nothing may move to or from the host."""
        started, done = [], []
        with jax.transfer_guard("disallow_explicit"):
            for _ in range(repeat):
                begin = time.perf_counter()
                self.result = self._run.once()
                started.append(time.perf_counter() - begin)
                jax.block_until_ready(self.result)
                done.append(time.perf_counter() - begin)
        return statistics.median(started) * 1e6, statistics.median(done) * 1e6

    def devices(self, repeat: int) -> list[Device]:
        """What every GPU of this process did, in order; none on other devices.

        Raises:
          BackendError: the profile lacks kernels of the program.
        """
        if jax.default_backend() != "gpu":
            return []
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.result = self._run.repeated(repeat)
            found = trace.launches(folder)
        text = scheduled_text(self.compiled)
        known = parts.of_program(parsed(text))
        check_complete(text, found)
        by_device = collections.defaultdict(list)
        for launch in found:
            by_device[launch.device].append(launch)
        return [device_of(launches, repeat, known) for launches in by_device.values()]


def check_complete(hlo: str, launches: Sequence[Launch]) -> None:
    """Raises unless every call of a kernel library in the program, ours and the products', ran a kernel.

    Raises:
      BackendError: the profile lacks one.
    """
    program, seen = parsed(hlo), {launch.operation for launch in launches}
    calls = [i.operation for name in executed(hlo, program) for i in program[name] if i.operation.kind == "custom-call"]
    missing = [call.name for call in calls if parts.of_operation(call) != "rest" and call.name not in seen]
    if missing:
        raise BackendError(
            f"kernel times: the profile lacks {', '.join(missing[:3])} ({len(missing)} operations in all); expected "
            "every operation. They may have run as one graph: XLA_FLAGS=--xla_gpu_enable_command_buffer= prevents it."
        )


def device_of(launches: Sequence[Launch], runs: int, known: Mapping[str, str]) -> Device:
    """The figures of one device from its launches in `runs` forwards; `known` is `parts.of_program`."""
    times = collections.defaultdict(list)
    for launch in launches:
        times[launch.module, launch.operation, launch.name, parts.of_launch(launch, known)].append(launch.us)
    each = {key: (len(us) / runs, len(us) / runs * statistics.median(us)) for key, us in times.items()}
    of_parts, of_kernels = dict.fromkeys(parts.PARTS, 0.0), collections.defaultdict(lambda: (0.0, 0.0))
    for (_, _, name, part), (count, us) in each.items():
        of_parts[part] += us
        of_kernels[name] = of_kernels[name][0] + count, of_kernels[name][1] + us
    kernels = sorted(((name, *both) for name, both in of_kernels.items()), key=lambda kernel: -kernel[2])
    return Device(sum(of_parts.values()), of_parts, _programs(launches, runs), tuple(kernels))


def _programs(launches: Sequence[Launch], runs: int) -> float:
    """Programs started per run: of each module as often as its rarest kernel ran."""
    times = collections.Counter((launch.module, launch.operation, launch.name) for launch in launches)
    modules = {module for module, *_ in times}
    return sum(min(n for key, n in times.items() if key[0] == module) for module in modules) / runs
