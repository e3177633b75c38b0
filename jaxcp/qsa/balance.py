"""Cuts of a zigzag batch that give ranks equal work, not only equally many rows.

Zigzag blocks of equal length equalise what grows linearly with the position, i.e. scoring. Attention grows up to the
budget and stays there, so the rank with a request's first block has less of it: with 8K tokens on four ranks the one
with most to do has 14 % more FLOP than the mean, with 4K tokens 25 %, with 32K 3 %.

What every row costs alike, its products with weights and its place in an array, is levelled by equally many rows; they
must stay equal, since all ranks' arrays are as large as the fullest's. Both can be: rank r's blocks are the two between
cuts r, r + 1 and 2c - 1 - r, 2c - r, so ranks j and up hold what lies between cuts j and 2c - j. The two move together,
which changes what lies between but not how much, until it costs its share:

    cuts s_j and s_j + m_j,  m_j as in blocks of equal length:  sum_{s_j <= i < s_j + m_j} cost(prefix + i) = C m_j / L
    cost(p) = token |I(p)| + block v(p)        |I(p)| = min(p + 1, budget), v(p) = floor((p + 1) / ratio)

Costs never fall with the position, so there is a solution for every j, and they lie inside each other.
"""

import dataclasses
import math

import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout import Split, Zigzag
from jaxcp.qsa.config import QSAConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a query row costs beside what all rows cost alike, in any unit: FLOP from `of`, or measured microseconds.

    Attributes:
      token: per token it attends to.
      block: per block it scores.
      budget, ratio: of the layer.
    """

    token: float | int
    block: float | int
    budget: int
    ratio: int

    def __post_init__(self):
        parts = self.token, self.block
        if not all(0 <= part < math.inf for part in parts) or not any(parts):
            raise invalid("cost", f"(token, block) = {parts}", "numbers >= 0, not both 0", "Costs add up over rows.")

    @classmethod
    def of(cls, config: QSAConfig) -> "Cost":
        """FLOP of a row's attention and scoring."""
        c = config
        return cls(
            token=4 * c.heads * c.head_dim, block=2 * c.index_heads * c.index_dim, budget=c.budget, ratio=c.ratio
        )

    def below(self, position: np.ndarray) -> np.ndarray:
        """Cost of a request's first `position` rows together."""
        n = np.asarray(position, np.int64)
        short = np.minimum(n, self.budget)
        tokens = short * (short + 1) // 2 + (n - short) * self.budget
        whole = n // self.ratio
        blocks = self.ratio * whole * (whole - 1) // 2 + whole * (n - whole * self.ratio + 1)
        return self.token * tokens + self.block * blocks


def cuts(cost: Cost, lengths: np.ndarray, prefix: np.ndarray, cp: int, unit: int = 1) -> np.ndarray:
    """Starts of 2 cp blocks per request, int64 [requests, 2 cp + 1], multiples of `unit` inside.

    Every rank holds as many rows as with blocks of equal length, and its rows cost what the other ranks' do.
    """
    starts = Zigzag(cp).split(lengths // unit).starts.astype(np.int64)
    total, early, late = starts[:, -1:], starts[:, 1:cp], starts[:, 2 * cp - 1 : cp : -1]
    between = late - early

    def spent(start, end):
        return cost.below(prefix[:, None] + unit * end) - cost.below(prefix[:, None] + unit * start)

    wanted = spent(0, total) * (between / np.maximum(total, 1))
    low, high = np.zeros_like(between), total - between
    while (low < high).any():  # the first start from which as many rows cost what is wanted
        middle = (low + high) // 2
        enough = spent(middle, middle + between) >= wanted
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    for j in range(1, cp - 1):  # where costs are flat, rounding alone decides; blocks stay in order
        low[:, j] = np.clip(low[:, j], low[:, j - 1], (low + between)[:, j - 1] - between[:, j])
    starts[:, cp] += low[:, -1] - early[:, -1]  # parts the last rank's two blocks, which are one run of tokens
    starts[:, 1:cp], starts[:, 2 * cp - 1 : cp : -1] = low, low + between
    starts *= unit
    starts[:, -1] = lengths
    return starts


def of_ranks(cost: Cost, split: Split, prefix: np.ndarray) -> np.ndarray:
    """What every rank's rows cost, [cp]; of host lengths in the zigzag layout."""
    totals = np.zeros(split.cp)
    for rank in range(split.cp):
        runs = split.runs(rank)
        start = np.asarray(prefix)[runs.request] + runs.offset
        totals[rank] = (cost.below(start + runs.count) - cost.below(start)).sum()
    return totals
