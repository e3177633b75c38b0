"""Which blocks a query row attends to: exact top-k of index scores, kept as block ids.

    s(p, n) = index_dim^-1/2 sum_h max(0, <a_h(p), c_n>)        visible: n < v(p) = floor((p + 1) / ratio)
    J(p) = {0 ... v - 1} if v <= k, else the k visible blocks with the largest s; ties to the smaller id; ascending

A row of J(p) is a token's whole selection: ids in front, -1 behind. The incomplete block floor((p + 1) / ratio) is
always attended up to p (the tail), complete blocks only if chosen, the query's own included. Token rows exist only
where `token_rows` expands a few of them.

The XLA implementation walks tiles of query rows of one request, so that scores of all rows never exist at once. Scores
are compared exactly: equal ones go by id, nothing is binned or dropped.
"""

from collections.abc import Callable
from functools import partial as bind

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxcp import storage
from jaxcp.products import contract
from jaxcp.qsa import flashinfer_topk, kernel_select
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.indexing import quotient, remainder, take
from jaxcp.qsa.queries import Queries, in_steps, scratch_rows
from jaxcp.qsa.resolve import Implementation
from jaxcp.qsa.segments import tiles_of

MAX_TILE = 128
ABSENT = jnp.iinfo(jnp.int32).max  # sorts behind every block id


def scores(
    index_q: Float[Array, "rows index_heads index_dim"], keys: Float[Array, "blocks index_dim"]
) -> Float[Array, "rows blocks"]:
    """s(p, n) of every row and block, float32 (float64 for float64); operands of one dtype."""
    per_head = jnp.maximum(contract("rhd,nd->rhn", index_q, keys), 0)
    total = per_head[:, 0]
    for head in range(1, index_q.shape[1]):
        total = total + per_head[:, head]
    return total * index_q.shape[-1] ** -0.5


def top_blocks(score: Float[Array, "rows blocks"], visible: Int[Array, " rows"], k: int) -> Int32[Array, "rows k"]:
    """Ids of the min(k, visible) largest scores among each row's first `visible` blocks: ascending, then -1.

    Equal scores go by id, smaller first. `lax.top_k` ranks +0 above -0, so -0 is replaced.
    """
    n = score.shape[1]
    seen = jnp.arange(n) < visible[:, None]
    ranked = jnp.where(seen, unsigned_zeros(score), -jnp.inf)
    _, ids = lax.top_k(ranked, min(k, n))
    place = jnp.arange(min(k, n))
    ids = jnp.sort(jnp.where(place < visible[:, None], ids, ABSENT), axis=-1)
    ids = jnp.pad(ids, [(0, 0), (0, k - min(k, n))], constant_values=ABSENT)
    return jnp.where(ids == ABSENT, -1, ids).astype(jnp.int32)


def unsigned_zeros(score: Float[Array, "..."]) -> Float[Array, "..."]:
    """`score` with +0 for -0; bits are compared, since some platforms take every subnormal for 0."""
    bits = lax.bitcast_convert_type(score, f"int{8 * score.dtype.itemsize}")
    return jnp.where(bits == jnp.iinfo(bits.dtype).min, jnp.zeros_like(score), score)


def all_visible(visible: Int[Array, " rows"], k: int) -> Int32[Array, "rows k"]:
    """The selection of rows that see at most k blocks: all of them."""
    ids = jnp.arange(k, dtype=jnp.int32)
    return jnp.where(ids < visible[:, None], ids, -1)


def token_rows(blocks: Int[Array, "rows k"], position: Int[Array, " rows"], ratio: int) -> Int32[Array, "rows width"]:
    """Tokens of each row: those of its blocks in order, then the tail, then -1; width = k * ratio + ratio - 1.

    Valid entries are contiguous at the front; there are ratio * |J(p)| + (p + 1) mod ratio of them. A padding row
    (position -1) has none.
    """
    chosen = jnp.sum(blocks >= 0, axis=1, keepdims=True, dtype=jnp.int32) * ratio
    end = (position + 1)[:, None]
    place = jnp.arange(blocks.shape[1] * ratio + ratio - 1, dtype=jnp.int32)
    of_block = jnp.repeat(blocks, ratio, axis=1, total_repeat_length=blocks.shape[1] * ratio) * ratio
    of_block = jnp.pad(of_block, [(0, 0), (0, ratio - 1)]) + remainder(place, ratio)
    tail = end - remainder(end, ratio) + place - chosen
    return jnp.where(place < chosen, of_block, jnp.where(tail < end, tail, -1)).astype(jnp.int32)


def select_xla(
    index_q: Float[Array, "rows index_heads index_dim"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
) -> Int32[Array, "rows k"]:
    """J(p) of every row from the cache's compressed keys: [rows, min(k, blocks in context)]; padding rows are -1."""
    return _selected(bind(_in_tiles, top=top_blocks), index_q, cache, layer, queries, config)


def select_cuda(
    index_q: Float[Array, "rows index_heads index_dim"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
) -> Int32[Array, "rows k"]:
    """As `select_xla`, by kernels of our own; sums may round otherwise in the last place."""
    return _selected(kernel_select.select, index_q, cache, layer, queries, config)


def select_flashinfer(
    index_q: Float[Array, "rows index_heads index_dim"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
) -> Int32[Array, "rows k"]:
    """As `select_xla`, the same scores ranked by FlashInfer's kernels."""

    def top(score, visible, k):
        return flashinfer_topk.top_blocks(unsigned_zeros(score), visible, k)

    return _selected(bind(_in_tiles, top=top), index_q, cache, layer, queries, config)


def _selected(select: Callable, index_q: Array, cache: Cache, layer: Array, queries: Queries, config: QSAConfig):
    """`select`, unless the context has no more blocks than are selected; both operands of the score rounded alike."""
    blocks = min(queries.context // config.ratio, cache.page_table.shape[1] * cache.blocks_per_page)
    k = min(config.selected_blocks, max(blocks, 1))
    if blocks <= k:
        return all_visible(quotient(queries.rows.position + 1, config.ratio), k)
    if cache.index_dtype != cache.dtype:
        index_q = storage.as_stored(index_q, cache.index_dtype).astype(cache.dtype)
    return select(index_q, cache, layer, queries, config, blocks, k)


def _in_tiles(
    index_q: Array, cache: Cache, layer: Array, queries: Queries, config: QSAConfig, blocks: int, k: int, *, top
) -> Array:
    """J(p) by XLA's scores and `top` of them, some rows of one request at a time."""
    row_bytes, key_bytes = config.index_heads * blocks * 4, blocks * config.index_dim * 4
    tiles = tiles_of(queries.segments, queries.rows, _tile_length(queries, row_bytes), queries.longest)
    pages = jnp.arange(-(-blocks // cache.blocks_per_page), dtype=jnp.int32)

    def of_tile(tile):
        request, row, position = tile
        keys = storage.decode(take(cache.index, layer, take(cache.page_table, request, pages))).astype(cache.dtype)
        score = scores(take(index_q, row), keys.reshape(-1, config.index_dim)[:blocks])
        return top(score, quotient(position + 1, config.ratio), k)

    chosen = in_steps(of_tile, (tiles.request, tiles.row, tiles.position), key_bytes + tiles.row.shape[1] * row_bytes)
    return jnp.where(queries.rows.real[:, None], take(chosen, tiles.tile, tiles.place), -1)


def _tile_length(queries: Queries, row_bytes: int) -> int:
    """Rows per tile: a power of two near the rows of an average segment, its scores within the scratch bound."""
    average = -(-len(queries.rows.position) // len(queries.segments.count))
    wanted = min(MAX_TILE, queries.longest, 1 << (average - 1).bit_length())
    return min(wanted, scratch_rows(row_bytes))


SELECT = {
    "cuda": Implementation(select_cuda, kernel_select.blocker),
    "xla": Implementation(select_xla),
    "flashinfer": Implementation(select_flashinfer, flashinfer_topk.blocker),
}
"""Implementations of scoring and selection by name, the best first; each has the signature of `select_xla`.

"flashinfer" stands behind "xla", which serves everywhere: it is taken only by name.
"""
