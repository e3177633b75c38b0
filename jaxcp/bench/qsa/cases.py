"""What is measured: query rows over the caches of requests, filled by the layer itself from random tokens."""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp import qsa
from jaxcp.errors import invalid
from jaxcp.layout import positive_int
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.layer import Products, Projected, prepare, prepare_queries, products
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.rope import Table, table
from jaxcp.qsa.segments import Segments, rows_of
from jaxcp.qsa.update import update

PAGE_SIZE = 64
CHUNK = 4096
"""Tokens that are written into a cache at a time."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Query rows of `requests` requests of `keys` tokens each: their last ones, so that each sees as much as it can.

    A rank's share of a context-parallel prefill has as many rows over as many keys, and never more work.
    """

    rows: int
    keys: int
    requests: int = 1

    def __post_init__(self):
        for name in ("rows", "keys", "requests"):
            positive_int(name, getattr(self, name))
        if self.rows % self.requests or self.rows // self.requests > self.keys:
            raise invalid(
                "rows",
                f"{self.rows} of {self.requests} requests of {self.keys} tokens",
                "as many of each, and no more than its tokens",
                "Measure another case.",
            )

    @property
    def each(self) -> int:
        """Rows of one request."""
        return self.rows // self.requests

    @property
    def positions(self) -> np.ndarray:
        """Position of each row, int64 [rows]."""
        return np.tile(np.arange(self.keys - self.each, self.keys), self.requests)

    @property
    def table(self) -> np.ndarray:
        """`Segments` of the rows as one array, int32 [4, requests]."""
        n = np.arange(self.requests)
        return np.stack([n * self.each, 0 * n + self.each, 0 * n + self.keys - self.each, n]).astype(np.int32)

    def queries(self, table: jax.Array) -> Queries:
        """The rows as selection and attention take them; `table` is the property's, traced."""
        segments = Segments(*table)
        return Queries(segments, rows_of(segments, self.rows), context=self.keys, longest=self.each)

    def __str__(self) -> str:
        what = f"{self.rows} rows over {self.keys} keys"
        return what if self.requests == 1 else f"{what} of each of {self.requests} requests"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case's arrays, on the device.

    Attributes:
      case: what they are of.
      params: random weights.
      cache: holds all tokens, the rows' own included.
      x: [rows, hidden], the rows.
      of: their products.
      q, gate: [rows, heads, head_dim], what becomes of these.
      projected: the rest of it.
      table: the case's.
      layer: of the cache, 0.
    """

    case: Case
    params: qsa.Params
    cache: qsa.Cache
    x: jax.Array
    of: Products
    q: jax.Array
    gate: jax.Array
    projected: Projected
    table: jax.Array
    layer: jax.Array

    @property
    def config(self) -> qsa.QSAConfig:
        """Geometry."""
        return self.params.config


def make_inputs(case: Case, config: qsa.QSAConfig, dtype: str = "bfloat16", seed: int = 0) -> Inputs:
    """Random weights and tokens, and what the layer makes of them. Pages lie in random order."""
    weights, tokens, last = jax.random.split(jax.random.key(seed), 3)
    params = qsa.init_params(config, weights, dtype)
    pages = -(-case.keys // PAGE_SIZE)
    order = np.random.default_rng(seed).permutation(case.requests * pages)
    pool = {"pages": 1 + order.size, "page_size": PAGE_SIZE, "page_table": 1 + order.reshape(case.requests, pages)}
    cache = qsa.init_cache(config, requests=case.requests, dtype=dtype, **pool)
    layer = jax.device_put(np.int32(0))
    for start in range(0, case.keys, CHUNK):
        segment = jax.device_put(np.array([[0], [min(CHUNK, case.keys - start)], [start], [0]], np.int32))
        cache = _write_random(params, cache, jax.random.fold_in(tokens, start), segment, layer, min(CHUNK, case.keys))
    if case.requests > 1:
        cache = _copy_first(cache)
    x = jax.random.normal(last, (case.rows, config.hidden), dtype)
    of = jax.jit(products)(params, x)
    (q, gate), projected, cache = _write_rows(params, cache, of, jax.device_put(case.table), layer)
    return Inputs(case, params, cache, x, of, q, gate, projected, jax.device_put(case.table), layer)


@bind(jax.jit, static_argnums=5, donate_argnums=1)
def _write_random(params, cache, key, segment, layer, tokens: int) -> qsa.Cache:
    of = products(params, jax.random.normal(key, (tokens, params.config.hidden), params.dtype))
    return _written(params, cache, of, _row_angles(params, segment, tokens), segment, layer)[1]


@bind(jax.jit, donate_argnums=1)
def _write_rows(params, cache, of, table, layer):
    angles = _row_angles(params, table, len(of.k))
    return prepare_queries(params, of.q_gate, angles), *_written(params, cache, of, angles, table, layer)


def _row_angles(params, of_segments, rows: int) -> Table:
    position = jnp.maximum(rows_of(Segments(*of_segments), rows).position, 0)
    return table(params.config, jnp.broadcast_to(position, (3, rows)), accumulation_dtype(params.dtype))


def _written(params, cache, of: Products, angles: Table, of_segments, layer) -> tuple[Projected, qsa.Cache]:
    segments, projected = Segments(*of_segments), prepare(params, of, angles)
    rows = rows_of(segments, len(of.k))
    rope = jnp.broadcast_to(jnp.maximum(rows.position, 0), (3, len(of.k)))
    cache, _ = update(params, cache, layer, projected.k, projected.v, projected.index_k, rope, rows, segments)
    return projected, cache


@bind(jax.jit, donate_argnums=0)
def _copy_first(cache: qsa.Cache) -> qsa.Cache:
    """The cache with what the first request holds in the pages and rings of all others."""
    first, others = cache.page_table[:1], cache.page_table[1:]
    copied: dict[str, Any] = {
        name: (pool := getattr(cache, name)).at[:, others].set(pool[:, first]) for name in ("k", "v", "index")
    }
    for name in ("ring_keys", "ring_positions"):
        ring = getattr(cache, name)
        copied[name] = ring.at[:, 2:].set(ring[:, 1:2])
    return dataclasses.replace(cache, **copied)
