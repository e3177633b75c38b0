"""A small gather that is waited for and a large one behind it that is not.

Left alone, XLA combines gathers of one axis into one, and then everybody waits for the large one. Two things keep it
apart, each alone (tests/test_schedule_prefill.py shows both, and the failure without either):

* a combiner key: gathers with different keys are never combined;
* an optimization barrier over (gathered small, local large): the large gather then depends on the small one's end.

XLA's scheduler then places both: it starts a gather as late as its latency, by its own estimate, still passes behind
other work. What that work may be is ours to say. Whatever is computed before the barrier hides the small gather, and
only what comes after it can hide the large one. A second barrier puts the uses of the large one behind all of the work:
a cheap use, such as a kernel that stores it, would otherwise come first and wait. There are no streams, no events and
nothing to order by hand; a program fixes one order of its collectives for all ranks.
"""

from collections.abc import Callable
from functools import partial as bind
from typing import Any

from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Shaped

KEY = "jaxcp_early"

Gathered = tuple[Any, Any, Callable[[Any], tuple[Array, Any]]]
"""The gathered small array, the local arrays, and what gives (gathered large array, work) once there is the work."""


def all_gather(x: Shaped[Array, "rows *features"], axis_name: str) -> Shaped[Array, "all_rows *features"]:
    """Every rank's rows, one rank after another, the same on all of them; in shard_map."""
    return lax.all_gather(x, axis_name, tiled=True, to="invarying")


def start_early[T](x: Shaped[Array, "rows *features"], axis_name: str, *, after: T, key: str = KEY) -> tuple[T, Array]:
    """`after`, and every rank's `x` [all_rows, features], gathered asynchronously from when `after` exists.

    What uses the returned `after` and not the gathered rows runs while they travel.

    Args:
      x: [rows, features], this rank's; in shard_map.
      axis_name: mesh axis.
      after: a tree of arrays; the gather starts behind whatever makes them.
      key: gathers with different keys are never combined into one; those that share one may be.
    """
    after, x = lax.optimization_barrier((after, x))
    with set_xla_metadata(combiner_key=key):
        return after, all_gather(x, axis_name)


def overlapped(small: Array, large: Array, local: Any, axis_name: str) -> Gathered:
    """The small gather while the local arrays are computed; the large one from then on, behind the work.

    Args:
      small, large: what is gathered.
      local: a tree of this rank's arrays that only the work needs.
      axis_name: mesh axis.
    """
    (small, local), large = start_early(large, axis_name, after=(all_gather(small, axis_name), local))
    return small, local, bind(_after, large)


def large_first(small: Array, large: Array, local: Any, axis_name: str) -> Gathered:
    """The large gather while the local arrays are computed; the small one from then on, waited for."""
    with set_xla_metadata(combiner_key=KEY):
        large = all_gather(large, axis_name)
    large, small, local = lax.optimization_barrier((large, small, local))
    return all_gather(small, axis_name), local, bind(_after, large)


def _after(large: Array, work: Any) -> tuple[Array, Any]:
    """Both, once there is the work."""
    return lax.optimization_barrier((large, work))


def inline(small: Array, large: Array, local: Any, axis_name: str) -> Gathered:
    """The large gather when the work is done, behind nothing. What the others are measured against."""

    def finish(work):
        ready, work = lax.optimization_barrier((large, work))
        with set_xla_metadata(combiner_key=KEY):
            return all_gather(ready, axis_name), work

    small, local = lax.optimization_barrier((all_gather(small, axis_name), local))  # nothing is left to hide it
    return small, local, finish


SCHEDULES = {"overlapped": overlapped, "kv_first": large_first, "inline": inline}
"""Orders of the two gathers of a layer by name; each has the signature of `overlapped`."""
