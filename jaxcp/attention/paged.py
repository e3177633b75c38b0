"""Plain-XLA attention over a paged cache, split over keys: the implementation "xla".

It gathers a few pages of one layer at a time; the cache is never copied or sliced as a whole. Work and memory follow
the longest request of the batch, not the capacity of the page table.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxcp.attention.online import attend_blocks, block_keys, group_heads, ungroup_heads
from jaxcp.lse import LogBase, Partial
from jaxcp.storage import decode


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    k_pages: Shaped[Array, "layers pages page_size kv_heads key_dim"],
    v_pages: Shaped[Array, "layers pages page_size kv_heads value_dim"] | None,
    page_table: Int[Array, "requests table"],
    visible: Int[Array, "requests query_tokens"],
    *,
    layer: Array,
    value_dim: int,
    scale: float,
    base: LogBase,
) -> Partial:
    """Attention of each token over the first `visible` keys of its request's pages. Arguments are those of `attention`.

    Args:
      page_table: ids of pages, each in range.
      visible: keys that each token sees, at most table * page_size.
      value_dim: values are the first `value_dim` columns of the keys where `v_pages` is None.
    """
    requests, query_tokens = visible.shape
    page_size, kv_heads = k_pages.shape[2:4]
    rows = group_heads(q, requests, kv_heads)
    keys = block_keys(math.prod(rows.shape[:3]), page_size)
    pages = keys // page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))

    def block(i):
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k = decode(read_pages(k_pages, layer, ids))
        return k, k[..., :value_dim] if v_pages is None else decode(read_pages(v_pages, layer, ids))

    bound = jnp.repeat(visible, rows.shape[2] // query_tokens, axis=1)
    partial = attend_blocks(rows, block, bound, keys=keys, value_dim=value_dim, scale=scale, base=base)
    return ungroup_heads(partial, query_tokens, q.dtype)


def read_pages(
    pages: Shaped[Array, "layers pages page_size kv_heads dim"], layer: Array, ids: Int[Array, "requests table"]
) -> Shaped[Array, "requests keys kv_heads dim"]:
    """The stored rows of the given pages of one layer, request by request, in the order of `ids`."""
    rows = pages.at[layer, ids].get(mode="clip", wrap_negative_indices=False)
    return rows.reshape(ids.shape[0], -1, *pages.shape[3:])
