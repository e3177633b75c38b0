"""A context-parallel forward as one rank sees it: maps between packed tokens, its own rows and all ranks' rows.

Everything is made on the device from the plan's table, O(requests) integers that are the same on every rank. Three
orders of the new tokens occur:

    packed      one request after another; index keys are compressed in this order
    own         this rank's rows, as the layout deals them out
    gathered    all ranks' rows, one rank after another: what an all-gather gives; K and V are written in this order
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxcp.layout import Split
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.indexing import take
from jaxcp.qsa.plan import Plan
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import Rows, Segments, rows_of
from jaxcp.qsa.update import with_room


class View(NamedTuple):
    """Maps of one forward on one rank, the same for all layers; lives inside one trace.

    Rows that have no place in the cache are padding here.

    Attributes:
      segments: of all new tokens in packed order, one per request.
      rows: of all new tokens in packed order.
      rope: int32 [3, rows], rope positions in packed order.
      place: int32 [rows], gathered row of each packed token; in range also past the last.
      gathered: what each gathered row is.
      own: this rank's query rows.
      own_rope: int32 [3, local rows].
    """

    segments: Segments
    rows: Rows
    rope: Int[Array, "3 rows"]
    place: Int[Array, " rows"]
    gathered: Rows
    own: Queries
    own_rope: Int[Array, "3 local"]


def view_of(plan: Plan, rank: Int[Array, ""], cache: Cache) -> View:
    """The maps of `rank`, for forwards over `cache`."""
    segments, split, local = plan.segments, plan.split(), plan.local_rows
    rows = rows_of(segments, plan.rows)

    def rows_on(rank):
        return rows_of(_segments_on(segments, split, rank), local, split.stride)

    own = rows_on(rank)
    everyone = jax.vmap(rows_on)(jnp.arange(plan.cp, dtype=jnp.int32))
    if plan.rope_positions is None:
        rope, own_rope = (jnp.broadcast_to(jnp.maximum(r.position, 0), (3, len(r.position))) for r in (rows, own))
    else:
        rope = plan.rope_positions
        own_rope = take(rope.T, jnp.maximum(split.tokens(rank, local), 0)).T
    place = jnp.clip(split.gathered(jnp.arange(plan.rows, dtype=jnp.int32), local), 0, plan.rows - 1)
    gathered = Rows(*(a.reshape(-1) for a in everyone))
    rows, gathered, own = (with_room(cache, r) for r in (rows, gathered, own))
    queries = Queries(_segments_on(segments, split, rank), own, min(plan.context, cache.capacity), local)
    return View(segments, rows, rope, place, gathered, queries, own_rope)


def _segments_on(segments: Segments, split: Split, rank: Int[Array, ""]) -> Segments:
    """The runs of one rank as segments; a run's tokens are `split.stride` apart."""
    runs = split.runs(rank)
    prefix = take(segments.prefix, runs.request) + runs.offset
    return Segments(runs.first_row, runs.count, prefix, take(segments.request, runs.request))
