"""What a forward writes: K and V of its tokens, index keys of the blocks it finishes, its last raw keys into the ring.

Every index is made in range here, and a row that has no place goes to the dump and is counted; scatters cannot leave
the cache whatever lengths a device array holds.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxcp import storage
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.indexing import put, quotient, remainder, take
from jaxcp.qsa.layer import Projected, compress
from jaxcp.qsa.params import Params
from jaxcp.qsa.rope import table
from jaxcp.qsa.segments import Rows, Segments, spread


class Blocks(NamedTuple):
    """The blocks that a forward finishes, over a static capacity.

    Attributes:
      segment: int32 [blocks], whose request the block is of.
      member: int32 [blocks, ratio], positions of its tokens.
      row: int32 [blocks, ratio], row of each new token; in range also where there is none.
      is_new: bool [blocks, ratio], whether the token is of this forward; older ones wait in the ring.
      exists: bool [blocks].
    """

    segment: Int[Array, " blocks"]
    member: Int[Array, "blocks ratio"]
    row: Int[Array, "blocks ratio"]
    is_new: Bool[Array, "blocks ratio"]
    exists: Bool[Array, " blocks"]


class Slots(NamedTuple):
    """What a forward does to the rings of its requests.

    Attributes:
      ring_row: int32 [segments], rows of the cache's rings.
      position: int32 [segments, ring], the newest position that belongs into each slot.
      row: int32 [segments, ring], row of each new token; in range also where there is none.
      is_new: bool [segments, ring], whether the token is of this forward; the slot is kept otherwise.
    """

    ring_row: Int[Array, " segments"]
    position: Int[Array, "segments ring"]
    row: Int[Array, "segments ring"]
    is_new: Bool[Array, "segments ring"]


def update(
    params: Params,
    cache: Cache,
    layer: Int[Array, ""],
    projected: Projected,
    rope: Int[Array, "3 rows"],
    rows: Rows,
    segments: Segments,
    write_index: Callable,
    write_kv: Callable,
) -> tuple[Cache, Rows]:
    """The cache after the forward's tokens, and the rows with those that had no place turned into padding.

    Args:
      params: of the layer; compression needs its norm.
      cache: holds each request's first `segments.prefix` tokens.
      layer: of the cache.
      projected: all new tokens.
      rope: rope positions of the rows.
      rows, segments: of all new tokens; one segment per request.
      write_index, write_kv: of `jaxcp.qsa.operations`.
    """
    kept = with_room(cache, rows)
    cache = write_index(params, count_dropped(cache, kept, segments), layer, projected.index_k, rope, segments)
    return write_kv(cache, layer, storage.encode(projected.kv, cache.kv_dtype), kept.request, kept.position), kept


def with_room(cache: Cache, rows: Rows) -> Rows:
    """The rows, those that have no place in the cache turned into padding."""
    _, _, fits = _locate(cache, rows.request, rows.position)
    return rows._replace(position=jnp.where(fits, rows.position, -1))


def count_dropped(cache: Cache, kept: Rows, segments: Segments) -> Cache:
    """The cache with the tokens counted that `with_room` turned into padding."""
    dropped = jnp.sum(segments.count, dtype=jnp.int32) - jnp.sum(kept.real, dtype=jnp.int32)
    return _count(cache, 0, dropped)


def write_kv(
    cache: Cache,
    layer: Int[Array, ""],
    kv: Shaped[Array, "rows 2 kv_heads head_dim"],
    request: Int[Array, " rows"],
    position: Int[Array, " rows"],
) -> Cache:
    """The cache with K and V of these tokens, as stored (`storage.encode`), in any order; padding goes to the dump."""
    page, place, _ = _locate(cache, request, position)
    k, v = (put(pool, kv[:, i], layer, page, place) for i, pool in enumerate((cache.k, cache.v)))
    return dataclasses.replace(cache, k=k, v=v)


def write_index(
    params: Params,
    cache: Cache,
    layer: Int[Array, ""],
    index_k: Float[Array, "rows index_dim"],
    rope: Int[Array, "3 rows"],
    segments: Segments,
) -> Cache:
    """The cache with the compressed keys of finished blocks, and with the newest raw keys in the rings."""
    blocks = finished_blocks(params.config.ratio, cache, segments, len(index_k))
    at = layer, take(_ring_row(cache, segments), blocks.segment)[:, None], remainder(blocks.member, cache.ring)
    pending = take(cache.ring_positions, *at)
    keys = jnp.where(blocks.is_new[..., None], take(index_k, blocks.row), take(cache.ring_keys, *at))
    first = jnp.where(blocks.is_new[:, 0], take(rope.T, blocks.row[:, 0]).T, pending[:, 0, 1:].T)
    keys = compress(params, keys, table(params.config, first, accumulation_dtype(keys.dtype)))
    stale = blocks.exists & jnp.any(~blocks.is_new & (pending[..., 0] != blocks.member), axis=1)
    cache = put_blocks(_count(cache, 1, jnp.sum(stale, dtype=jnp.int32)), layer, keys, blocks, segments)
    slots = ring_slots(cache, segments)
    return put_ring(cache, layer, take(index_k, slots.row), slots, rope)


def finished_blocks(ratio: int, cache: Cache, segments: Segments, rows: int) -> Blocks:
    """The blocks that end in a forward of `rows` rows."""
    start, end = jnp.maximum(segments.prefix, 0), jnp.maximum(segments.total, 0)
    begun = quotient(start, ratio)
    owner, nth, exists = spread(jnp.maximum(quotient(end, ratio) - begun, 0), rows // ratio + len(start))
    member = ((take(begun, owner) + nth) * ratio)[:, None] + jnp.arange(ratio, dtype=jnp.int32)
    offset = member - take(start, owner)[:, None]
    row = take(segments.first_row, owner)[:, None] + jnp.maximum(offset, 0)  # past the last row only where none exists
    return Blocks(owner, member, row, offset >= 0, exists)


def put_blocks(cache: Cache, layer, keys: Float[Array, "blocks index_dim"], blocks: Blocks, segments) -> Cache:
    """The cache with these compressed keys."""
    position = jnp.where(blocks.exists, blocks.member[:, 0], -1)
    page, place, _ = _locate(cache, take(segments.request, blocks.segment), position)
    place = quotient(place, cache.page_size // cache.blocks_per_page)
    keys = storage.encode(keys, cache.index_dtype)
    return dataclasses.replace(cache, index=put(cache.index, keys, layer, page, place))


def ring_slots(cache: Cache, segments: Segments) -> Slots:
    """Which token each slot of the requests' rings holds after the forward."""
    last = segments.total[:, None] - 1
    slot = jnp.arange(cache.ring, dtype=jnp.int32)
    position = last - remainder(last - slot + cache.ring, cache.ring)
    offset = position - segments.prefix[:, None]
    row = segments.first_row[:, None] + jnp.maximum(offset, 0)  # past the last row only where nothing is new
    return Slots(_ring_row(cache, segments), position, row, (offset >= 0) & (position >= 0))


def put_ring(cache: Cache, layer, keys: Float[Array, "segments ring index_dim"], slots: Slots, rope) -> Cache:
    """The cache with `keys` in the slots whose token is new, and with their positions."""
    ring_row = jnp.where(slots.is_new, slots.ring_row[:, None], cache.requests + 1)  # behind the last one: dropped
    slot = jnp.arange(cache.ring, dtype=jnp.int32)
    positions = jnp.concatenate([slots.position[..., None], take(rope.T, slots.row)], -1)
    return dataclasses.replace(
        cache,
        ring_keys=put(cache.ring_keys, keys, layer, ring_row, slot),
        ring_positions=put(cache.ring_positions, positions, layer, ring_row, slot),
    )


def _count(cache: Cache, kind: int, number: Int[Array, ""]) -> Cache:
    """The cache with `number` more faults of a kind: 0, dropped rows; 1, stale blocks."""
    return dataclasses.replace(cache, faults=cache.faults + jnp.where(jnp.arange(2) == kind, number, 0))


def _locate(cache: Cache, request, position) -> tuple[Int[Array, " n"], Int[Array, " n"], Bool[Array, " n"]]:
    """Page, place and whether there is one; the dump's first place otherwise."""
    known = (request >= 0) & (request < cache.requests) & (position >= 0) & (position < cache.capacity)
    request, position = jnp.where(known, request, 0), jnp.where(known, position, 0)
    page = jnp.where(known, take(cache.page_table, request, quotient(position, cache.page_size)), 0)
    return page, jnp.where(page > 0, remainder(position, cache.page_size), 0), page > 0


def _ring_row(cache: Cache, segments: Segments) -> Int[Array, " segments"]:
    """Ring row of each segment's request; the dump row for a segment without tokens or request."""
    known = (segments.request >= 0) & (segments.request < cache.requests)
    return jnp.where(known & (segments.count > 0), segments.request + 1, 0)
