"""The query rows of a forward, and how XLA implementations walk them in bounded memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxcp.qsa.segments import Rows, Segments

SCRATCH_BYTES = 64 << 20
"""Intended size of what one step of an XLA implementation keeps: a tile's scores, or some rows' gathered keys."""

ROWS_AT_ONCE = 6600
"""Rows whose queries exist at a time: 20 rounds of an H200's 132 processors, where tiles of five rows have two KV heads
each (kernels/csrc/qsa/attend_params.h); 4096 rows at a time leave 4 % of the attention's time unused."""


class Queries(NamedTuple):
    """Query rows and what is known about them at trace time; lives inside one trace.

    Attributes:
      segments: runs of rows of one request.
      rows: request and position of every row.
      context: bound of a request's tokens.
      longest: bound of a segment's rows.
    """

    segments: Segments
    rows: Rows
    context: int
    longest: int


def scratch_rows(row_bytes: int) -> int:
    """Rows of `row_bytes` that fit in the scratch bound; at least 1."""
    return max(1, SCRATCH_BYTES // row_bytes)


def in_steps(f: Callable, items: Any, item_bytes: int) -> Any:
    """f of every item on axis 0 of `items`, as many at once as the scratch bound allows."""
    at_once = scratch_rows(item_bytes)
    if len(jax.tree.leaves(items)[0]) <= at_once:
        return jax.vmap(f)(items)
    return lax.map(f, items, batch_size=at_once)
