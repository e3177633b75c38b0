"""Segments: runs of neighbouring query rows of one request, and the maps that device code makes from them.

A forward is described by four int32 per segment (host work is O(segments)); which request and position a row has, which
blocks a forward finishes and how rows are tiled is computed on the device, by one rule: `spread` lays ragged counts out
over a static capacity.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxcp.qsa.indexing import quotient, rank_in, remainder, take


class Segments(NamedTuple):
    """Runs of query rows, in ascending order of `first_row`; unused segments have count 0.

    Attributes:
      first_row: int32 [segments], row of the run's first token.
      count: int32 [segments], its tokens.
      prefix: int32 [segments], position in its request of the run's first token.
      request: int32 [segments], the request's row in the cache.
    """

    first_row: Int32[Array, " segments"]
    count: Int32[Array, " segments"]
    prefix: Int32[Array, " segments"]
    request: Int32[Array, " segments"]

    @property
    def total(self) -> Int32[Array, " segments"]:
        """Tokens of the request up to the run's end."""
        return self.prefix + self.count

    def at(self, segment: Int[Array, "..."]) -> "Segments":
        """The four numbers of each given segment."""
        return Segments(*(take(field, segment) for field in self))


class Rows(NamedTuple):
    """What each query row is.

    Attributes:
      segment: int32 [rows].
      request: int32 [rows], row in the cache.
      position: int32 [rows], logical position in the request; -1 for a padding row, which sees no key.
    """

    segment: Int32[Array, " rows"]
    request: Int32[Array, " rows"]
    position: Int32[Array, " rows"]

    @property
    def real(self) -> Bool[Array, " rows"]:
        """Whether the row is a token rather than padding."""
        return self.position >= 0


def spread(
    counts: Int[Array, " owners"], capacity: int
) -> tuple[Int32[Array, " items"], Int32[Array, " items"], Bool[Array, " items"]]:
    """Items of all owners one after another, counts[o] for owner o, over a static capacity.

    Returns:
      owner, item's index within its owner, and whether the item exists; [capacity] each. Items past the sum of the
      counts do not exist: their owner and index are in range but mean nothing.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(capacity, dtype=jnp.int32)
    owner = rank_in(ends, item)
    exists = owner < len(counts)
    owner = jnp.minimum(owner, len(counts) - 1)
    return owner, jnp.where(exists, item - take(ends - counts, owner), 0).astype(jnp.int32), exists


def rows_of(segments: Segments, rows: int, stride: int = 1) -> Rows:
    """Segment, request and position of each of `rows` rows; neighbours in a segment are `stride` positions apart."""
    row = jnp.arange(rows, dtype=jnp.int32)
    segment = jnp.maximum(rank_in(segments.first_row, row) - 1, 0)
    of_row = segments.at(segment)
    offset = row - of_row.first_row
    real = (offset >= 0) & (offset < of_row.count)
    return Rows(segment, of_row.request, jnp.where(real, of_row.prefix + offset * stride, -1))


class Tiles(NamedTuple):
    """Query rows in tiles of one static length, every tile of a single segment.

    Attributes:
      request: int32 [tiles].
      row: int32 [tiles, length], row of each query; 0 where there is none.
      position: int32 [tiles, length], -1 where there is no query.
      tile: int32 [rows], tile that holds a row.
      place: int32 [rows], its place there; both mean nothing for padding rows.
    """

    request: Int32[Array, " tiles"]
    row: Int32[Array, "tiles length"]
    position: Int32[Array, "tiles length"]
    tile: Int32[Array, " rows"]
    place: Int32[Array, " rows"]


def tiles_of(segments: Segments, rows: Rows, length: int, longest: int) -> Tiles:
    """Tiles of `length` rows, as many as segments of at most `longest` rows can need."""
    total, n_segments = len(rows.position), len(segments.count)
    tiles = quotient(jnp.minimum(segments.count, longest) + length - 1, length)
    capacity = min((total + n_segments * (length - 1)) // length, n_segments * -(-longest // length))
    segment, index, exists = spread(tiles, capacity)
    offset = index[:, None] * length + jnp.arange(length, dtype=jnp.int32)
    of_tile = segments.at(segment)
    inside = exists[:, None] & (offset < of_tile.count[:, None])
    row = jnp.where(inside, of_tile.first_row[:, None] + offset, 0)
    position = jnp.where(inside, take(rows.position, row), -1)
    first_tile = take(jnp.cumsum(tiles, dtype=jnp.int32) - tiles, rows.segment)
    offset = jnp.arange(total, dtype=jnp.int32) - take(segments.first_row, rows.segment)
    return Tiles(of_tile.request, row, position, first_tile + quotient(offset, length), remainder(offset, length))
