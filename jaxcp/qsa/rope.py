"""Rotary embedding: partial, half-split pairs, three interleaved position axes.

    inv_i = theta^(-2i / R)        phi_i = rho_axis(i) inv_i        i < R / 2, R = rotary_dim
    x_i' = x_i cos phi_i - x_{i+R/2} sin phi_i        x_{i+R/2}' = x_{i+R/2} cos phi_i + x_i sin phi_i

`rho` are rope positions, three per token (temporal, height, width). Text has the same on all three axes, and the layer
is then ordinary partial rope. Rope positions only ever enter here; blocks and visibility use logical positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.numerics import rounded

Table = tuple[Float[Array, "rows pairs"], Float[Array, "rows pairs"]]


def table(config: QSAConfig, positions: Int[Array, "axes rows"], dtype) -> Table:
    """cos and sin of every row's angles, [rows, rotary_dim / 2] in `dtype`, float32 or float64."""
    inverse = config.rope_theta ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
    angles = positions[config.mrope_axes].T.astype(dtype) * jnp.asarray(inverse, dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "rows *heads dim"], angles: Table, step=None) -> Float[Array, "rows *heads dim"]:
    """`x` with its leading features rotated by its row's angles.

    Args:
      x: widened.
      angles: of `table`, in x's dtype.
      step: dtype to which cos, sin, every product and every sum are rounded; None rounds nothing.
    """

    def at_step(value):
        return value if step is None else rounded(value, step)

    pairs, dim = angles[0].shape[-1], x.shape[-1]
    shape = (len(x), *(1,) * (x.ndim - 2), pairs)
    cos, sin = (at_step(a).reshape(shape) for a in angles)
    feature = jnp.arange(dim)
    partner = jnp.where(feature < pairs, _moved(x, -pairs, dim), _moved(x, pairs, dim))
    straight = jnp.where(feature < 2 * pairs, _twice(cos, dim), 1)
    across = jnp.where(feature < pairs, -_twice(sin, dim), _twice(sin, dim))  # 0 where nothing is rotated
    return at_step(at_step(x * straight) + at_step(partner * across))


def _moved(x: Float[Array, "*batch features"], by: int, dim: int) -> Float[Array, "*batch dim"]:
    """`dim` features of which feature i is x's feature i - by, or 0.

    A pad is a way to index for XLA, which fuses it with what is around it; a concatenation is a kernel that writes its
    parts one after another.
    """
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(by, dim - by - x.shape[-1], 0)])


def _twice(of_pairs: Float[Array, "*batch pairs"], dim: int) -> Float[Array, "*batch dim"]:
    """The pairs' values for their first features, then for their second ones, then 0."""
    pairs = of_pairs.shape[-1]
    return _moved(of_pairs, 0, dim) + _moved(of_pairs, pairs, dim)
