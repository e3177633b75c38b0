"""How a cached row is kept: in its dtype, or as bytes for float8_e4m3fn.

XLA without float8 arithmetic widens a whole array to update or gather a few of its rows, and some collectives do not
take float8; bytes pass everywhere. Only the rows in use are converted.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxcp.errors import invalid

QUERY_DTYPES = ("bfloat16", "float16", "float32", "float64")
CACHE_DTYPES = (*QUERY_DTYPES, "float8_e4m3fn")
PAGE_DTYPES = (*QUERY_DTYPES, "uint8")
"""dtypes of stored pages; uint8 is the bits of float8_e4m3fn."""

E4M3 = np.dtype(jnp.float8_e4m3fn)
E4M3_MAX = 448.0
"""Largest finite float8_e4m3fn; `encode` saturates here, where plain rounding would give NaN."""


def cache_dtype(dtype: Any) -> np.dtype:
    """`dtype` as a numpy dtype, or the error that says what a cache can hold."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # numpy takes None for float64
    except TypeError:
        found = None
    if found is None or found.name not in CACHE_DTYPES:
        raise invalid("dtype", repr(dtype), " or ".join(CACHE_DTYPES), "Choose a cache dtype.", TypeError)
    return found


def page_dtype(dtype: np.dtype) -> np.dtype:
    """dtype of the pages of a cache of `dtype`."""
    return np.dtype(np.uint8) if dtype == E4M3 else dtype


def encode(x: Array, dtype: np.dtype) -> Array:
    """`x` as stored in a cache of `dtype`; float8_e4m3fn is unscaled and saturates at +-448 (NaN stays NaN)."""
    if dtype != E4M3:
        return x.astype(dtype)
    return lax.bitcast_convert_type(jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3), jnp.uint8)


def decode(stored: Array) -> Array:
    """The values of stored rows, in the cache's dtype."""
    return lax.bitcast_convert_type(stored, E4M3) if stored.dtype == jnp.uint8 else stored


def as_stored(x: Array, dtype: np.dtype) -> Array:
    """`x` with the values that a cache of `dtype` gives back, in `dtype`.

    The barrier keeps XLA:GPU from dropping a narrowing conversion that is widened again (xla_allow_excess_precision).
    """
    return decode(lax.optimization_barrier(encode(x, dtype)))
