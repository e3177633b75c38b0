"""A record of a rank's share as lines for people, in a terminal or a README."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.table import Table

from jaxcp.bench.parts import PARTS
from jaxcp.bench.prefill.published import PUBLISHED_LAYERS, PUBLISHED_ON

SHOWN = {part: name for part, name in PARTS.items() if part != "gathers"}  # a share has none
HEADING = (
    "case", "ranks", "rows", "selection", "forward ms", "wall ms", *SHOWN.values(), "mixer", "goal", "published",
    "host µs", "plan µs", "MiB",
)  # fmt: skip
EXPLAINED = (
    "One rank's share of a forward, all other ranks' rows there already: kernel time (forward) and wall time. Per "
    "layer in ms: the parts, × the floor of the projections' products, and the mixer, which is all but projections, "
    "beside its goal. Selection, in brackets: tokens that four neighbouring rows select together, per row. Published: "
    f"per layer of {PUBLISHED_LAYERS} on as many {PUBLISHED_ON}s, another implementation on another GPU, gathers "
    "included. Host: to start a forward, which is one program without any transfer. MiB: beside arguments and results"
)
NO_MEASUREMENT = "not a measurement: no GPU"


def lines(record: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of `HEADING`."""
    return lines_by(record, _line)


def table(record: dict[str, Any]) -> Table:
    """The record for a terminal."""
    title = f"share of a rank, {record['layers']} QSA layers, on {record['environment']['device_kind']}"
    return filled(titled(title, record), EXPLAINED, HEADING, lines(record))


def lines_by(record: dict[str, Any], line: Callable[[dict, dict], list[str]]) -> Iterator[list[str]]:
    """`line` of every run of every case."""
    return (line(case, run) for case in record["cases"] for run in case["runs"])


def titled(title: str, record: dict[str, Any]) -> str:
    """The title, and that it is no measurement where it is none."""
    return title if record["measurement"] else f"{title} ({NO_MEASUREMENT})"


def filled(title: str, caption: str, heading: Iterable[str], lines: Iterable[list[str]]) -> Table:
    """A table of lines."""
    out = Table(title=title, caption=caption)
    for name in heading:
        out.add_column(name, justify="right")
    for line in lines:
        out.add_row(*line)
    return out


def _line(case: dict[str, Any], run: dict[str, Any]) -> list[str]:
    layer = run.get("layer_ms", {})
    parts = {part: ms(layer.get(part)) for part in SHOWN}
    if layer:
        parts["projections"] += f" ({layer['projections'] / case['projections_floor_ms']:.2f}×)"
    return [
        case["case"], str(case["cp"]), str(case["rows"]), f"{run['selection']} ({run['union_tokens']:.0f})",
        ms(run.get("device_ms")), ms(run["wall_ms"]), *parts.values(), ms(run.get("mixer_ms")),
        ms((case["goals_ms"] or {}).get(run["selection"])), ms(case["published_ms"]),
        f"{run['host_us']:.0f}", f"{case['plan_us']:.0f}", f"{case['temporary_bytes'] / 2**20:.0f}",
    ]  # fmt: skip


def ms(value: float | None) -> str:
    """Three digits, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
