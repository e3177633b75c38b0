"""Integers on the host or on a device: one formula for both, checked where the values are known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp.errors import invalid

INT32_MAX = np.iinfo(np.int32).max

Ints = Any
"""int, numpy integer array (host: checked) or jax.Array (unchecked)."""


def host_integers(name: str, value: Ints, low: int = 0, high: int = INT32_MAX) -> np.ndarray:
    """Host integers as int64 (so that products cannot wrap), every one inside [low, high]."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise invalid(name, f"dtype {array.dtype}", "integers", "Lengths and positions are token counts.", TypeError)
    array = array.astype(np.int64)
    outside = (array < low) | (array > high)
    if outside.any():
        raise invalid(
            name,
            array[outside].flat[0],
            f"{low} <= {name} <= {high}",
            "Lengths and positions fit int32 and start at 0.",
        )
    return array


def prepare(**values: Ints) -> tuple[Any, ...]:
    """(array module, values...): numpy and checked unless a value lives on a device or is traced."""
    if any(isinstance(v, jax.Array) for v in values.values()):
        return jnp, *(jnp.asarray(v, jnp.int32) for v in values.values())
    return np, *(host_integers(name, v) for name, v in values.items())


def int32(xp, value):
    """`value` in int32, of the array module `xp`."""
    return value.astype(xp.int32)


def positive_int(name: str, value: Any) -> int:
    """`value` as an int >= 1, or the error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise invalid(name, repr(value), "an integer >= 1", f"Give {name} as a positive count.")
    return int(value)
