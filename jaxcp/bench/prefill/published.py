"""What else is known about the same batches: published totals of another implementation and GPU, and our goals."""

PUBLISHED_LAYERS = 12
PUBLISHED_ON = "B200"
PUBLISHED_MS = {
    (4, "8K"): (29.24, 21.49), (4, "32K"): (68.45, 58.94), (4, "128K"): (431.42, 418.46),
    (8, "8K"): (24.52, 21.25), (8, "32K"): (43.57, 33.26), (8, "128K"): (229.28, 215.77),
    (4, "8K+56K"): (35.6, 25.64), (4, "4x8K"): (66.3, 55.85),
}  # fmt: skip
"""(ranks, case) -> ms of a forward of twelve QSA layers on as many B200s, gathers included, before and after host
synchronisations were removed and the K/V gather overlapped: sglang pull request 43792, which does not say whether
projections are in it."""

GOALS_MS = {
    (4, "8K"): {"random": 0.8, "shared": 0.8}, (4, "32K"): {"random": 5.2, "shared": 2.4},
    (4, "128K"): {"random": 25.0, "shared": 12.0}, (8, "32K"): {"random": 2.8, "shared": 1.3},
    (8, "128K"): {"random": 12.5, "shared": 6.5},
}  # fmt: skip
"""(ranks, case) -> ms of a layer's mixer, which is the layer without projections, on one H200, by selection."""

GOAL_HOST_US = 300
"""To start a forward, whatever its length."""


def beside(cp: int, case: str) -> dict[str, object]:
    """What a record says beside its own figures, per layer; None where nothing is known."""
    before, after = PUBLISHED_MS.get((cp, case), (None, None))
    return {
        "published_ms": after and round(after / PUBLISHED_LAYERS, 3),
        "published_before_ms": before and round(before / PUBLISHED_LAYERS, 3),
        "goals_ms": GOALS_MS.get((cp, case)),
    }
