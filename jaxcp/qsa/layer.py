"""Row-wise mathematics of a QSA layer: what needs no other token.

[q_h | g_h] = W_q x       k_j = W_k x       v_j = W_v x       u = W_index x
q_h <- rope(N_q(q_h))     k_j <- rope(N_k(k_j))     a_h = rope(N_iq(u_h))     kappa = u_last, neither normed nor rotated
c_n = rope(N_ik(mean of the block's kappa))        at the rope position of the block's first token
y = W_o concat_h(o_h * sigmoid(g_h))
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxcp.qsa.numerics import linear, narrow, norm, rounded, widen
from jaxcp.qsa.params import Params
from jaxcp.qsa.rope import Table, rotate
from jaxcp.qsa.scopes import PROJECTIONS


class Products(NamedTuple):
    """The layer's input products, [rows, features] in the layer's dtype: before any norm or rotation.

    Attributes:
      q_gate: per head its query, then its gate.
      k, v: per KV head.
      index: the index queries per head, then the raw index key.
    """

    q_gate: Float[Array, "rows q_gate_features"]
    k: Float[Array, "rows kv_features"]
    v: Float[Array, "rows kv_features"]
    index: Float[Array, "rows index_features"]


class Projected(NamedTuple):
    """Projections of token rows besides their queries and gates, in the layer's dtype.

    Attributes:
      kv: [rows, 2, kv_heads, head_dim]: keys, normed and rotated, and values; side by side, as they travel.
      index_q: [rows, index_heads, index_dim], normed and rotated.
      index_k: [rows, index_dim], raw.
    """

    kv: Float[Array, "rows 2 kv_heads head_dim"]
    index_q: Float[Array, "rows index_heads index_dim"]
    index_k: Float[Array, "rows index_dim"]


@jax.named_scope(PROJECTIONS)
def products(params: Params, x: Float[Array, "rows hidden"]) -> Products:
    """Products of the rows with the input weights."""
    weights = params.q_proj, params.k_proj, params.v_proj, params.indexer.index_qk_proj
    return Products(*(linear(x, weight) for weight in weights))


def prepare(params: Params, of: Products, angles: Table) -> Projected:
    """Norms and rotations of the rows' products; `angles` are of the rows' rope positions."""
    c, indexer = params.config, params.indexer
    k, v = (features.reshape(-1, c.kv_heads, c.head_dim) for features in (of.k, of.v))
    index = of.index.reshape(-1, c.index_heads + 1, c.index_dim)
    return Projected(
        kv=jnp.stack([_main(k, params.k_norm, angles, c.eps), v], 1),
        index_q=_index(index[:, :-1], indexer.q_layernorm, angles, c.eps),
        index_k=index[:, -1],
    )


def prepare_queries(
    params: Params, q_gate: Float[Array, "rows q_gate_features"], angles: Table
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads head_dim"]]:
    """Queries, normed and rotated, and gates before the sigmoid, of the rows' products."""
    c = params.config
    q_gate = q_gate.reshape(-1, c.heads, 2, c.head_dim)
    return _main(q_gate[:, :, 0], params.q_norm, angles, c.eps), q_gate[:, :, 1]


def compress(
    params: Params, keys: Float[Array, "blocks ratio index_dim"], angles: Table
) -> Float[Array, "blocks index_dim"]:
    """c_n of whole blocks from their raw keys; `angles` are of the blocks' first rope positions."""
    total = widen(keys[:, 0])
    for member in range(1, keys.shape[1]):  # token order is part of the result's definition
        total = total + widen(keys[:, member])
    mean = narrow(total * (1 / keys.shape[1]), keys.dtype)
    return _index(mean, params.indexer.k_layernorm, angles, params.config.eps)


@jax.named_scope(PROJECTIONS)
def output(
    params: Params, mixed: Float[Array, "rows features"], real: Bool[Array, " rows"]
) -> Float[Array, "rows hidden"]:
    """y of every row from its gated attention; 0 where the row is padding."""
    return jnp.where(real[:, None], linear(mixed, params.o_proj), 0)


def gated(
    o: Float[Array, "rows heads head_dim"], gate: Float[Array, "rows heads head_dim"]
) -> Float[Array, "rows features"]:
    """concat_h(o_h * sigmoid(g_h))."""
    return narrow(widen(o) * jax.nn.sigmoid(widen(gate)), o.dtype).reshape(len(o), -1)


def _main(x, weight, angles: Table, eps: float):
    """Norm, rounded; rotation, rounded once."""
    return narrow(rotate(rounded(norm(widen(x), weight, eps), x.dtype), angles), x.dtype)


def _index(x, weight, angles: Table, eps: float):
    """Norm, rounded; rotation with every operand and product rounded."""
    return narrow(rotate(rounded(norm(widen(x), weight, eps), x.dtype), angles, step=x.dtype), x.dtype)
