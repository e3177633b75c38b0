"""Integer arithmetic on indices that are non-negative by construction, and clipped or dropped if they ever were not.

jnp's own operators serve negative numbers too, with several more operations per index in every program.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def quotient(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """floor(x / n), x >= 0."""
    return lax.div(x, jnp.asarray(n, x.dtype))


def remainder(x: Int[Array, "..."], n: int) -> Int[Array, "..."]:
    """x mod n, x >= 0."""
    return lax.rem(x, jnp.asarray(n, x.dtype))


def take(array: Shaped[Array, "..."], *index: Int[Array, "..."]) -> Shaped[Array, "..."]:
    """array[index], every index clipped into range."""
    return array.at[index].get(mode="clip", wrap_negative_indices=False)


def put(array: Shaped[Array, "..."], values: Shaped[Array, "..."], *index: Int[Array, "..."]) -> Shaped[Array, "..."]:
    """`array` with `values` at `index`; what is out of range is dropped."""
    return array.at[index].set(values, mode="drop", wrap_negative_indices=False)


def rank_in(ends: Int[Array, " n"], item: Int[Array, " items"]) -> Int[Array, " items"]:
    """How many of the ascending `ends` are <= each item; compared with all of them, which are few."""
    return jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
