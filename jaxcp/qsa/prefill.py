"""A QSA layer over the new tokens of a packed batch."""

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxcp.errors import invalid
from jaxcp.overlap import SCHEDULES, all_gather
from jaxcp.qsa import parallel
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.forward import check_arguments, check_layer, count_trace, forward
from jaxcp.qsa.params import Params
from jaxcp.qsa.peers import OnAxis, Peers
from jaxcp.qsa.plan import Plan
from jaxcp.qsa.view import view_of


def prefill(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    plan: Plan,
    *,
    axis_name: str | None = None,
    layer: Any = 0,
    schedule: str = "overlapped",
    implementation: str = "auto",
    return_selection: bool = False,
) -> tuple[Float[Array, "rows hidden"], Cache] | tuple[Float[Array, "rows hidden"], Cache, Int32[Array, "rows k"]]:
    """One QSA layer over a chunk: writes its tokens into the cache, attends to everything its rows may see.

        y(p) = W_o concat_h(softmax_{t in I(p)}(q_h k_t / sqrt(head_dim)) v_t * sigmoid(g_h))

    One compiled program per bucket of `plan`; nothing in it leaves the device, and the cache is donated: the one passed
    in is gone, use the one returned. May be called inside another jit or `lax.scan` (with `layer` traced).

    Context parallelism: inside `jax.shard_map`, with `axis_name`. Every rank passes its rows (of `plan.shard`, sharded
    over the axis) and gets theirs; params, cache and plan are the same on all ranks, and so is the cache returned. With
    one rank it is the plain program.

    Args:
      params: weights of the layer.
      x: [plan.local_rows, hidden] in params' dtype, packed like the plan's lengths; `plan.pad` (one device) and
        `plan.shard` append the padding rows.
      cache: of `init_cache`, holding the plan's prefixes; consumed.
      plan: of `qsa.plan`, made for as many ranks as the axis has.
      axis_name: mesh axis of context parallelism; None: one device.
      layer: of the cache, a host integer or an int32 scalar on the device.
      schedule: when a layer's two gathers run. "overlapped": index keys while the rows are projected, K/V while the
        indexer works; "kv_first": K/V while the rows are projected, then index keys; "inline": K/V behind nothing.
      implementation: of what lies between the layer's products: "xla", "cuda", or "auto" for the best of each.
      return_selection: also return the selected blocks of every row.

    Returns:
      y [plan.local_rows, hidden], 0 in padding rows, and the cache; with `return_selection` also int32
      [plan.local_rows, k] block ids: ascending, -1 behind.

    Raises:
      TypeError, ValueError: arguments that do not belong together.

    Source: Qwen sparse attention as released with Qwen3.8-Flash-Next.
    """
    check_ways(plan, cache, axis_name, schedule)
    check_layer(layer, cache)
    if axis_name is not None and plan.cp == 1:
        x = all_gather(x, axis_name)  # of one rank: the same array, known to be the same on all
    static = {"implementation": implementation, "return_selection": return_selection}
    return _prefill(params, x, cache, plan, on_device(layer), peers=peers_of(plan, axis_name, schedule), **static)


def peers_of(plan: Plan, axis_name: str | None, schedule: str) -> OnAxis | None:
    """The other ranks of the axis; None where there are none."""
    return None if axis_name is None or plan.cp == 1 else OnAxis(axis_name, schedule)


_STATIC = ("peers", "implementation", "return_selection")


@bind(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _prefill(params, x, cache, plan, layer, *, peers, implementation, return_selection):
    count_trace("prefill")
    check_rows(params, x, cache, plan)
    one = layer_of(plan, cache, peers, implementation)
    result = one(params, x, cache, layer)
    return result if return_selection else result[:2]


def layer_of(plan: Plan, cache: Cache, peers: Peers | None, implementation: str) -> Callable:
    """(params, x, cache, layer) -> (y, cache, selection) of any layer of this forward; what they share is made here."""
    if peers is None:
        shared = {"segments": plan.segments, "rope": plan.rope_positions, "context": plan.context, "longest": plan.rows}
        return bind(_plain, **shared, implementation=implementation)
    ways = {"compressed": plan.index_block > 1, "peers": peers, "implementation": implementation}
    return bind(_parallel, view=view_of(plan, peers.rank(), cache), **ways)


def _plain(params, x, cache, layer, *, segments, rope, **bounds):
    return forward(params, x, cache, segments, rope, layer, **bounds)


def _parallel(params, x, cache, layer, *, view, **ways):
    return parallel.forward(params, x, cache, view, layer, **ways)


def check_rows(params: Params, x: Array, cache: Cache, plan: Plan) -> None:
    """Raises unless params, this rank's rows and the cache belong together."""
    remedy = "Pad the packed tokens with plan.pad(x), or deal them out with plan.shard(x)."
    check_arguments(params, x, cache, plan.local_rows, remedy)


def check_ways(plan: Plan, cache: Cache, axis_name: str | None, schedule: str) -> None:
    """Raises unless the plan was made for this axis and for such a cache, and there is such a schedule."""
    if not isinstance(plan, Plan):
        raise invalid(
            "plan", type(plan).__name__, "a plan", "Make it with qsa.plan(lengths, prefix_lengths).", TypeError
        )
    if schedule not in SCHEDULES:
        raise invalid("schedule", repr(schedule), f"one of {sorted(SCHEDULES)}", "It orders a layer's two gathers.")
    if axis_name is None and plan.cp > 1:
        raise invalid("axis_name", None, f"the mesh axis of the plan's {plan.cp} ranks", "Name it, or plan with cp=1.")
    if axis_name is not None and (ranks := axis_ranks(axis_name)) != plan.cp:
        got, expected = f"a plan for cp = {plan.cp}", f"cp = {ranks}, the size of axis {axis_name!r}"
        raise invalid("plan", got, expected, f"Make it with qsa.plan(..., cp={ranks}).")
    if plan.fits is not None and (cache.requests < plan.fits[0] or cache.capacity < plan.fits[1]):
        raise invalid(
            "cache",
            f"{cache.requests} requests of {cache.capacity} tokens",
            "at least {} of {}, those of the cache in the plan".format(*plan.fits),
            "Plan with the cache that is written.",
        )


def axis_ranks(axis_name: str) -> int:
    """Ranks of a mesh axis of the shard_map around the caller."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise invalid(
            "axis_name",
            repr(axis_name),
            "a mesh axis of the shard_map around this call",
            "Call it inside jax.shard_map.",
        ) from None


def on_device(integer: Any) -> Array:
    """A host integer as an explicit transfer, so that programs do not depend on its value; arrays as they are."""
    return integer if isinstance(integer, jax.Array) else jax.device_put(np.int32(integer))
