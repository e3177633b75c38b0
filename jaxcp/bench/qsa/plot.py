"""A record of the benchmark as a picture: every implementation, peer and floor of a part, on one axis of time."""

import os
from typing import Any

from jaxcp.bench import plot
from jaxcp.bench.qsa.table import PARTS, case_name

DRAWN = ("select", "attend", "mixer")


def draw(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the record into a file; raises as `plot.check` does."""
    columns = {part: _columns(record, part) for part in DRAWN}
    names = list(dict.fromkeys(name for c in columns.values() for marks in c.values() for name in marks))
    title = f"QSA layer on {record['environment']['device_kind']}, {record['date'][:10]}"
    widths = [max(1, len(c)) for c in columns.values()]
    with plot.subplots(path, title, len(DRAWN), figsize=(15, 5), width_ratios=widths) as axes:
        for axis, (part, marked) in zip(axes, columns.items(), strict=True):
            _draw_part(axis, PARTS[part], marked, names)


def _columns(record: dict[str, Any], part: str) -> dict[str, dict[str, float]]:
    """Label -> name -> ms: a column per case and selection, with its implementations, peers and floors."""
    found: dict[str, dict[str, float]] = {}
    for case in record["cases"]:
        shown = {None, "own", *case["union_tokens"]}  # models mean something where rows have neighbours
        figures = [f for f in case["figures"] if f["part"] == part and f["selection"] in shown]
        for selection in dict.fromkeys(f["selection"] for f in figures if not f["peer"]):
            label = case_name(case) + (f"\n{selection}" if part == "attend" else "")
            marks = found.setdefault(label, {})
            for f in figures:
                if f["selection"] == selection or (f["peer"] and f["selection"] is None):
                    marks[f["name"]] = f["us"] / 1e3
                    marks |= {f"floor: {name}": us / 1e3 for name, us in f["floors_us"].items()}
    return found


def _draw_part(axis: Any, title: str, columns: dict[str, dict[str, float]], names: list[str]) -> None:
    """One part: columns of marks, bars for floors."""
    axis.set_title(title)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.grid(axis="y", alpha=0.3)
    for i, name in enumerate(names):
        at = [(x, marks[name]) for x, marks in enumerate(columns.values()) if name in marks]
        if at:
            mark = ("_", 200) if name.startswith("floor") else (plot.MARKERS[i % len(plot.MARKERS)], 30)
            axis.scatter(*zip(*at, strict=True), label=name, color=f"C{i}", marker=mark[0], s=mark[1])
    axis.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    axis.set_xlim(-0.7, len(columns) - 0.3)
