"""Cuts of a zigzag batch by cost instead of by tokens.

Zigzag blocks of equal length equalise what grows linearly with the position, i.e. scoring. Attention grows up to the
budget and stays there, so the rank with a request's first block has less of it: with 8K tokens on four ranks the others
have 4 % more FLOP than the mean, projections included, and 14 % more without them; at 32K it is 1 and 3 %. Blocks of
equal cost give every rank the same, at the price of more rows, and more to gather, on ranks whose rows are cheap.

    cost(p) = row + token |I(p)| + block v(p)        |I(p)| = min(p + 1, budget), v(p) = floor((p + 1) / ratio)
"""

import dataclasses
import math

import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout import Split
from jaxcp.qsa.config import QSAConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a query row costs, in any unit: FLOP from `of`, or measured microseconds.

    Attributes:
      row: of a row whatever its position: projections.
      token: per token it attends to.
      block: per block it scores.
      budget, ratio: of the layer.
    """

    row: float | int
    token: float | int
    block: float | int
    budget: int
    ratio: int

    def __post_init__(self):
        parts = self.row, self.token, self.block
        if not all(0 <= part < math.inf for part in parts) or not any(parts):
            raise invalid(
                "cost", f"(row, token, block) = {parts}", "numbers >= 0, not all 0", "Costs add up over rows."
            )

    @classmethod
    def of(cls, config: QSAConfig) -> "Cost":
        """FLOP of a row: its products with weights, attention, scoring."""
        c = config
        outputs = c.heads * 3 * c.head_dim + 2 * c.kv_heads * c.head_dim + (c.index_heads + 1) * c.index_dim
        return cls(
            row=2 * c.hidden * outputs,
            token=4 * c.heads * c.head_dim,
            block=2 * c.index_heads * c.index_dim,
            budget=c.budget,
            ratio=c.ratio,
        )

    def below(self, position: np.ndarray) -> np.ndarray:
        """Cost of a request's first `position` rows together."""
        n = np.asarray(position, np.int64)
        short = np.minimum(n, self.budget)
        tokens = short * (short + 1) // 2 + (n - short) * self.budget
        whole = n // self.ratio
        blocks = self.ratio * whole * (whole - 1) // 2 + whole * (n - whole * self.ratio + 1)
        return self.row * n + self.token * tokens + self.block * blocks


def cuts(cost: Cost, lengths: np.ndarray, prefix: np.ndarray, cp: int, unit: int = 1) -> np.ndarray:
    """Starts of 2 cp blocks of equal cost per request, int64 [requests, 2 cp + 1]; multiples of `unit` inside."""
    share = np.arange(2 * cp + 1) / (2 * cp)
    done = cost.below(prefix)[:, None]
    wanted = done + share * (cost.below(prefix + lengths)[:, None] - done)
    low, high = (np.broadcast_to(a[:, None], wanted.shape) for a in (np.zeros_like(lengths), lengths))
    while (low < high).any():  # the first token count that costs what is wanted
        middle = (low + high) // 2
        enough = cost.below(prefix[:, None] + middle) >= wanted
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    low = np.minimum((low + unit // 2) // unit * unit, lengths[:, None])
    low[:, 0], low[:, -1] = 0, lengths
    return low


def of_ranks(cost: Cost, split: Split, prefix: np.ndarray) -> np.ndarray:
    """What every rank's rows cost, [cp]; of host lengths in the zigzag layout."""
    totals = np.zeros(split.cp)
    for rank in range(split.cp):
        runs = split.runs(rank)
        start = np.asarray(prefix)[runs.request] + runs.offset
        totals[rank] = (cost.below(start + runs.count) - cost.below(start)).sum()
    return totals
