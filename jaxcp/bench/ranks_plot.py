"""A record of `jaxcp bench exchange --cp N` as a picture: every backend's clocks over the tokens of the batch."""

import os
from typing import Any

from jaxcp.bench import plot
from jaxcp.bench.ranks import BACKENDS

CLOCKS = {"kernel_us": "kernels of a layer, slowest rank", "cadence_us": "cadence: what a layer adds to a program"}
FLOOR = "payload at copy rate"


def draw(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the record into a file; raises as `plot.check` does."""
    title = (
        f"exchange over {record['cp']} ranks, {record['heads']} heads of {record['dim']}, {record['dtype']}; "
        f"{record['environment']['device_kind']}, {record['date'][:10]}"
    )
    with plot.subplots(path, title, len(CLOCKS), figsize=(11, 5), sharex=True, sharey=True) as axes:
        for axis, (clock, heading) in zip(axes, CLOCKS.items(), strict=True):
            _draw_clock(axis, heading, series(record, clock))


def series(record: dict[str, Any], clock: str) -> dict[str, list[tuple[int, float]]]:
    """Name -> (tokens, µs) in order of tokens: each backend with such times, then the floor, if it was measured."""
    found: dict[str, dict[int, float]] = {row["backend"]: {} for row in record["rows"]} | {FLOOR: {}}
    for row in record["rows"]:
        for name, us in ((row["backend"], row[clock]), (FLOOR, row["floor_us"])):
            if us is not None:
                found[name][row["tokens"]] = us
    return {name: sorted(times.items()) for name, times in found.items() if times}


def _draw_clock(axis: Any, heading: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    axis.set_title(heading if lines.keys() - {FLOOR} else f"{heading} (not measured)")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_ylabel("µs")
    axis.grid(alpha=0.3)
    for name, points in lines.items():
        if name == FLOOR:
            style = {"color": "black", "linestyle": "--"}
        else:
            style = {"color": f"C{BACKENDS.index(name)}", "marker": plot.MARKERS[BACKENDS.index(name)]}
        axis.plot(*zip(*points, strict=True), label=name, **style)
