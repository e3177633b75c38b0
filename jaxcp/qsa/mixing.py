"""From products to gated attention, some rows at a time: queries and outputs of all rows never exist at once.

A row's queries, its attention and its gate are as wide as all heads: 12 KiB each in the released geometry, where its
selection takes 2 KiB.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcp.qsa.cache import Cache
from jaxcp.qsa.layer import gated, prepare_queries
from jaxcp.qsa.params import Params
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.rope import Table

ROWS_AT_ONCE = 4096
"""Enough to occupy a GPU for some rounds: 1640 work items for 132 processors."""


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
        return gated(attend(q, blocks, cache, layer, queries._replace(rows=which), params.config).o, gate)

    return _in_turn(of_rows, (q_gate, angles, blocks, queries.rows), len(q_gate))


def _in_turn(f: Callable, arrays, rows: int) -> Array:
    """f of all rows of `arrays`, some after the others: in equal steps, or with the rest in a step of its own."""
    if rows <= ROWS_AT_ONCE:
        return f(arrays)
    step = _step(rows)
    whole = rows // step * step
    steps = jax.tree.map(lambda x: x[:whole].reshape(-1, step, *x.shape[1:]), arrays)
    done = lax.map(f, steps)
    done = done.reshape(whole, *done.shape[2:])
    return done if whole == rows else jnp.concatenate([done, f(jax.tree.map(lambda x: x[whole:], arrays))])


def _step(rows: int) -> int:
    """Rows of a step: the most up to ROWS_AT_ONCE, at least half of it, that cut `rows` into equal steps, if any do."""
    least = -(-rows // ROWS_AT_ONCE)
    return next((rows // steps for steps in range(least, 2 * least + 1) if rows % steps == 0), ROWS_AT_ONCE)
