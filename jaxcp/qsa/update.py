"""What a forward writes: K and V of its tokens, index keys of the blocks it finishes, its last raw keys into the ring.

Every index is made in range here, and a row that has no place goes to the dump and is counted; scatters cannot leave
the cache whatever lengths a device array holds.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxcp import storage
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.indexing import put, quotient, remainder, take
from jaxcp.qsa.layer import compress
from jaxcp.qsa.params import Params
from jaxcp.qsa.rope import table
from jaxcp.qsa.segments import Rows, Segments, spread


def update(
    params: Params,
    cache: Cache,
    layer: Int[Array, ""],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    index_k: Float[Array, "rows index_dim"],
    rope: Int[Array, "3 rows"],
    rows: Rows,
    segments: Segments,
) -> tuple[Cache, Rows]:
    """The cache after the forward's tokens, and the rows with those that had no place turned into padding.

    Args:
      params: of the layer; compression needs its norm.
      cache: holds each request's first `segments.prefix` tokens.
      layer: of the cache.
      k, v, index_k: of all new tokens, as projected.
      rope: rope positions of the rows.
      rows, segments: of all new tokens; one segment per request.
    """
    page, place, fits = _locate(cache, rows.request, rows.position)
    dropped = jnp.sum(segments.count, dtype=jnp.int32) - jnp.sum(fits, dtype=jnp.int32)
    block_writes, stale = _finished_blocks(params, cache, layer, index_k, rope, segments)
    ring_row, ring_keys, ring_positions = _ring(cache, layer, index_k, rope, segments)
    block_page, block_place, block_key = block_writes
    cache = dataclasses.replace(
        cache,
        k=put(cache.k, storage.encode(k, cache.kv_dtype), layer, page, place),
        v=put(cache.v, storage.encode(v, cache.kv_dtype), layer, page, place),
        index=put(cache.index, storage.encode(block_key, cache.index_dtype), layer, block_page, block_place),
        ring_keys=put(cache.ring_keys, ring_keys, layer, ring_row),
        ring_positions=put(cache.ring_positions, ring_positions, layer, ring_row),
        faults=cache.faults + jnp.stack([dropped, stale]),
    )
    return cache, rows._replace(position=jnp.where(fits, rows.position, -1))


def _locate(cache: Cache, request, position) -> tuple[Int[Array, " n"], Int[Array, " n"], Bool[Array, " n"]]:
    """Page, place and whether there is one; the dump's first place otherwise."""
    known = (request >= 0) & (request < cache.requests) & (position >= 0) & (position < cache.capacity)
    request, position = jnp.where(known, request, 0), jnp.where(known, position, 0)
    page = jnp.where(known, take(cache.page_table, request, quotient(position, cache.page_size)), 0)
    return page, jnp.where(page > 0, remainder(position, cache.page_size), 0), page > 0


def _finished_blocks(params: Params, cache: Cache, layer, index_k, rope, segments: Segments):
    """((page, place, key) of the blocks that end in this forward, how many of them lack their first keys)."""
    ratio, total_rows = params.config.ratio, len(index_k)
    start, end = jnp.maximum(segments.prefix, 0), jnp.maximum(segments.total, 0)
    begun = quotient(start, ratio)
    owner, nth, exists = spread(jnp.maximum(quotient(end, ratio) - begun, 0), total_rows // ratio + len(start))
    first = (take(begun, owner) + nth) * ratio
    member = first[:, None] + jnp.arange(ratio, dtype=jnp.int32)
    offset = member - take(start, owner)[:, None]
    is_new = offset >= 0
    row = take(segments.first_row, owner)[:, None] + jnp.maximum(offset, 0)  # past the last row only where none exists
    at = layer, take(_ring_row(cache, segments), owner)[:, None], remainder(member, cache.ring)
    pending = take(cache.ring_positions, *at)
    keys = jnp.where(is_new[..., None], take(index_k, row), take(cache.ring_keys, *at))
    rope_first = jnp.where(is_new[:, 0], take(rope.T, row[:, 0]).T, pending[:, 0, 1:].T)
    key = compress(params, keys, table(params.config, rope_first, accumulation_dtype(keys.dtype)))
    stale = exists & jnp.any(~is_new & (pending[..., 0] != member), axis=1)
    page, place, _ = _locate(cache, take(segments.request, owner), jnp.where(exists, first, -1))
    return (page, quotient(place, ratio), key), jnp.sum(stale, dtype=jnp.int32)


def _ring(cache: Cache, layer, index_k, rope, segments: Segments):
    """Ring rows to write, and their whole new contents: the newest position of each slot, kept or new."""
    last = segments.total[:, None] - 1
    slot = jnp.arange(cache.ring, dtype=jnp.int32)
    position = last - remainder(last - slot + cache.ring, cache.ring)
    offset = position - segments.prefix[:, None]
    is_new = (offset >= 0) & (position >= 0)
    row = segments.first_row[:, None] + jnp.maximum(offset, 0)  # past the last row only where nothing is new
    ring_row = _ring_row(cache, segments)
    new_positions = jnp.concatenate([position[..., None], take(rope.T, row)], -1)
    keys = jnp.where(is_new[..., None], take(index_k, row), take(cache.ring_keys, layer, ring_row))
    positions = jnp.where(is_new[..., None], new_positions, take(cache.ring_positions, layer, ring_row))
    return ring_row, keys, positions


def _ring_row(cache: Cache, segments: Segments) -> Int[Array, " segments"]:
    """Ring row of each segment's request; the dump row for a segment without tokens or request."""
    known = (segments.request >= 0) & (segments.request < cache.requests)
    return jnp.where(known & (segments.count > 0), segments.request + 1, 0)
