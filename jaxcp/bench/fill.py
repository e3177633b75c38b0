"""Caches filled by the layer itself from random tokens."""

from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxcp import qsa
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.layer import Products, Projected, prepare, products
from jaxcp.qsa.rope import Table, table
from jaxcp.qsa.segments import Segments, rows_of
from jaxcp.qsa.update import update, write_index, write_kv

CHUNK = 4096
"""Tokens that are written at a time."""


def request(
    params: qsa.Params, cache: qsa.Cache, key: jax.Array, layer: jax.Array, *, request: int, tokens: int
) -> qsa.Cache:
    """The cache, which is donated, with so many random tokens of a request in one layer."""
    for start in range(0, tokens, CHUNK):
        segment = np.array([[0], [min(CHUNK, tokens - start)], [start], [request]], np.int32)
        chunk = jax.random.fold_in(key, start)
        cache = _random_tokens(params, cache, chunk, jax.device_put(segment), layer, min(CHUNK, tokens))
    return cache


@bind(jax.jit, static_argnums=5, donate_argnums=1)
def _random_tokens(params, cache, key, segment, layer, tokens: int) -> qsa.Cache:
    of = products(params, jax.random.normal(key, (tokens, params.config.hidden), params.dtype))
    return written(params, cache, of, row_angles(params, segment, tokens), segment, layer)[1]


def row_angles(params: qsa.Params, of_segments: Int32[Array, "4 segments"], rows: int) -> Table:
    """Rotations of these segments' rows, whose rope positions are the logical ones; traceable."""
    position = jnp.maximum(rows_of(Segments(*of_segments), rows).position, 0)
    return table(params.config, jnp.broadcast_to(position, (3, rows)), accumulation_dtype(params.dtype))


def written(
    params: qsa.Params,
    cache: qsa.Cache,
    of: Products,
    angles: Table,
    of_segments: Int32[Array, "4 segments"],
    layer: Int32[Array, ""],
) -> tuple[Projected, qsa.Cache]:
    """What becomes of the products of these segments' rows, queries apart, and the cache that holds them; traceable."""
    segments, projected = Segments(*of_segments), prepare(params, of, angles)
    rows = rows_of(segments, len(of.k))
    rope = jnp.broadcast_to(jnp.maximum(rows.position, 0), (3, len(of.k)))
    cache, _ = update(params, cache, layer, projected, rope, rows, segments, write_index, write_kv)
    return projected, cache
