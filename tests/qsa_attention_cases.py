"""The table of sparse attention cases that every implementation is run through, and its float64 oracle."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import qsa_oracle as oracle
from qsa_cases import LAYERS, Requests, accumulation, cache, every_layer, serve_or_skip

from jaxcp import qsa
from jaxcp.qsa.resolve import Implementation
from jaxcp.storage import page_dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that attend to the blocks `choice` gives them (see `_CHOICES`), each block `ratio` tokens.

    Attributes:
      blocks: a row selects at most.
      sharpness: factor of the queries: 8 makes softmaxes in which few tokens have all the weight.
    """

    choice: str
    heads: int
    kv_heads: int
    dim: int
    requests: Requests
    ratio: int = 4
    blocks: int = 20
    page_size: int = 64
    kv_dtype: str | None = None
    sharpness: float = 1

    def __str__(self) -> str:
        stored = f"-{self.kv_dtype}" if self.kv_dtype else ""
        sharp = f"-sharp{self.sharpness}" if self.sharpness != 1 else ""
        return (
            f"{self.choice}-{self.requests.name}-h{self.heads}x{self.kv_heads}-d{self.dim}-r{self.ratio}"
            f"-k{self.blocks}-p{self.page_size}{stored}{sharp}"
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def config(self) -> qsa.QSAConfig:
        return qsa.QSAConfig(
            hidden=8, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim, rotary_dim=2, rope_theta=1e4,
            mrope_section=(1, 0, 0), index_heads=1, index_dim=2, budget=self.blocks * self.ratio, ratio=self.ratio,
        )  # fmt: skip

    def selection(self, rng: np.random.Generator) -> np.ndarray:
        """int32 [rows, blocks], ids in front and -1 behind."""
        ids = np.full((self.requests.rows, self.blocks), -1, np.int32)
        base = rng.random((len(self.requests.lengths), max(self.requests.prefixes) + self.requests.longest))
        for row, request, position in self.requests.places:
            visible = (position + 1) // self.ratio
            rank = _CHOICES[self.choice](row, np.arange(visible), base[request, :visible], rng.random(visible))
            chosen = np.sort(np.argsort(rank)[: self.blocks])
            ids[row, : len(chosen)] = chosen
        return ids

    def problem(self, dtype: str) -> "Problem":
        """Everything a call takes. K and V are NaN except where a row attends to them."""
        rng = np.random.default_rng(list(str(self).encode()))
        blocks = self.selection(rng)
        q = self.sharpness * rng.standard_normal((self.requests.rows, self.heads, self.dim), np.float32)
        empty = cache(self.config, self.requests, self.page_size, dtype, kv_dtype=self.kv_dtype)
        attended = [_places(self, blocks, empty.page_table, *place) for place in self.requests.places]
        page, place = np.unique(np.concatenate([np.zeros((2, 0), int), *attended], 1), axis=1)
        pools = []
        for _ in "kv":
            pool = np.full(empty.k.shape, np.nan, empty.kv_dtype)
            pool[:, page, place] = rng.standard_normal((LAYERS, len(page), *pool.shape[3:]), np.float32)
            pools.append(pool.view(page_dtype(empty.kv_dtype)))
        filled = dataclasses.replace(empty, k=pools[0], v=pools[1])
        return Problem(self, q.astype(jnp.dtype(dtype)), blocks, filled)


class Problem(NamedTuple):
    """Inputs of a case; q [rows, heads, dim], blocks [rows, k]."""

    case: Case
    q: np.ndarray
    blocks: np.ndarray
    cache: qsa.Cache


def call(attend, q, blocks, cache, layer, queries, config):
    """(o, lse) of one layer: the one place that knows an implementation's arguments and results."""
    partial = attend(q, blocks, cache, layer, queries, config)
    return partial.o, partial.lse


def run(implementation: Implementation, problem: Problem, how: Callable = every_layer):
    """o [layers, rows, heads, dim] and lse [layers, rows, heads] of an implementation, as `how` makes them."""
    case, q, blocks, cache = problem
    attend = serve_or_skip(implementation, case.config, cache)
    return how(call, attend, case.config, case.requests, cache, q, blocks)


def check(problem: Problem, results: tuple[np.ndarray, np.ndarray]) -> None:
    """Results of every layer against the oracle.

    Logits and LSE: sums of products, exact to 16 roundings of their terms' magnitudes (256 terms, and tensor cores cut
    off instead of rounding); a token too many or too few is hundreds of times that. o: besides, it is rounded, and so
    are the probabilities, each to half a unit of q's dtype.
    """
    o, lse = results
    assert o.dtype == problem.q.dtype
    assert o.shape == (LAYERS, *problem.q.shape)
    assert lse.shape == o.shape[:-1]
    eps, unit = float(np.finfo(accumulation(o.dtype)).eps), float(jnp.finfo(o.dtype).eps) / 2
    padding = np.ones(len(problem.q), bool)
    padding[[row for row, *_ in problem.case.requests.places]] = False
    assert not o[:, padding].any(), "a row without tokens is 0"
    assert np.isneginf(lse[:, padding]).all()
    for layer, row, want in expected(problem):
        of_logits = 16 * eps * want.reach
        of_o = unit * np.abs(want.o) + (1.01 * unit + 2 * of_logits[:, None] + 16 * eps) * want.magnitude
        within("o", o[layer, row], want.o, of_o, layer, row)
        within("lse", lse[layer, row], want.lse, of_logits + 8 * eps * (1 + np.abs(want.lse)), layer, row)


def within(name: str, got: np.ndarray, want: np.ndarray, tolerance: np.ndarray, layer: int, row: int) -> None:
    worst = np.max(np.abs(got.astype(np.float64) - want) / tolerance)  # NaN fails
    assert worst <= 1, f"{name} of layer {layer}, row {row}: error is {worst:.3g} times the tolerance"


class Expected(NamedTuple):
    """A row's results, and how large the terms were that made them.

    o: [heads, dim]. lse: [heads]. magnitude: like o, sum_t p_t |v_t|. reach: [heads], the largest sum_d |q_d k_d|.
    """

    o: np.ndarray
    lse: np.ndarray
    magnitude: np.ndarray
    reach: np.ndarray


def expected(problem: Problem) -> Iterator[tuple[int, int, Expected]]:
    """(layer, row, what it gives) of every row that is no padding; queries are scaled and rounded as the layer says."""
    case, q, blocks, cache = problem
    wide = accumulation(q.dtype)
    scaled = q.astype(wide) * wide.type(case.config.scale * math.log2(math.e))
    scaled = scaled.astype(q.dtype).astype(np.float64)
    k_pool, v_pool = (pool.view(cache.kv_dtype) for pool in (cache.k, cache.v))
    for layer, (row, request, position) in itertools.product(range(LAYERS), case.requests.places):
        at = layer, *_places(case, blocks, cache.page_table, row, request, position)
        k, v = (pool[at].astype(np.float64) for pool in (k_pool, v_pool))
        o, lse, p = oracle.attention(scaled[row], k, v)
        magnitude = (p @ np.abs(v).transpose(1, 0, 2)).reshape(o.shape)
        reach = np.abs(scaled[row]).reshape(case.kv_heads, case.group, -1) @ np.abs(k).transpose(1, 2, 0)
        yield layer, row, Expected(o, lse, magnitude, reach.max(-1).ravel())


def _places(case: Case, blocks, page_table, row: int, request: int, position: int) -> np.ndarray:
    """Pages and places of the tokens that a row attends to, int [2, tokens]."""
    chosen = blocks[row][blocks[row] >= 0]
    tokens = oracle.tokens(chosen, position, case.ratio)
    return np.stack([page_table[request, tokens // case.page_size], tokens % case.page_size])


# What neighbouring rows share: the blocks of smallest rank are chosen. `base` is the same for all rows of a request.


def _random(row, block, base, own):
    return own


def _shared(row, block, base, own):
    return base


def _half(row, block, base, own):
    return np.where(block % 2, own, base)


def _disjoint(row, block, base, own):
    """Nothing among eight neighbours that see enough blocks."""
    return own + (block % 8 != row % 8)


_CHOICES = {"random": _random, "shared": _shared, "half": _half, "disjoint": _disjoint}

RAGGED = Requests("ragged", (1, 3, 13, 2, 5), (0, 64, 645, 2, 30), longest=16, rows=32, gap=1)
"""Several requests in every tile, rows without any complete block, every tail, padding between and behind."""
NOTHING = dataclasses.replace(RAGGED, name="nothing", lengths=(0,) * 5)
DECODE = Requests("decode", (1,) * 6, (300, 3, 0, 82, 81, 100), longest=1, rows=8)
ONE = Requests("one", (1,), (650,), longest=1, rows=1)

SHARING = tuple(
    Case(choice, *shape, RAGGED)
    for shape in ((24, 2, 256), (8, 1, 128), (16, 1, 64), (3, 3, 64))
    for choice in _CHOICES
)
"""Every choice with every group size and dim."""

SPECIAL = (
    Case("random", 24, 2, 256, RAGGED, sharpness=8),
    Case("random", 24, 2, 256, NOTHING),
    Case("random", 24, 2, 256, ONE, blocks=100),
    Case("shared", 144, 9, 128, DECODE, ratio=1, blocks=50),
    Case("random", 40, 1, 64, DECODE, ratio=2, blocks=80),
    Case("half", 32, 32, 64, RAGGED, ratio=16, blocks=7, page_size=16),
    Case("random", 12, 1, 64, RAGGED, ratio=3, page_size=24),
    Case("random", 8, 1, 64, RAGGED, kv_dtype="float8_e4m3fn"),
)

CASES = SHARING + SPECIAL
