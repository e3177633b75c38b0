"""Host side of the paged cache: which widened pages a request holds. Plain integers, no device work."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcp.errors import CacheOverflowError, invalid
from jaxcp.layout import Interleave, positive_int


class PagePool:
    """Hands out the widened pages of a cache: page g is page g of every rank, page 0 is reserved.

    A request's pages, in the order they were given, hold its tokens in order; page p of the list holds positions
    p * width ... (p + 1) * width - 1, width = cp * page_size.

    Attributes:
      pages: pages of one rank, page 0 included.
      width: tokens of a widened page.
    """

    def __init__(self, layout: Interleave, *, pages: int, page_size: int):
        self.width = layout.widened(page_size)
        self.pages = positive_int("pages", pages)
        self._free = list(range(pages - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that can still be allocated."""
        return len(self._free)

    def allocate(self, tokens: int, held: Sequence[int] = ()) -> list[int]:
        """`held` and as many new pages as a request of `tokens` tokens needs beside them.

        Raises:
          CacheOverflowError: the pool has too few free pages; nothing was allocated.
        """
        need = -(-positive_int("tokens", tokens) // self.width) - len(held)
        if need > len(self._free):
            raise CacheOverflowError(
                f"pages: {tokens} tokens need {need} more pages of {self.width} tokens, "
                f"{len(self._free)} are free. Free a request or build a larger cache."
            )
        new = [self._free.pop() for _ in range(max(need, 0))]
        self._held.update(new)
        return [*held, *new]

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back. What they hold is garbage from now on.

        Raises:
          ValueError: a page that is not allocated.
        """
        foreign = [p for p in pages if p not in self._held]
        if foreign or len(set(pages)) != len(pages):
            raise invalid(
                "pages", list(pages), "pages from allocate, each once", "A page is freed once, by its holder."
            )
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))

    def table(self, requests: Sequence[Sequence[int]], pages_per_request: int) -> np.ndarray:
        """Page table of a batch: int32 [requests, pages_per_request], 0 where a request has no page."""
        table = np.zeros((len(requests), positive_int("pages_per_request", pages_per_request)), np.int32)
        for row, pages in zip(table, requests, strict=True):
            if len(pages) > pages_per_request:
                raise invalid(
                    "pages_per_request", pages_per_request, f"at least {len(pages)}", "A request holds more pages."
                )
            row[: len(pages)] = pages
        return table


def even_page_table(pages: int, requests: int) -> np.ndarray:
    """Pages 1 ... pages - 1 dealt out evenly: int32 [requests, (pages - 1) // requests]."""
    each = (pages - 1) // requests
    if not each:
        raise invalid(
            "pages", pages, f"at least {requests + 1}", f"{requests} requests need a page each beside page 0."
        )
    return 1 + np.arange(requests * each, dtype=np.int32).reshape(requests, each)


def checked_page_table(page_table: Any, pages: int, requests: int) -> np.ndarray:
    """`page_table` as int32, or the error that says what is wrong with it."""
    table = np.asarray(page_table)
    if table.ndim != 2 or table.shape[0] != requests or not table.shape[1]:
        raise invalid(
            "page_table.shape", table.shape, f"[requests={requests}, pages_per_request]", "Give one row per request."
        )
    if table.dtype.kind not in "iu":
        raise invalid("page_table.dtype", table.dtype, "int32", "Page ids are integers.", TypeError)
    outside = table[(table < 0) | (table >= pages)]
    if outside.size:
        raise invalid(
            "page_table",
            outside[0],
            f"ids in [1, {pages}), 0 for no page",
            "Page ids index the pool.",
        )
    for request, row in enumerate(table):
        ids, times = np.unique(row[row > 0], return_counts=True)
        if (times > 1).any():
            raise invalid(
                "page_table",
                f"page {ids[times > 1][0]} twice for request {request}",
                "every page at most once per request",
                "Two places of one request would overwrite each other; different requests may share a page.",
            )
    return table.astype(np.int32)
