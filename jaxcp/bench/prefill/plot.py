"""A record of a rank's share as a picture: a layer's parts on top of each other, goals and published figures beside."""

import os
from typing import Any

from jaxcp.bench import plot
from jaxcp.bench.prefill.published import PUBLISHED_ON
from jaxcp.bench.prefill.table import SHOWN, titled


def draw(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the record into a file; raises as `plot.check` does."""
    cases = record["cases"]
    title = f"A rank's share of prefill on {record['environment']['device_kind']}, {record['date'][:10]}"
    with plot.subplots(
        path, titled(title, record), max(1, len(cases)), figsize=(max(9, 1 + 2 * len(cases)), 4.5)
    ) as axes:
        for axis, case in zip(axes, cases, strict=False):
            _draw_case(axis, case)
        axes[0].set_ylabel("ms per layer")


def _draw_case(axis: Any, case: dict[str, Any]) -> None:
    """A bar per selection: its parts, or the wall time where kernels were not timed."""
    runs = case["runs"]
    for x, run in enumerate(runs):
        bottom, layer = 0.0, run.get("layer_ms", {})
        for i, (part, label) in enumerate(SHOWN.items()):
            if part in layer:
                axis.bar(x, layer[part], bottom=bottom, color=f"C{i}", width=0.7, label=label)
                bottom += layer[part]
        if not layer:
            axis.bar(x, run["wall_ms"] / case["layers"], color="lightgray", width=0.7, label="wall time")
        elif goal := (case["goals_ms"] or {}).get(run["selection"]):
            goal += layer["projections"]
            axis.hlines(goal, x - 0.45, x + 0.45, color="black", label="goal, on projections")
    if case["published_ms"]:
        axis.axhline(case["published_ms"], color="gray", linestyle=":", label=f"published, on {PUBLISHED_ON}s")
    axis.set_xticks(range(len(runs)), [run["selection"] for run in runs], rotation=90)
    axis.set_title(f"{case['case']}, {case['cp']} ranks", fontsize=9)
