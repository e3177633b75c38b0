"""A small gather that is waited for and a large one behind it that is not.

XLA combines gathers of one axis into one, and then everybody waits for the large one. Two things keep the large one
apart, each alone (tests/test_schedule_prefill.py shows both, and the failure without either):

* a combiner key: gathers with different keys are never combined;
* an optimization barrier over (gathered small, local large): the large gather then depends on the small one's end.

With both, XLA's scheduler starts the large gather directly after the small one and waits for it where its result is
first read. There are no streams, no events and nothing to order by hand; a rank's program fixes one order for all.
"""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Shaped

KEY = "jaxcp_early"

Pair = tuple[Array, Callable[[Any], Array]]
"""The gathered small array, and what gives the gathered large one once the work that it may hide behind is known."""


def all_gather(x: Shaped[Array, "rows *features"], axis_name: str) -> Shaped[Array, "all_rows *features"]:
    """Every rank's rows, one rank after another, the same on all of them; in shard_map."""
    return lax.all_gather(x, axis_name, tiled=True, to="invarying")


def start_early(
    x: Shaped[Array, "rows *features"], axis_name: str, *, after: Array, key: str = KEY
) -> tuple[Array, Shaped[Array, "all_rows *features"]]:
    """`after`, and every rank's `x`, gathered asynchronously from the moment when `after` exists.

    What uses the returned `after` and not the gathered rows runs while they travel.

    Args:
      x: [rows, ...], this rank's; in shard_map.
      axis_name: mesh axis.
      after: an array; the gather starts behind whatever makes it.
      key: gathers with different keys are never combined into one; one that shares its key may be.
    """
    after, x = lax.optimization_barrier((after, x))
    with set_xla_metadata(combiner_key=key):
        return after, all_gather(x, axis_name)


def overlapped(small: Array, large: Array, axis_name: str) -> Pair:
    """The small gather first and inline; the large one starts directly behind it."""
    small, large = start_early(large, axis_name, after=all_gather(small, axis_name))
    return small, lambda work: large


def large_first(small: Array, large: Array, axis_name: str) -> Pair:
    """The large gather starts first, the small one runs while it is under way."""
    with set_xla_metadata(combiner_key=KEY):
        large = all_gather(large, axis_name)
    return all_gather(small, axis_name), lambda work: large


def inline(small: Array, large: Array, axis_name: str) -> Pair:
    """No overlap: the large gather starts when the work is done. What the others are measured against."""

    def finish(work):
        _, ready = lax.optimization_barrier((work, large))
        return all_gather(ready, axis_name)

    return all_gather(small, axis_name), finish


SCHEDULES = {"overlapped": overlapped, "kv_first": large_first, "inline": inline}
"""Orders of the two gathers of a layer by name; each has the signature of `overlapped`."""
