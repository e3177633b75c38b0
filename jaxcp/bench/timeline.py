"""What ran, or is to run, beside what: the kernels of a profile, or the schedule of a compiled program."""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcp.bench import parts, trace
from jaxcp.bench.trace import Launch
from jaxcp.errors import invalid
from jaxcp.overlap.hlo import Instruction, Operation, executed, parsed, scheduled_text
from jaxcp.overlap.schedule import COLLECTIVES

COMPUTATION, COLLECTIVE = "computation", "collectives"
"""Lanes of a schedule."""

MICROSECONDS, OPERATIONS = "µs", "operations"


@dataclasses.dataclass(frozen=True, order=True)
class Span:
    """Something on a lane, from `start` to `end`.

    Attributes:
      start, end: in the timeline's unit.
      lane: a stream, or a lane of a schedule.
      part: of the layer, key of `jaxcp.bench.parts.PARTS`.
      name: of the kernel or operation.
      label: to be written on it where there is room.
    """

    start: float | int
    end: float | int
    lane: str
    part: str
    name: str
    label: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans of one run, in order.

    Attributes:
      of: what ran where.
      unit: `MICROSECONDS` of a profile; `OPERATIONS` of a schedule, which knows the order and nothing of time.
      spans: from 0 on.
    """

    of: str
    unit: str
    spans: tuple[Span, ...]

    @property
    def lanes(self) -> list[str]:
        """In order of what they do first."""
        return list(dict.fromkeys(span.lane for span in self.spans))

    @property
    def end(self) -> float | int:
        """When all is done."""
        return max(span.end for span in self.spans)

    def between(self, start: float | int | None, stop: float | int | None) -> "Timeline":
        """What runs in this time.

        Raises:
          ValueError: nothing does.
        """
        low, high = 0.0 if start is None else start, self.end if stop is None else stop
        kept = tuple(span for span in self.spans if span.end > low and span.start < high)
        if not kept:
            raise invalid("start, stop", f"{low:g} … {high:g}", f"a part of 0 … {self.end:g}", f"In {self.unit}.")
        return dataclasses.replace(self, spans=kept)


def read(path: str | os.PathLike[str], device: int = 0) -> Timeline:
    """The timeline in a file.

    Args:
      path: what `jax.profiler.trace` wrote, a folder or its .xplane.pb; or the text of a compiled program.
      device: whose, of a profile.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file of another kind, or a profile without kernels of this device.
    """
    path = pathlib.Path(path)
    if path.is_dir() or path.name.endswith(trace.SUFFIX) or not path.exists():
        plane = f"/device:GPU:{device}"  # which GPU 10's name also begins with, for device 1
        return of_profile([launch for launch in trace.launches(path, plane) if launch.device == plane], device)
    try:
        return of_schedule(path.read_text())
    except UnicodeDecodeError:
        raise invalid(
            "source", f"{path}, which is no text", f"*{trace.SUFFIX}, or a program's text", "See compiled.as_text()."
        ) from None


def of_profile(launches: list[Launch], device: int = 0) -> Timeline:
    """The last run of the program that took most of the device's time; its streams are the lanes.

    Raises:
      ValueError: no kernel.
    """
    if not launches:
        raise invalid("device", device, "a GPU with kernels in the profile", "Profile a run on GPUs, or name another.")
    by_module = collections.defaultdict(list)
    for launch in launches:
        by_module[launch.module].append(launch)
    module, run = max(by_module.items(), key=lambda pair: sum(launch.us for launch in pair[1]))
    last = _last_run(run)
    begin = last[0].start_us
    spans = (_span(e, parts.of_launch(e), begin) for e in last)
    return Timeline(f"{module} on {launches[0].device.removeprefix('/device:')}", MICROSECONDS, tuple(spans))


def _span(launch: Launch, part: str, begin: float) -> Span:
    start, end = launch.start_us - begin, launch.end_us - begin
    return Span(start, end, launch.stream, part, launch.name, parts.PARTS[part])


def _last_run(launches: list[Launch]) -> list[Launch]:
    """From the last launch on of what a run launches first and once, if anything."""
    count = collections.Counter((launch.operation, launch.name) for launch in launches)
    rarest = min(count.values())
    starts = next((e.operation, e.name) for e in launches if count[e.operation, e.name] == rarest)
    at = max(i for i, e in enumerate(launches) if (e.operation, e.name) == starts)
    return launches[at:]


def of_schedule(compiled: Any) -> Timeline:
    """The longest computation that a program executes, an operation per unit; gathers from their start to their end.

    Args:
      compiled: a compiled JAX program, or its text.

    Raises:
      TypeError, ValueError: see `jaxcp.overlap.report`.
    """
    text = scheduled_text(compiled)
    program = parsed(text)
    bodies = [program[name] for name in executed(text, program)]
    longest = max(bodies, key=lambda body: sum(i.costs for i in body))
    of = re.match(r"HloModule ([\w.\-]+)", text)
    what = f"schedule of {of[1] if of else 'a program'}" + ("" if longest is bodies[0] else ", a loop's body")
    return Timeline(what, OPERATIONS, tuple(sorted(_spans(longest, parts.of_program(program)))))


def _spans(body: list[Instruction], part_of: Mapping[str, str]) -> Iterator[Span]:
    """Operations one after another; collectives from their start to their end."""
    place, begun = 0, {}
    for instruction in body:
        operation, kind = instruction.operation, instruction.operation.kind
        if kind.removesuffix("-start") in COLLECTIVES and kind != kind.removesuffix("-start"):
            begun[operation.name] = place, operation
            continue
        started = next((name for name in instruction.operands if name in begun), None)
        if kind.endswith("-done") and started:
            start, operation = begun.pop(started)
            place = max(place, start + 1)  # with nothing behind it, a place in which nothing is computed
            yield _collective(start, place, operation, instruction.shape)
        elif kind in COLLECTIVES:
            place += 1
            yield _collective(place - 1, place, operation, instruction.shape)
        elif instruction.costs:
            part = part_of[operation.name]
            place += 1
            yield Span(place - 1, place, COMPUTATION, part, operation.name, parts.PARTS[part])


def _collective(start: int, end: int, operation: Operation, shape: str) -> Span:
    label = f"{operation.kind.removesuffix('-start')} {re.sub(r'{[^}]*}', '', shape)}"
    return Span(start, end, COLLECTIVE, parts.of_operation(operation), operation.name, label)
