"""A record of what levelling the ranks' costs gains, as lines for people."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from jaxcp.bench.prefill.table import filled, lines_by, ms, titled

CLOCKS = ("mixer", "forward", "wall")
HEADING = (
    "case", "ranks", "rows", "selection", "cut", "modelled",
    *(f"{clock} {what}" for clock in CLOCKS for what in ("ms", "max / mean", "gain")),
)  # fmt: skip
EXPLAINED = (
    "Every rank's share alone, its peers' rows there already; ms of the slowest rank: a layer's mixer, which is all "
    "but projections, and kernel time (forward) and wall time of a forward. Cut: evenly, by FLOP, or by what the "
    "kernels of the even shares took. Modelled: the greatest cost of a rank over the mean. Gain: the slowest rank's "
    "time if cut evenly over that"
)


def lines(record: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of `HEADING`."""
    return lines_by(record, _line)


def table(record: dict[str, Any]) -> Table:
    """The record for a terminal."""
    title = f"ranks of {record['layers']} QSA layers, cut evenly and by cost, on {record['environment']['device_kind']}"
    return filled(titled(title, record), EXPLAINED, HEADING, lines(record))


def _line(case: dict[str, Any], run: dict[str, Any]) -> list[str]:
    of_clocks = [cell for clock in CLOCKS for cell in _cells(run.get(clock))]
    modelled = f"{run['modelled_imbalance']:.3f}"
    return [case["case"], str(case["cp"]), str(case["rows"]), run["selection"], run["cut"], modelled, *of_clocks]


def _cells(figures: dict[str, float] | None) -> list[str]:
    """(ms, max / mean, gain), or dashes for what was not measured."""
    if figures is None:
        return ["-"] * 3
    return [ms(figures["max_ms"]), f"{figures['imbalance']:.3f}", f"{figures['gain']:.3f}"]
