"""A record of all ranks as lines for people."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from jaxcp.bench.prefill.published import PUBLISHED_LAYERS, PUBLISHED_ON
from jaxcp.bench.prefill.table import filled, lines_by, ms, titled

HEADING = (
    "case", "ranks", "K/V", "wall ms", "per layer", "exposed", "gathers", "exposed / gathers", "published", "host µs",
    "plan µs", "MiB",
)  # fmt: skip
EXPLAINED = (
    "Wall time of a forward, ms; per layer: all of it, what it has more than with all rows there already (local), "
    "and kernel time of the gathers on the slowest device, waiting for peers included. Published: per layer of "
    f"{PUBLISHED_LAYERS} on as many {PUBLISHED_ON}s, another implementation on another GPU. Host: to start a forward. "
    "MiB: beside arguments and results"
)


def lines(record: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of `HEADING`."""
    return lines_by(record, _line)


def table(record: dict[str, Any]) -> Table:
    """The record for a terminal, and what was left out."""
    title = f"{record['layers']} QSA layers on all ranks, {record['environment']['device_kind']}"
    left_out = {way: why for case in record["cases"] for way, why in case["left_out"].items()}
    caption = "; ".join([EXPLAINED, *(f"left out: {way} ({why})" for way, why in left_out.items())])
    return filled(titled(title, record), escape(caption), HEADING, lines(record))


def _line(case: dict[str, Any], run: dict[str, Any]) -> list[str]:
    gathers, exposed = run.get("layer_ms", {}).get("gathers"), run["exposed_ms"]
    share = f"{exposed / gathers:.0%}" if gathers and exposed is not None else "-"
    return [
        case["case"], str(case["cp"]), run["way"], ms(run["wall_ms"]), ms(run["wall_ms"] / case["layers"]), ms(exposed),
        ms(gathers), share, ms(case["published_ms"]), f"{run['host_us']:.0f}", f"{case['plan_us']:.0f}",
        f"{run['temporary_bytes'] / 2**20:.0f}",
    ]  # fmt: skip
