"""What is measured: query rows over the caches of requests, filled by the layer itself from random tokens."""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import numpy as np

from jaxcp import qsa
from jaxcp.bench import fill
from jaxcp.errors import invalid
from jaxcp.layout import positive_int
from jaxcp.qsa.layer import Products, Projected, prepare_queries, products
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import Segments, rows_of

PAGE_SIZE = 64


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
    cache = fill.request(params, cache, tokens, layer, request=0, tokens=case.keys)
    if case.requests > 1:
        cache = _copy_first(cache)
    x = jax.random.normal(last, (case.rows, config.hidden), dtype)
    of = jax.jit(products)(params, x)
    (q, gate), projected, cache = _write_rows(params, cache, of, jax.device_put(case.table), layer)
    return Inputs(case, params, cache, x, of, q, gate, projected, jax.device_put(case.table), layer)


@bind(jax.jit, donate_argnums=1)
def _write_rows(params, cache, of, table, layer):
    angles = fill.row_angles(params, table, len(of.k))
    return prepare_queries(params, of.q_gate, angles), *fill.written(params, cache, of, angles, table, layer)


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
