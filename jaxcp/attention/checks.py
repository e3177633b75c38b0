"""Checks of arguments that attention, the cache and decode share. All run on the host, while tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcp.errors import invalid
from jaxcp.layout import INT32_MAX, Ints


def layer_index(layer: Any, layers: int) -> Array:
    """`layer` as an int32 scalar; host integers are checked."""
    if isinstance(layer, jax.Array):
        if layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise invalid(
                "layer", f"{layer.dtype}{list(layer.shape)}", "an integer scalar", "Index one layer.", TypeError
            )
        return layer.astype(jnp.int32)
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < layers:
        raise invalid("layer", repr(layer), f"an integer in [0, {layers})", "The cache holds one entry per layer.")
    return jnp.int32(layer)


def request_ints(name: str, value: Ints, requests: int | None, high: int | None = None) -> Array:
    """`value` as int32 [requests] on the device; shape and dtype are checked, and the values of host integers too."""
    shape, dtype = np.shape(value), value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if len(shape) != 1 or (requests is not None and shape[0] != requests):
        raise invalid(
            f"{name}.shape",
            shape,
            f"[requests{'' if requests is None else f'={requests}'}]",
            f"Give one {name.removesuffix('s')} per request.",
        )
    if not np.issubdtype(dtype, np.integer):
        raise invalid(f"{name}.dtype", dtype, "int32", f"{name} are token counts.", TypeError)
    if not isinstance(value, jax.Array):
        host = np.asarray(value, np.int64)
        limit = INT32_MAX if high is None else high
        outside = (host < 0) | (host > limit)
        if outside.any():
            raise invalid(
                name,
                host[outside][0],
                f"0 <= {name} <= {limit}",
                f"Request {np.flatnonzero(outside)[0]} does not fit; allocate more pages or shorten it.",
            )
    elif dtype.itemsize > 4 or dtype.kind == "u":  # a cast would wrap to a length that looks right
        value = jnp.clip(value, -1 if dtype.kind == "i" else 0, INT32_MAX)
    return jnp.asarray(value, jnp.int32)


def query_tokens(tokens: int, requests: int) -> int:
    """Query tokens per request, or the error that says the batch is not rectangular."""
    if tokens % max(requests, 1) or (tokens and not requests):
        raise invalid(
            "q.shape",
            f"{tokens} tokens for {requests} requests",
            "tokens = requests * query_tokens",
            "Pad every request to the same number of query tokens and say in `counts` how many are real.",
        )
    return tokens // max(requests, 1)


def axes(name: str, x: Any, dtypes: tuple[str, ...], *names: str) -> None:
    """Raises unless `x` is an array with one axis per name and one of `dtypes`."""
    if getattr(x, "ndim", None) != len(names):
        raise invalid(
            f"{name}.shape",
            getattr(x, "shape", type(x).__name__),
            f"[{', '.join(names)}]",
            "Give an array with these axes.",
        )
    if jnp.dtype(x.dtype).name not in dtypes:
        raise invalid(f"{name}.dtype", x.dtype, " or ".join(dtypes), "Cast it.", TypeError)
