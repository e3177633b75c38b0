"""What a forward writes: K and V of its tokens, index keys of the blocks it finishes, its last raw keys into the ring.

Every index is made in range here, and a row that has no place goes to the dump and is counted; scatters cannot leave
the cache whatever lengths a device array holds.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.layer import compress
from jaxcp.qsa.numerics import to_storage
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
    cache = dataclasses.replace(
        cache,
        k=cache.k.at[layer, page, place].set(to_storage(k, cache.kv_dtype)),
        v=cache.v.at[layer, page, place].set(to_storage(v, cache.kv_dtype)),
        index=cache.index.at[layer, *block_writes[:2]].set(to_storage(block_writes[2], cache.index_dtype)),
        ring_keys=cache.ring_keys.at[layer, ring_row].set(ring_keys),
        ring_positions=cache.ring_positions.at[layer, ring_row].set(ring_positions),
        faults=cache.faults + jnp.stack([dropped, stale]),
    )
    return cache, rows._replace(position=jnp.where(fits, rows.position, -1))


def _locate(cache: Cache, request, position) -> tuple[Int[Array, " n"], Int[Array, " n"], Bool[Array, " n"]]:
    """Page, place and whether there is one; the dump's first place otherwise."""
    known = (request >= 0) & (request < cache.requests) & (position >= 0) & (position < cache.capacity)
    request, position = jnp.where(known, request, 0), jnp.where(known, position, 0)
    page = jnp.where(known, cache.page_table[request, position // cache.page_size], 0)
    return page, jnp.where(page > 0, position % cache.page_size, 0), page > 0


def _finished_blocks(params: Params, cache: Cache, layer, index_k, rope, segments: Segments):
    """((page, place, key) of the blocks that end in this forward, how many of them lack their first keys)."""
    ratio, total_rows = params.config.ratio, len(index_k)
    start, end = jnp.maximum(segments.prefix, 0), jnp.maximum(segments.total, 0)
    owner, nth, exists = spread(jnp.maximum(end // ratio - start // ratio, 0), total_rows // ratio + len(start))
    first = (start[owner] // ratio + nth) * ratio
    member = first[:, None] + jnp.arange(ratio, dtype=jnp.int32)
    is_new = member >= start[owner][:, None]
    row = jnp.clip(segments.first_row[owner][:, None] + member - start[owner][:, None], 0, total_rows - 1)
    at = layer, _ring_row(cache, segments)[owner][:, None], member % cache.ring
    pending = cache.ring_positions[at]
    keys = jnp.where(is_new[..., None], index_k[row], cache.ring_keys[at])
    rope_first = jnp.where(is_new[:, 0], rope[:, row[:, 0]], pending[:, 0, 1:].T)
    key = compress(params, keys, table(params.config, rope_first, accumulation_dtype(keys.dtype)))
    stale = exists & jnp.any(~is_new & (pending[..., 0] != member), axis=1)
    page, place, _ = _locate(cache, segments.request[owner], jnp.where(exists, first, -1))
    return (page, place // ratio, key), jnp.sum(stale, dtype=jnp.int32)


def _ring(cache: Cache, layer, index_k, rope, segments: Segments):
    """Ring rows to write, and their whole new contents: the newest position of each slot, kept or new."""
    last = segments.total[:, None] - 1
    slot = jnp.arange(cache.ring, dtype=jnp.int32)
    position = last - (last - slot) % cache.ring
    is_new = (position >= segments.prefix[:, None]) & (position >= 0)
    row = jnp.clip(segments.first_row[:, None] + position - segments.prefix[:, None], 0, len(index_k) - 1)
    ring_row = _ring_row(cache, segments)
    new_positions = jnp.concatenate([position[..., None], jnp.moveaxis(rope[:, row], 0, -1)], -1)
    keys = jnp.where(is_new[..., None], index_k[row], cache.ring_keys[layer, ring_row])
    positions = jnp.where(is_new[..., None], new_positions, cache.ring_positions[layer, ring_row])
    return ring_row, keys, positions.astype(jnp.int32)


def _ring_row(cache: Cache, segments: Segments) -> Int[Array, " segments"]:
    """Ring row of each segment's request; the dump row for a segment without tokens or request."""
    known = (segments.request >= 0) & (segments.request < cache.requests)
    return jnp.where(known & (segments.count > 0), segments.request + 1, 0)
