"""Rotary embedding: partial, half-split pairs, three interleaved position axes.

    inv_i = theta^(-2i / R)        phi_i = rho_axis(i) inv_i        i < R / 2, R = rotary_dim
    x_i' = x_i cos phi_i - x_{i+R/2} sin phi_i        x_{i+R/2}' = x_{i+R/2} cos phi_i + x_i sin phi_i

`rho` are rope positions, three per token (temporal, height, width). Text has the same on all three axes, and the layer
is then ordinary partial rope. Rope positions only ever enter here; blocks and visibility use logical positions.
"""

import jax.numpy as jnp
import numpy as np
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

    pairs = angles[0].shape[-1]
    shape = (len(x), *(1,) * (x.ndim - 2), pairs)
    cos, sin = (at_step(a).reshape(shape) for a in angles)
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return jnp.concatenate(
        [at_step(at_step(a * cos) - at_step(b * sin)), at_step(at_step(b * cos) + at_step(a * sin)), rest], -1
    )
