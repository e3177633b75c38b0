"""A QSA layer over the new tokens of a packed batch."""

from functools import partial as bind
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxcp.errors import invalid
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.forward import check_arguments, check_layer, count_trace, forward
from jaxcp.qsa.params import Params
from jaxcp.qsa.plan import Plan


def prefill(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    plan: Plan,
    *,
    axis_name: str | None = None,
    layer: Any = 0,
    implementation: str = "auto",
    return_selection: bool = False,
) -> tuple[Float[Array, "rows hidden"], Cache] | tuple[Float[Array, "rows hidden"], Cache, Int32[Array, "rows k"]]:
    """One QSA layer over a chunk: writes its tokens into the cache, attends to everything its rows may see.

        y(p) = W_o concat_h(softmax_{t in I(p)}(q_h k_t / sqrt(head_dim)) v_t * sigmoid(g_h))

    One compiled program per bucket of `plan`; nothing in it leaves the device, and the cache is donated: the one passed
    in is gone, use the one returned. May be called inside another jit or `lax.scan` (with `layer` traced).

    Args:
      params: weights of the layer.
      x: [plan.rows, hidden] in params' dtype, packed like the plan's lengths; `plan.pad` appends the padding rows.
      cache: of `init_cache`, holding the plan's prefixes; consumed.
      plan: of `qsa.plan`.
      axis_name: mesh axis of context parallelism; None: one device.
      layer: of the cache, a host integer or an int32 scalar on the device.
      implementation: of selection and attention: "xla", or "auto" for the best available.
      return_selection: also return the selected blocks of every row.

    Returns:
      y [plan.rows, hidden], 0 in padding rows, and the cache; with `return_selection` also int32 [plan.rows, k] block
      ids: ascending, -1 behind.

    Raises:
      NotImplementedError: `axis_name` is given.
      TypeError, ValueError: arguments that do not belong together.

    Source: Qwen sparse attention as released with Qwen3.8-Flash-Next.
    """
    if axis_name is not None:
        raise NotImplementedError(f"axis_name: got {axis_name!r}; expected None. Prefill runs on one device so far.")
    if not isinstance(plan, Plan):
        raise invalid(
            "plan", type(plan).__name__, "a plan", "Make it with qsa.plan(lengths, prefix_lengths).", TypeError
        )
    check_layer(layer, cache)
    static = {"implementation": implementation, "return_selection": return_selection}
    return _prefill(params, x, cache, plan, on_device(layer), **static)


@bind(jax.jit, static_argnames=("implementation", "return_selection"), donate_argnames="cache")
def _prefill(params, x, cache, plan, layer, *, implementation, return_selection):
    count_trace("prefill")
    check_arguments(params, x, cache, plan.rows, "Pad the packed tokens with plan.pad(x).")
    bounds = {"context": plan.context, "longest": plan.rows}
    result = forward(
        params, x, cache, plan.segments, plan.rope_positions, layer, **bounds, implementation=implementation
    )
    return result if return_selection else result[:2]


def on_device(integer: Any) -> Array:
    """A host integer as an explicit transfer, so that programs do not depend on its value; arrays as they are."""
    return integer if isinstance(integer, jax.Array) else jax.device_put(np.int32(integer))
