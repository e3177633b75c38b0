"""Grouped-query attention of each row over the tokens of its selection.

    alpha_t = softmax_{t in I(p)}(scale <q_h(p), k_j(t)>)      o_h(p) = sum_t alpha_t v_j(t)      j = floor(h / group)

I(p) are the tokens of the selected blocks and the tail, none beyond p, so there is no further mask. A row without
tokens is the neutral partial (0, -inf). Entries behind the valid ones are replaced, never multiplied by 0: a stale
NaN cannot leak. In bfloat16 the query is scaled by scale * log2(e) and rounded, probabilities are rounded for the
values product, and their normaliser sums the unrounded ones.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcp import storage
from jaxcp.lse import LogBase, Partial
from jaxcp.products import contract
from jaxcp.qsa import kernel_attend
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.indexing import quotient, remainder, take
from jaxcp.qsa.numerics import narrow, widen
from jaxcp.qsa.queries import Queries, in_steps
from jaxcp.qsa.resolve import Implementation
from jaxcp.qsa.selection import token_rows


def attend_rows(
    q: Float[Array, "heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    count: Int[Array, ""],
    scale: float,
) -> tuple[Float[Array, "heads head_dim"], Float[Array, " heads"]]:
    """(o, lse in base 2) of one row over its first `count` tokens; whatever stands behind them does not count."""
    valid = jnp.arange(len(k)) < count
    k, v = (jnp.where(valid[:, None, None], x, jnp.zeros_like(x)) for x in (k, v))
    q = narrow(widen(q) * (scale * math.log2(math.e)), q.dtype).reshape(k.shape[1], -1, q.shape[-1])
    logits = jnp.where(valid, contract("jgd,tjd->jgt", q, k), -jnp.inf)
    top = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isneginf(top), 0, top)
    p = jnp.exp2(logits - top)
    total = jnp.sum(p, -1, keepdims=True)
    o = contract("jgt,tjd->jgd", narrow(p, q.dtype), v) / jnp.where(total > 0, total, 1)
    lse = (top + jnp.log2(total))[..., 0]
    return narrow(o, q.dtype).reshape(-1, o.shape[-1]), lse.reshape(-1)


def attend_xla(
    q: Float[Array, "rows heads head_dim"],
    blocks: Int[Array, "rows k"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
) -> Partial:
    """Every row's attention over the cache, gathered through the page table, some rows at a time.

    Args:
      q: rotated queries.
      blocks: selection, ids in front and -1 behind.
      cache: holds K and V of every token a row may select.
      layer: of the cache.
      queries: request and position of the rows.
      config: geometry.

    Returns:
      o [rows, heads, head_dim] in q's dtype, lse [rows, heads] in base 2.
    """

    def of_row(row):
        q, blocks, request, position = row
        tokens = token_rows(blocks[None], position[None], config.ratio)[0]
        at = jnp.maximum(tokens, 0)
        page = take(cache.page_table, request, quotient(at, cache.page_size))
        place = remainder(at, cache.page_size)
        k, v = (storage.decode(take(pool, layer, page, place)).astype(cache.dtype) for pool in (cache.k, cache.v))
        return attend_rows(q, k, v, jnp.sum(tokens >= 0), config.scale)

    width = blocks.shape[1] * config.ratio + config.ratio - 1
    row_bytes = 2 * width * config.kv_heads * config.head_dim * max(4, cache.dtype.itemsize)
    rows = queries.rows
    o, lse = in_steps(of_row, (q, blocks, rows.request, rows.position), row_bytes)
    return Partial(o, lse, LogBase.TWO)


ATTEND = {
    "cuda": Implementation(kernel_attend.attend_cuda, kernel_attend.blocker, kernel_attend.attended_for),
    "xla": Implementation(attend_xla),
}
"""Implementations of sparse attention by name, the best first; each has the signature of `attend_xla`."""
