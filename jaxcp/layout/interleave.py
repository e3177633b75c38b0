"""Decode's token layout: tokens of each request are dealt out to the ranks, a granule at a time."""

import dataclasses

import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout.integers import Ints, host_integers, int32, positive_int, prepare


@dataclasses.dataclass(frozen=True)
class Interleave:
    """Decode's token layout: position p of a request lives on rank (p // granularity) mod cp.

        owner(p)  = (p // I) mod c
        local(p)  = (p // (I c)) I + p mod I
        global(j) = (j // I) I c + r I + j mod I

    with I = granularity, c = cp, r = rank, p counted from 0 inside the request.

    Attributes:
      cp: ranks that share a request's keys.
      granularity: consecutive tokens per rank, >= 1; must divide the page size of a paged cache.
    """

    cp: int
    granularity: int = 1

    def __post_init__(self):
        positive_int("cp", self.cp)
        positive_int("granularity", self.granularity)

    @property
    def cycle(self) -> int:
        """Tokens after which the owner repeats: cp * granularity."""
        return self.cp * self.granularity

    def owner(self, position: Ints):
        """Rank that stores each position; int32, shape of `position`."""
        xp, p = prepare(position=position)
        return int32(xp, p // self.granularity % self.cp)

    def local_index(self, position: Ints):
        """Index of each position among the tokens its owner holds of the request; int32."""
        xp, p = prepare(position=position)
        return int32(xp, p // self.cycle * self.granularity + p % self.granularity)

    def global_position(self, local_index: Ints, rank: Ints):
        """Position of rank's `local_index`-th token; int32; inverse of `owner` and `local_index`."""
        xp, j, r = prepare(local_index=local_index, rank=rank)
        self._check_rank(r)
        p = j // self.granularity * self.cycle + r * self.granularity + j % self.granularity
        if xp is np:
            host_integers("global_position", p)
        return int32(xp, p)

    def local_length(self, length: Ints, rank: Ints):
        """Tokens of a `length`-token request that `rank` owns; int32.

        n_r(L) = (L // (c I)) I + clamp(L mod (c I) - r I, 0, I)
        """
        xp, L, r = prepare(length=length, rank=rank)
        self._check_rank(r)
        rest = xp.clip(L % self.cycle - r * self.granularity, 0, self.granularity)
        return int32(xp, L // self.cycle * self.granularity + rest)

    def local_lengths(self, length: Ints):
        """`local_length` for every rank: int32 [..., cp] for `length` [...]."""
        xp, L = prepare(length=length)
        return self.local_length(L[..., None], xp.arange(self.cp))

    def range_length(self, start: Ints, count: Ints, rank: Ints):
        """Tokens of positions [start, start + count) that `rank` owns; int32."""
        xp, s, n = prepare(start=start, count=count)
        if xp is np:
            host_integers("start + count", s + n)
        return self.local_length(s + n, rank) - self.local_length(s, rank)

    def visible_lengths(self, length: Ints, query_tokens: int, rank: Ints):
        """Keys on `rank` that each of the last `query_tokens` tokens of a request may see; int32 [..., query_tokens].

        `length` counts the query tokens, whose keys are already stored. Query t sees positions below
        L - k + t + 1, so the bound is n_r(L - k + t + 1): it can be 0 for an early row although n_r(L) is not. Rows
        before the start of the request (L < k) see nothing.
        """
        positive_int("query_tokens", query_tokens)
        xp, L = prepare(length=length)
        bound = L[..., None] - query_tokens + 1 + xp.arange(query_tokens)
        return self.local_length(xp.maximum(bound, 0), rank)

    def widened(self, page_size: int) -> int:
        """Tokens of one widened page: a page of `page_size` rows on each rank. Allocators and prefix trees use this."""
        positive_int("page_size", page_size)
        if page_size % self.granularity:
            raise invalid(
                "page_size",
                page_size,
                f"a multiple of granularity = {self.granularity}",
                "Owners must repeat at every widened page, else slots and positions disagree.",
            )
        return page_size * self.cp

    def slots(self, page_table: Ints, position: Ints, page_size: int):
        """Virtual slot of each position of one request: int32, shape of `position`.

        Args:
          page_table: [pages], ids of the request's widened pages in token order.
          position: any shape.
          page_size: rows per page on one rank.
        """
        width = self.widened(page_size)
        xp, table, p = prepare(page_table=page_table, position=position)
        if xp is np and p.size and p.max() >= len(table) * width:
            raise invalid(
                "page_table",
                f"{len(table)} pages = {len(table) * width} tokens",
                f"room for position {p.max()}",
                "Append pages before writing.",
            )
        return int32(xp, table[p // width] * width + p % width)

    def slot_owner(self, slot: Ints):
        """Rank that stores each virtual slot; int32. Equals `owner` of the position, because pages start on a cycle."""
        return self.owner(slot)

    def physical_row(self, slot: Ints):
        """Row of each virtual slot in its owner's pool, rows counted over all pages; int32."""
        return self.local_index(slot)

    def write_rows(self, slot: Ints, rank: Ints, dump_row: Ints = 0):
        """Row where `rank` writes each virtual slot: its own slots' rows, and `dump_row` for everybody else's; int32.

        Slot 0 up to a cycle is the reserved padding page's and also lands there by construction.
        """
        xp, v, r, dump = prepare(slot=slot, rank=rank, dump_row=dump_row)
        self._check_rank(r)
        return xp.where(self.owner(v) == r, self.physical_row(v), int32(xp, dump))

    def local_page_table(self, page_table: Ints, length: Ints, rank: Ints, page_size: int):
        """`rank`'s page ids for a request of `length` tokens: int32 [pages], -1 beyond ceil(n_r(L) / page_size).

        Widened page g is page g of every rank, so only the number of valid entries differs between ranks.

        Args:
          page_table: [..., pages], ids of the widened pages.
          length: [...], tokens.
        """
        self.widened(page_size)
        xp, table, L = prepare(page_table=page_table, length=length)
        used = -(-self.local_length(L, rank) // page_size)
        if xp is np and (used > table.shape[-1]).any():
            raise invalid(
                "page_table",
                f"{table.shape[-1]} pages",
                f"at least {used.max()} pages for length {L.max()}",
                "Allocate more pages or shorten the request.",
            )
        return xp.where(xp.arange(table.shape[-1]) < xp.asarray(used)[..., None], int32(xp, table), -1).astype(xp.int32)

    def _check_rank(self, rank) -> None:
        if isinstance(rank, np.ndarray) and rank.size and rank.max() >= self.cp:
            raise invalid("rank", rank.max(), f"0 <= rank < {self.cp}", "Ranks count along the context-parallel axis.")
