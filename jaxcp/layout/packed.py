"""Prefill's token layouts: the new tokens of a packed batch, dealt out to the ranks of a context-parallel axis.

Packed order is one request after another, new tokens only. A layout turns the requests' lengths into a `Split`, which
knows the rows of every rank. A rank's rows come in `Runs`: neighbouring rows of one request, `stride` tokens apart.

    Zigzag            2c blocks per request; rank r holds block r of each request, then block 2c - 1 - r of each
    PackedInterleave  packed token t is row t div c of rank t mod c, across requests

    lengths 8, 4 on two ranks     a0 a1 a2 a3 a4 a5 a6 a7 | b0 b1 b2 b3
    Zigzag, rank 0                a0 a1 b0 | a6 a7 b3           rank 1    a2 a3 b1 | a4 a5 b2
    PackedInterleave, rank 0      a0 a2 a4 a6 b0 b2             rank 1    a1 a3 a5 a7 b1 b3

Causal work grows with the position, and a zigzag rank has one early and one late block of every request. Any lengths
will do: shorter than 2c, or 0. Ranks then hold different numbers of rows; every rank's array has room for the largest,
and rows behind a rank's own are padding.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout.integers import INT32_MAX, Ints, int32, positive_int, prepare


class Runs(NamedTuple):
    """A rank's rows, in order: row first_row[i] + k holds token offset[i] + k * stride of request[i], k < count[i].

    Attributes:
      first_row, count: int32 [runs]; runs follow each other without a gap, some are empty.
      request: int32 [runs], index in the batch.
      offset: int32 [runs], the first row's token, counted from the request's first new token.
    """

    first_row: Any
    count: Any
    request: Any
    offset: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A batch dealt out to the ranks; in numpy if made from host integers, traceable otherwise.

    Attributes:
      cp: ranks.
      lengths: [requests], new tokens.
    """

    cp: int
    lengths: Any

    @property
    def stride(self) -> int:
        """Distance in tokens between neighbouring rows of a run."""
        return 1

    @property
    def first(self):
        """Packed index of each request's first token: [requests]."""
        return self.lengths.cumsum() - self.lengths

    def counts(self):
        """Rows of each rank: int32 [cp]."""
        raise NotImplementedError

    def runs(self, rank: Ints) -> Runs:
        """The rows of one rank."""
        raise NotImplementedError

    def locate(self, token: Ints) -> tuple[Any, Any]:
        """(rank, row) of packed tokens [n], int32 [n] each; means nothing past the last token."""
        raise NotImplementedError

    def tokens(self, rank: Ints, rows: int):
        """Packed token in each of the first `rows` rows of `rank`: int32 [rows], -1 in padding rows."""
        runs = self.runs(rank)
        xp, row = _module(runs.count), np.arange(rows)
        run = xp.minimum(_rank_in(xp, runs.first_row + runs.count, row), len(runs.count) - 1)
        token = self.first[runs.request[run]] + runs.offset[run] + (row - runs.first_row[run]) * self.stride
        return int32(xp, xp.where(row < runs.count.sum(), token, -1))

    def gathered(self, token: Ints, rows: int):
        """Index of packed tokens [n] among all ranks' rows, `rows` per rank, one rank after another: int32 [n]."""
        rank, row = self.locate(token)
        return rank * rows + row

    def shard(self, x: Any, rows: int | None = None) -> Any:
        """Packed tokens [tokens, ...] as every rank's rows [cp, rows, ...], zero in padding rows; of host lengths.

        Args:
          rows: of a rank's array; as few as the fullest rank needs if None.
        """
        xp, rows = _module(x), int(self.counts().max()) if rows is None else rows
        token = np.stack([self.tokens(rank, rows) for rank in range(self.cp)])
        return xp.concatenate([x, xp.zeros((1, *x.shape[1:]), x.dtype)])[token]  # -1 is the row of zeros

    def gather(self, shards: Any) -> Any:
        """Every rank's rows [cp, rows, ...] in packed order [tokens, ...]; of host lengths."""
        return shards[self.locate(np.arange(self.lengths.sum()))]


@dataclasses.dataclass(frozen=True, eq=False)
class ZigzagSplit(Split):
    """A batch cut at `starts`: block j of request b is its tokens starts[b, j] ... starts[b, j + 1] - 1.

    Attributes:
      starts: [requests, 2 cp + 1], ascending from 0 to the request's length.
    """

    starts: Any

    @property
    def sizes(self):
        """Tokens of each block: [requests, 2 cp]."""
        return self.starts[:, 1:] - self.starts[:, :-1]

    def counts(self):
        blocks = self.sizes.sum(0)
        return int32(_module(blocks), (blocks + blocks[::-1])[: self.cp])

    def runs(self, rank: Ints) -> Runs:
        xp, blocks = _module(self.starts), (rank, 2 * self.cp - 1 - rank)
        sizes, requests = self.sizes, np.arange(len(self.lengths))
        count = xp.concatenate([sizes[:, block] for block in blocks])
        offset = xp.concatenate([self.starts[:, block] for block in blocks])
        return _runs(xp, count, xp.concatenate([requests, requests]), offset)

    def locate(self, token: Ints):
        xp, token = _as_token(self.lengths, token)
        request = xp.minimum(_rank_in(xp, self.lengths.cumsum(), token), len(self.lengths) - 1)
        i = token - self.first[request]
        last = 2 * self.cp - 1
        block = xp.minimum((self.starts[request, 1:] <= i[:, None]).sum(1), last)
        sizes = self.sizes
        before = sizes.cumsum(0) - sizes
        row = before[request, block] + i - self.starts[request, block]
        row = row + xp.where(block < self.cp, 0, sizes.sum(0)[last - block])
        return int32(xp, xp.minimum(block, last - block)), int32(xp, row)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedInterleaveSplit(Split):
    """A batch of which packed token t is row t div cp of rank t mod cp."""

    @property
    def stride(self) -> int:
        return self.cp

    def counts(self):
        xp, total = _module(self.lengths), self.lengths.sum()
        return int32(xp, total // self.cp + (np.arange(self.cp) < total % self.cp))

    def runs(self, rank: Ints) -> Runs:
        xp = _module(self.lengths)
        skip = (rank - self.first) % self.cp
        count = -(-xp.maximum(self.lengths - skip, 0) // self.cp)
        return _runs(xp, count, xp.arange(len(self.lengths)), skip)

    def locate(self, token: Ints):
        xp, token = _as_token(self.lengths, token)
        return int32(xp, token % self.cp), int32(xp, token // self.cp)


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """Each request in 2c blocks whose sizes differ by at most one; rank r holds blocks r and 2c - 1 - r.

        size(j) = floor(L / 2c) + [j < L mod 2c]        start(j) = j floor(L / 2c) + min(j, L mod 2c)

    Attributes:
      cp: ranks, c.
    """

    cp: int

    def __post_init__(self):
        positive_int("cp", self.cp)

    def split(self, lengths: Ints, starts: Ints | None = None) -> ZigzagSplit:
        """The batch of these lengths [requests], cut evenly, or at `starts` [requests, 2 cp + 1]."""
        xp, lengths = _lengths(lengths)
        if starts is None:
            j = np.arange(2 * self.cp + 1)
            base, rest = lengths[:, None] // (2 * self.cp), lengths[:, None] % (2 * self.cp)
            starts = j * base + xp.minimum(j, rest)
        return ZigzagSplit(self.cp, lengths, starts)


@dataclasses.dataclass(frozen=True)
class PackedInterleave:
    """Packed token t on rank t mod c, row t div c; over the packed batch, unlike `Interleave`, which is per request.

    Attributes:
      cp: ranks, c.
    """

    cp: int

    def __post_init__(self):
        positive_int("cp", self.cp)

    def split(self, lengths: Ints) -> PackedInterleaveSplit:
        """The batch of these lengths [requests]."""
        return PackedInterleaveSplit(self.cp, _lengths(lengths)[1])


def _lengths(lengths: Ints):
    """(array module, lengths); host lengths are checked, their sum too."""
    xp, lengths = prepare(lengths=lengths)
    if lengths.ndim != 1 or not len(lengths):
        raise invalid("lengths", f"shape {lengths.shape}", "one length per request", "Give a flat sequence.")
    if xp is np and lengths.sum() > INT32_MAX:
        raise invalid("lengths", f"a sum of {lengths.sum()}", f"at most {INT32_MAX} tokens", "Split the batch.")
    return xp, lengths


def _runs(xp, count, request, offset) -> Runs:
    return Runs(*(int32(xp, a) for a in (count.cumsum() - count, count, request, offset)))


def _as_token(lengths, token: Ints):
    """(array module, token) in the arithmetic of `lengths`."""
    xp = _module(lengths)
    return xp, xp.asarray(token)


def _module(array: Any):
    return jnp if isinstance(array, jax.Array) else np


def _rank_in(xp, ends, item):
    """How many of the ascending `ends` are <= each item."""
    if xp is np:
        return np.searchsorted(ends, item, side="right")
    return xp.searchsorted(ends, item, side="right", method="compare_all")
