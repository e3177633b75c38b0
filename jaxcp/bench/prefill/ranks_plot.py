"""A record of all ranks as a picture: a layer's wall time by when and how K and V travel."""

import os
from typing import Any

from jaxcp.bench import plot
from jaxcp.bench.prefill.published import PUBLISHED_ON
from jaxcp.bench.prefill.table import titled


def draw(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the record into a file; raises as `plot.check` does."""
    cases = record["cases"]
    title = f"Context-parallel prefill on {record['environment']['device_kind']}, {record['date'][:10]}"
    with plot.subplots(
        path, titled(title, record), max(1, len(cases)), figsize=(max(9, 1 + 2 * len(cases)), 4.5)
    ) as axes:
        for axis, case in zip(axes, cases, strict=False):
            per_layer = {run["way"]: run["wall_ms"] / case["layers"] for run in case["runs"]}
            axis.bar(range(len(per_layer)), per_layer.values(), color="C0", width=0.7)
            axis.set_xticks(range(len(per_layer)), per_layer, rotation=90)
            if case["published_ms"]:
                axis.axhline(case["published_ms"], color="gray", linestyle=":", label=f"published, on {PUBLISHED_ON}s")
            axis.set_title(f"{case['case']}, {case['cp']} ranks", fontsize=9)
        axes[0].set_ylabel("wall ms per layer")
