"""A timeline as a picture: a lane per stream, a colour per part of the layer."""

import os
from typing import Any

from jaxcp.bench import plot
from jaxcp.bench.parts import PARTS
from jaxcp.bench.timeline import MICROSECONDS, Span, Timeline

COLORS = {"projections": "C0", "indexer": "C1", "attention": "C2", "gathers": "C3", "rest": "0.75"}
WIDTH_IN = 13
LABEL_CHARACTERS = 220
"""Characters that fit in the picture's width."""


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draws the timeline into a file; raises as `plot.check` does."""
    lanes, begin, end = timeline.lanes, timeline.spans[0].start, timeline.end
    with plot.subplots(path, timeline.of, 1, figsize=(WIDTH_IN, 1.5 + 0.55 * len(lanes))) as (axis,):
        for place, lane in enumerate(lanes):
            spans = [span for span in timeline.spans if span.lane == lane]
            _draw_lane(axis, place, spans, (end - begin) / LABEL_CHARACTERS)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.set_ylim(len(lanes) - 0.4, -0.6)
        axis.set_xlim(begin, end)
        in_order = "operations in the order of the schedule: no times"
        axis.set_xlabel("µs" if timeline.unit == MICROSECONDS else in_order)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)


def _draw_lane(axis: Any, place: int, spans: list[Span], character: float) -> None:
    """One lane; labels where there is room for them, `character` being the width of a letter."""
    for part, color in COLORS.items():
        if bars := [(span.start, span.end - span.start) for span in spans if span.part == part]:
            look = {"facecolors": color, "edgecolor": "white", "linewidth": 0.4, "label": PARTS[part]}
            axis.broken_barh(bars, (place - 0.35, 0.7), **look)
    for span in spans:
        if len(span.label) * character <= span.end - span.start:
            middle = (span.start + span.end) / 2
            axis.text(middle, place, span.label, ha="center", va="center", fontsize=7, color="white", clip_on=True)
