"""A QSA layer over the newest tokens of every request: one, or several to verify a draft."""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxcp.errors import invalid
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.forward import check_arguments, check_layer, count_trace, forward
from jaxcp.qsa.params import Params
from jaxcp.qsa.prefill import on_device
from jaxcp.qsa.segments import Segments


def decode(
    params: Params,
    x: Float[Array, "tokens hidden"],
    cache: Cache,
    lengths: Any,
    *,
    counts: Any = None,
    rope_positions: Int[Array, "axes positions"] | None = None,
    layer: Any = 0,
    implementation: str = "auto",
    return_selection: bool = False,
) -> (
    tuple[Float[Array, "tokens hidden"], Cache] | tuple[Float[Array, "tokens hidden"], Cache, Int32[Array, "tokens k"]]
):
    """One QSA layer over k >= 1 new tokens of every request of the cache.

    The maths is prefill's, row by row: token t of a request sees blocks complete at its own position. One compiled
    program for all lengths; nothing in it leaves the device, and the cache is donated. A later call may start anywhere
    behind the last `cache.max_query_tokens` tokens: what it passes again replaces rejected drafts.

    Args:
      params: weights of the layer.
      x: [requests * k, hidden] in params' dtype; request b's tokens in rows b k ... b k + k - 1.
      cache: of `init_cache`; consumed.
      lengths: int [requests], tokens of each request, the new ones included. Host integers are checked; a device array
        is not, and a request that does not fit is dropped: its rows are 0 and `qsa.check` raises.
      counts: int [requests], how many of the k tokens are real; rows after them are padding and give 0. A request with
        count 0 is idle. None: all of them.
      rope_positions: int32 [3, tokens] (temporal, height, width); None for text.
      layer: of the cache, a host integer or an int32 scalar on the device.
      implementation: of what lies between the layer's products: "xla", "cuda", or "auto" for the best of each.
      return_selection: also return the selected blocks of every row.

    Returns:
      y [requests * k, hidden], 0 in padding rows, and the cache; with `return_selection` also int32 [requests * k,
      blocks] ids: ascending, -1 behind.

    Raises:
      TypeError, ValueError: arguments that do not belong together, or more tokens than `cache.max_query_tokens`.
    """
    check_layer(layer, cache)
    k = _query_tokens(len(x), cache)
    if counts is None:
        counts = np.full(cache.requests, k)
    _check_host(lengths, counts, k, cache)
    lengths, counts = (
        a if isinstance(a, jax.Array) else jax.device_put(np.asarray(a, np.int32)) for a in (lengths, counts)
    )
    static = {"implementation": implementation, "return_selection": return_selection}
    return _decode(params, x, cache, lengths, counts, rope_positions, on_device(layer), **static)


@bind(jax.jit, static_argnames=("implementation", "return_selection"), donate_argnames="cache")
def _decode(params, x, cache, lengths, counts, rope, layer, *, implementation, return_selection):
    count_trace("decode")
    check_arguments(params, x, cache, len(x), "Give [requests * k, hidden].")
    if rope is not None and rope.shape != (3, len(x)):
        raise invalid(
            "rope_positions.shape", rope.shape, f"(3, {len(x)})", "Give (temporal, height, width) of each row."
        )
    k = len(x) // cache.requests
    lengths, counts = lengths.astype(jnp.int32), counts.astype(jnp.int32)
    fits = (counts >= 0) & (counts <= k) & (counts <= lengths) & (lengths <= cache.capacity)
    dropped = jnp.sum(jnp.where(fits, 0, k), dtype=jnp.int32)
    cache = dataclasses.replace(cache, faults=cache.faults.at[0].add(dropped))
    request = jnp.arange(cache.requests, dtype=jnp.int32)
    counts = jnp.where(fits, counts, 0)
    segments = Segments(request * k, counts, jnp.where(fits, lengths - counts, 0), request)
    bounds = {"context": cache.capacity, "longest": k}
    result = forward(params, x, cache, segments, rope, layer, **bounds, implementation=implementation)
    return result if return_selection else result[:2]


def _query_tokens(tokens: int, cache: Cache) -> int:
    """k, or the error that says why there is none."""
    if not tokens or tokens % cache.requests:
        raise invalid(
            "x",
            f"{tokens} rows",
            f"a positive multiple of {cache.requests}, the cache's requests",
            "Give every request the same number of rows and say in `counts` which are real.",
        )
    k = tokens // cache.requests
    if k > cache.max_query_tokens:
        raise invalid(
            "x",
            f"{k} tokens per request",
            f"at most max_query_tokens = {cache.max_query_tokens}",
            "A rejected draft could not be taken back; make the cache with a larger max_query_tokens, or use prefill.",
        )
    return k


def _check_host(lengths: Any, counts: Any, k: int, cache: Cache) -> None:
    """Raises for shapes, and for values that are on the host."""
    for name, value in (("lengths", lengths), ("counts", counts)):
        shape, kind = (
            np.shape(value),
            jnp.asarray(value).dtype if isinstance(value, jax.Array) else np.asarray(value).dtype,
        )
        if shape != (cache.requests,) or kind.kind not in "iu":
            raise invalid(
                name,
                f"{kind} {shape}",
                f"integers ({cache.requests},)",
                "One entry per request of the cache.",
                TypeError,
            )
    if isinstance(lengths, jax.Array) or isinstance(counts, jax.Array):
        return
    lengths, counts = np.asarray(lengths), np.asarray(counts)
    if ((counts < 0) | (counts > k)).any():
        raise invalid(
            "counts", counts.tolist(), f"0 <= count <= {k}, the query tokens", "Padding rows come after the real ones."
        )
    if (lengths < counts).any():
        raise invalid(
            "lengths", lengths.tolist(), f"at least counts = {counts.tolist()}", "Lengths include the new tokens."
        )
    if (lengths > cache.capacity).any():
        raise invalid(
            "lengths",
            lengths.max(),
            f"at most {cache.capacity} tokens, the cache's capacity",
            "Give the cache more pages.",
        )
