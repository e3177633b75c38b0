"""From products to gated attention, some rows at a time: queries and outputs of all rows never exist at once.

A row's queries, its attention and its gate are as wide as all heads: 12 KiB each in the released geometry, where its
selection takes 2 KiB.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcp import varying
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.layer import gated, prepare_queries
from jaxcp.qsa.params import Params
from jaxcp.qsa.queries import ROWS_AT_ONCE, Queries
from jaxcp.qsa.rope import Table
from jaxcp.qsa.scopes import ATTENTION


def attended(
    params: Params,
    q_gate: Float[Array, "rows q_gate_features"],
    angles: Table,
    blocks: Int[Array, "rows k"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    attend: Callable,
) -> Float[Array, "rows features"]:
    """concat_h(o_h * sigmoid(g_h)) of every row.

    Args:
      params: weights of the layer.
      q_gate: the rows' products with q_proj.
      angles: of the rows' rope positions.
      blocks: the rows' selection.
      cache: holds K and V of every token a row may select.
      layer: of the cache.
      queries: what the rows are.
      attend: implementation of attention, as in `jaxcp.qsa.sparse.ATTEND`.
    """

    def of_rows(rows):
        q_gate, angles, blocks, which = rows
        q, gate = prepare_queries(params, q_gate, angles)
        with jax.named_scope(ATTENTION):
            o = attend(q, blocks, cache, layer, queries._replace(rows=which), params.config).o
        return gated(o, gate)

    return _in_turn(of_rows, (q_gate, angles, blocks, queries.rows), len(q_gate))


def _in_turn(f: Callable, arrays, rows: int) -> Array:
    """f of all rows of `arrays`, ROWS_AT_ONCE after the others and then the rest."""
    turns = (rows - 1) // ROWS_AT_ONCE if rows else 0
    rest = f(jax.tree.map(lambda x: x[turns * ROWS_AT_ONCE :], arrays))
    if turns == 0:
        return rest

    def put(out, part, start):
        return lax.dynamic_update_slice_in_dim(out, part, start, 0)

    def turn(i, out):
        start = i * ROWS_AT_ONCE
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, ROWS_AT_ONCE), arrays)
        return put(out, f(some), start)

    (out,) = varying.over(varying.axes(rest), jnp.zeros((rows, *rest.shape[1:]), rest.dtype))
    return lax.fori_loop(0, turns, turn, put(out, rest, turns * ROWS_AT_ONCE))
