"""A stack of QSA layers over a chunk, in one program."""

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp.errors import invalid
from jaxcp.overlap import all_gather
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.forward import count_trace
from jaxcp.qsa.params import Params
from jaxcp.qsa.plan import Plan
from jaxcp.qsa.prefill import check_rows, check_ways, layer_of, peers_of


def add(x: Array, y: Array, layer: Any) -> Array:
    """The residual connection."""
    return x + y


def prefill_layers(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    plan: Plan,
    *,
    axis_name: str | None = None,
    between: Callable[[Array, Array, Any], Array] = add,
    scan: bool = False,
    schedule: str = "overlapped",
    implementation: str = "auto",
) -> tuple[Float[Array, "rows hidden"], Cache]:
    """The cache's layers one after another: x <- between(x, prefill(params[i], x, cache, plan, layer=i), i).

    One program and one dispatch; the maps that layers share are made once. Under context parallelism it is called in
    `jax.shard_map`, like `prefill`, whose other arguments, results and errors it has.

    Args:
      params: weights of all layers, stacked on a leading axis.
      between: (layer's input, its output, layer) -> the next layer's input, on this rank's rows: the rest of the model.
      scan: as a loop over layers rather than one after another: compiles once for all layers, and copies every layer's
        weights out of their stack.

    Returns:
      The last `between`'s rows, and the cache.
    """
    check_ways(plan, cache, axis_name, schedule)
    if axis_name is not None and plan.cp == 1:
        x = all_gather(x, axis_name)
    static = {"between": between, "scan": scan, "implementation": implementation}
    return _prefill_layers(params, x, cache, plan, peers=peers_of(plan, axis_name, schedule), **static)


_STATIC = ("peers", "between", "scan", "implementation")


@bind(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _prefill_layers(params, x, cache, plan, *, peers, between, scan, implementation):
    count_trace("prefill_layers")
    for leaf in jax.tree.leaves(params):
        if leaf.shape[:1] != (cache.layers,):
            raise invalid(
                "params", f"a weight of shape {leaf.shape}", f"{cache.layers} layers, the cache's", "Stack the layers."
            )
    check_rows(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params), x, cache, plan)
    return stacked(layer_of(plan, cache, peers, implementation), params, x, cache, between, scan)


def stacked(
    one: Callable, params: Params, x: Array, cache: Cache, between: Callable, scan: bool
) -> tuple[Array, Cache]:
    """Layers one after another, each by `one` of `layer_of`, as `prefill_layers` says."""

    def step(carry, scanned):
        (x, cache), (weights, layer) = carry, scanned
        y, cache, _ = one(weights, x, cache, layer)
        return (between(x, y, layer), cache), None

    return lax.scan(step, (x, cache), (params, jnp.arange(cache.layers, dtype=jnp.int32)), unroll=not scan)[0]
