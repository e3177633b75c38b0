"""Geometry of a QSA layer."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout import positive_int

_COUNTS = ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "index_heads", "index_dim", "budget", "ratio")


@dataclasses.dataclass(frozen=True)
class QSAConfig:
    """Sizes and constants of one QSA layer (Qwen sparse attention); there is one index key head by definition.

    Attributes:
      hidden: features of a token row.
      heads: query heads of the main attention; a multiple of `kv_heads`.
      kv_heads: key/value heads.
      head_dim: width of a query, key or value vector.
      rotary_dim: leading features rotated, in main and index heads alike; even.
      rope_theta: base of the rotary frequencies.
      mrope_section: rotary pairs that read the temporal, height and width position; they sum to rotary_dim / 2.
      index_heads: query heads of the indexer.
      index_dim: width of an index query or key.
      budget: tokens selected out of complete blocks; a multiple of `ratio`.
      ratio: tokens per block, i.e. per compressed index key.
      eps: added to the mean square in every norm.

    Raises:
      ValueError: a size that is not positive, or sizes that do not fit together.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: Sequence[int]
    index_heads: int
    index_dim: int
    budget: int
    ratio: int
    eps: float = 1e-6

    @classmethod
    def flash_next(cls) -> "QSAConfig":
        """Geometry of Qwen3.8-Flash-Next: 2048 of the visible tokens in blocks of 4, 24 query heads on 2 KV heads."""
        return cls(
            hidden=2560,
            heads=24,
            kv_heads=2,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            mrope_section=(11, 11, 10),
            index_heads=4,
            index_dim=128,
            budget=2048,
            ratio=4,
        )

    def __post_init__(self):
        for name in _COUNTS:
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))
        for name in ("rope_theta", "eps"):
            object.__setattr__(self, name, _positive_float(name, getattr(self, name)))
        if self.heads % self.kv_heads:
            raise invalid(
                "heads",
                self.heads,
                f"a multiple of kv_heads = {self.kv_heads}",
                "Every KV head serves the same number of query heads.",
            )
        if self.budget % self.ratio:
            raise invalid("budget", self.budget, f"a multiple of ratio = {self.ratio}", "Whole blocks are selected.")
        self._check_rotary()

    def _check_rotary(self):
        limit = min(self.head_dim, self.index_dim)
        if self.rotary_dim % 2 or self.rotary_dim > limit:
            raise invalid(
                "rotary_dim",
                self.rotary_dim,
                f"an even number <= min(head_dim, index_dim) = {limit}",
                "Main and index heads share the rotary table.",
            )
        section = tuple(int(s) for s in self.mrope_section)
        object.__setattr__(self, "mrope_section", section)
        if len(section) != 3 or min(section) < 0 or sum(section) != self.rotary_dim // 2:
            raise invalid(
                "mrope_section",
                section,
                f"three counts that sum to rotary_dim / 2 = {self.rotary_dim // 2}",
                "Give the rotary pairs of (temporal, height, width).",
            )
        placed = tuple(int((self.mrope_axes == axis).sum()) for axis in range(3))
        if placed != section:
            raise invalid(
                "mrope_section",
                section,
                f"counts that interleave, such as {placed}",
                "Pair i belongs to axis i mod 3 while that axis has pairs left; height and width must fit.",
            )

    @property
    def mrope_axes(self) -> np.ndarray:
        """Axis (0 temporal, 1 height, 2 width) whose position each rotary pair reads: int [rotary_dim / 2].

        axis(i) = a if i mod 3 = a and i < 3 s_a, for a = 1, 2; otherwise 0
        """
        axes = np.zeros(self.rotary_dim // 2, int)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    @property
    def selected_blocks(self) -> int:
        """Blocks selected per query row at most: budget / ratio."""
        return self.budget // self.ratio

    @property
    def row_width(self) -> int:
        """Tokens a query row attends to at most: the budget and an incomplete block."""
        return self.budget + self.ratio - 1

    @property
    def scale(self) -> float:
        """Softmax scale of the main attention: head_dim ** -0.5."""
        return self.head_dim**-0.5


def _positive_float(name, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not 0 < value < math.inf:
        raise invalid(name, repr(value), "a finite number > 0", f"Give {name} as a float.")
    return float(value)
