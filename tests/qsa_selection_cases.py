"""The table of block selection cases that every implementation is run through, and its exact oracle."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import qsa_oracle as oracle
from qsa_cases import LAYERS, Requests, accumulation, cache, every_layer, serve_or_skip
from qsa_runs import ids, same_selection

from jaxcp import qsa
from jaxcp.qsa.resolve import Implementation
from jaxcp.storage import page_dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that select among their request's blocks; `filling` names what the scores are like (see `_FILLINGS`)."""

    filling: str
    heads: int
    dim: int
    k: int
    requests: Requests
    ratio: int = 4
    page_size: int = 64
    index_dtype: str | None = None

    def __str__(self) -> str:
        stored = f"-{self.index_dtype}" if self.index_dtype else ""
        return (
            f"{self.filling}-{self.requests.name}-h{self.heads}-d{self.dim}-k{self.k}-r{self.ratio}"
            f"-p{self.page_size}{stored}"
        )

    @property
    def config(self) -> qsa.QSAConfig:
        return qsa.QSAConfig(
            hidden=8, heads=1, kv_heads=1, head_dim=2, rotary_dim=2, rope_theta=1e4, mrope_section=(1, 0, 0),
            index_heads=self.heads, index_dim=self.dim, budget=self.k * self.ratio, ratio=self.ratio,
        )  # fmt: skip

    def problem(self, dtype: str) -> "Problem":
        """Everything a call takes. Keys behind a request's last whole block, and in no request's pages, are poison."""
        rng = np.random.default_rng(list(str(self).encode()))
        empty = cache(self.config, self.requests, self.page_size, dtype, index_dtype=self.index_dtype)
        last = {request: position for _, request, position in self.requests.places}
        blocks = {request: np.arange((position + 1) // self.ratio) for request, position in last.items()}
        page, place = np.concatenate([self.place(empty.page_table[r], ids) for r, ids in blocks.items()], 1)
        q = np.zeros((self.requests.rows, self.heads, self.dim), np.float32)
        keys = np.zeros((LAYERS, len(page), self.dim), np.float32)
        _FILLINGS[self.filling](rng, q, keys, np.concatenate(list(blocks.values())))
        pool = np.empty(empty.index.shape, empty.index_dtype)
        pool[:, :, ::2], pool[:, :, 1::2] = np.nan, jnp.finfo(pool.dtype).max
        pool[:, page, place] = keys
        stored = dataclasses.replace(empty, index=pool.view(page_dtype(empty.index_dtype)))
        return Problem(self, q.astype(jnp.dtype(dtype)), stored)

    def place(self, pages: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Page and place of a request's blocks, int [2, blocks]."""
        per_page = self.page_size // self.ratio
        return np.stack([pages[blocks // per_page], blocks % per_page])


class Problem(NamedTuple):
    """Inputs of a case; q [rows, heads, dim]."""

    case: Case
    q: np.ndarray
    cache: qsa.Cache


def call(select, q, cache, layer, queries, config):
    """The selection of one layer: the one place that knows an implementation's arguments."""
    return select(q, cache, layer, queries, config)


def run(implementation: Implementation, problem: Problem, how: Callable = every_layer):
    """Selections [layers, rows, k] of an implementation, as `how` makes them."""
    case, q, cache = problem
    select = serve_or_skip(implementation, case.config, cache)
    return how(call, select, case.config, case.requests, cache, q)


def check(problem: Problem, chosen: np.ndarray) -> None:
    """Selections of every layer against the oracle: equal, where sums are exact.

    Elsewhere a block may stand for another whose score differs by less than 8 roundings of the largest sum of
    magnitudes: float32 sums depend on their order.
    """
    eps = float(np.finfo(accumulation(problem.q.dtype)).eps)
    for layer in range(LAYERS):
        got, want = ids(chosen[layer]), [[] for _ in problem.q]
        for row, score, magnitude in scores(problem, layer):
            want[row] = oracle.largest(score, problem.case.k).tolist()
            if problem.case.filling == "normal" and len(got[row]) == len(want[row]):
                differing = np.setxor1d(got[row], want[row]).astype(int)
                cut = score[want[row]].min(initial=np.inf)
                if (np.abs(score[differing] - cut) <= 8 * eps * magnitude).all():
                    want[row] = got[row]
        same_selection(got, want)


def scores(problem: Problem, layer: int) -> Iterator[tuple[int, np.ndarray, float]]:
    """(row, scores of its visible blocks, largest sum of magnitudes) of every row that is no padding.

    Both operands are rounded as the keys are stored. NaN ranks above every number.
    """
    case, q, cache = problem
    q, index = q.astype(cache.index_dtype).astype(np.float64), cache.index.view(cache.index_dtype)
    for request, places in itertools.groupby(case.requests.places, lambda place: place[1]):
        rows, _, positions = map(list, zip(*places, strict=True))
        visible = [(position + 1) // case.ratio for position in positions]
        page, place = case.place(cache.page_table[request], np.arange(max(visible)))
        keys = index[layer, page, place].astype(np.float64).T
        of_rows = np.maximum(q[rows] @ keys, 0).sum(1)
        magnitude = (np.abs(q[rows]) @ np.abs(keys)).sum(1).max(initial=0)
        of_rows[np.isnan(of_rows)] = np.inf
        yield from ((row, score[:n], magnitude) for row, score, n in zip(rows, of_rows, visible, strict=True))


# What the scores are like: q [rows, heads, dim], keys [layers, keys, dim], each key of its request's block `block`.
# Sums are exact integers below 2^24, but for `_normal`.


def _integers(rng, q, keys, block):
    q[:], keys[:] = rng.integers(-4, 5, q.shape), rng.integers(-4, 5, keys.shape)


def _negative(rng, q, keys, block):
    """No head responds anywhere: ties at 0."""
    q[:], keys[:] = -rng.integers(1, 5, q.shape), rng.integers(1, 5, keys.shape)


def _signed_zeros(rng, q, keys, block):
    """Products of +0 and -0, in every other row of -0 alone."""
    q[:] = np.where(rng.random(q.shape) < 0.5, -0.0, 0.0)
    q[::2] = -0.0
    keys[:] = rng.integers(1, 5, keys.shape)


def _few(rng, q, keys, block):
    """A few winners among thousands of zeros."""
    q[:] = 1
    keys[:, rng.random(len(block)) < 0.005] = 1


def _equal(rng, q, keys, block):
    q[:], keys[:] = rng.integers(1, 5, q.shape), 1


def _borders(rng, q, keys, block):
    """Equal keys on both sides of every multiple of 16, above equal ones elsewhere: cuts fall among both."""
    q[:], keys[:] = 1, 1
    keys[:, (block + 1) % 16 < 2] = 2


def _nearly_equal(rng, q, keys, block):
    """Scores within 16 units in the last place of float32."""
    q[:, 0, :2] = 2**12, 1
    keys[..., 0], keys[..., 1] = 2**11, rng.integers(0, 16, keys.shape[:2])


def _rising(rng, q, keys, block):
    """Every block beats all before it."""
    q[:, 0, :2] = 256, 1
    keys[..., 0], keys[..., 1] = np.divmod(block, 256)


def _nan(rng, q, keys, block):
    _integers(rng, q, keys, block)
    keys[:, block % 7 == 3] = np.nan


def _normal(rng, q, keys, block):
    q[:], keys[:] = rng.standard_normal(q.shape), rng.standard_normal(keys.shape)


_FILLINGS = {
    "integers": _integers, "negative": _negative, "signed_zeros": _signed_zeros, "few": _few, "equal": _equal,
    "borders": _borders, "nearly_equal": _nearly_equal, "rising": _rising, "nan": _nan, "normal": _normal,
}  # fmt: skip

E4M3 = "float8_e4m3fn"
RAGGED = Requests("ragged", (1, 3, 70, 2, 5), (0, 64, 1500, 2, 250), longest=80, rows=88, gap=1)
"""Rows of several requests, without any visible block, with fewer than k, with many; padding between and behind."""
DECODE = Requests("decode", (1,) * 6, (700, 3, 0, 82, 1081, 100), longest=1, rows=8)
LONG = Requests("long", (2,), (65534,), longest=2, rows=4)

RANKING = tuple(Case(filling, 4, 128, 16, RAGGED) for filling in _FILLINGS)
SPECIAL = (
    *(Case(filling, 1, 64, 512, LONG, ratio=1) for filling in ("nearly_equal", "few", "rising")),
    Case("integers", 8, 128, 600, LONG, ratio=64),
    Case("integers", 1, 128, 1, DECODE, ratio=16),
    Case("integers", 3, 64, 30, RAGGED, index_dtype=E4M3, page_size=20),
    Case("normal", 4, 128, 16, RAGGED, index_dtype=E4M3),
    Case("borders", 9, 96, 7, DECODE, ratio=3, page_size=15),
    Case("integers", 4, 128, 2048, RAGGED),
)

CASES = RANKING + SPECIAL
