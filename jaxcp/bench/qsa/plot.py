"""A record of the benchmark as a picture: every implementation, peer and floor of a part, on one axis of time."""

import importlib.util
import os
import pathlib
from typing import Any

from jaxcp.bench.qsa.table import PARTS, case_name
from jaxcp.errors import BackendError, invalid

FORMATS = (".svg", ".png", ".pdf")
DRAWN = ("select", "attend", "mixer")
MARKERS = "osD^vPX*<>pdhH8"  # more than the ten colours, so that no two names look alike


def check(path: str | os.PathLike[str]) -> None:
    """Raises unless `draw` can write there: ask before a long measurement.

    Raises:
      ValueError: a format that is not drawn.
      BackendError: matplotlib is not installed.
    """
    if (suffix := pathlib.Path(path).suffix) not in FORMATS:
        raise invalid("plot", repr(suffix), f"a file named {' or '.join(FORMATS)}", "Choose another name.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("plot: matplotlib is not installed; expected it. pip install 'jaxcp[bench]'.")


def draw(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the record into a file; raises as `check` does."""
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxcp"  # the same record gives the same file
    import matplotlib.pyplot as plt

    columns = {part: _columns(record, part) for part in DRAWN}
    figure, axes = plt.subplots(
        1, len(DRAWN), figsize=(15, 5), width_ratios=[max(1, len(c)) for c in columns.values()], layout="constrained"
    )
    names = list(dict.fromkeys(name for c in columns.values() for marks in c.values() for name in marks))
    for axis, (part, marked) in zip(axes, columns.items(), strict=True):
        _draw_part(axis, PARTS[part], marked, names)
    handles = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"QSA layer on {record['environment']['device_kind']}, {record['date'][:10]}")
    folder = pathlib.Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if pathlib.Path(path).suffix == ".svg" else None)
    plt.close(figure)


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
            mark = ("_", 200) if name.startswith("floor") else (MARKERS[i % len(MARKERS)], 30)
            axis.scatter(*zip(*at, strict=True), label=name, color=f"C{i}", marker=mark[0], s=mark[1])
    axis.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    axis.set_xlim(-0.7, len(columns) - 0.3)
