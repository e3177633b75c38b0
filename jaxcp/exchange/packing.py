"""Layout of the one buffer that `a2a` sends to each destination.

    [ tokens * h * dim rows | tokens * h LSEs | pad to 16 bytes ]

Rows come first and the block is a multiple of 16 bytes, so every row of every source starts on 16 bytes where
dim * itemsize does. A 32-bit LSE travels as two 16-bit elements, low half first, next to 16-bit rows: an all-to-all
moves bits, it does not round.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxcp.lse import accumulation_dtype

ALIGNMENT = 16
"""Bytes."""


def lse_elements(dtype: np.dtype) -> int:
    """Elements of `dtype` that hold one LSE: 2 for 16-bit rows, else 1."""
    return jnp.dtype(accumulation_dtype(dtype)).itemsize // dtype.itemsize


def packed_elements(rows: int, dim: int, dtype: np.dtype) -> int:
    """Elements of one destination's block of `rows` rows of `dim`."""
    used = rows * (dim + lse_elements(dtype))
    per_unit = ALIGNMENT // dtype.itemsize
    return -(-used // per_unit) * per_unit


def pack(o: Float[Array, "peers rows dim"], lse: Float[Array, "peers rows"]) -> Float[Array, "peers packed"]:
    """One block per destination, in the dtype of `o`."""
    peers, rows, dim = o.shape
    words = lax.bitcast_convert_type(lse, o.dtype).reshape(peers, rows * lse_elements(o.dtype))
    pad = packed_elements(rows, dim, o.dtype) - rows * (dim + lse_elements(o.dtype))
    return jnp.concatenate([o.reshape(peers, rows * dim), words, jnp.zeros((peers, pad), o.dtype)], axis=1)


def unpack(
    packed: Float[Array, "peers packed"], rows: int, dim: int
) -> tuple[Float[Array, "peers rows dim"], Float[Array, "peers rows"]]:
    """Inverse of `pack`."""
    peers, width = packed.shape[0], lse_elements(packed.dtype)
    o = packed[:, : rows * dim].reshape(peers, rows, dim)
    words = packed[:, rows * dim : rows * (dim + width)]
    if width > 1:  # bitcast_convert_type joins the last axis into the wider type
        words = words.reshape(peers, rows, width)
    return o, lax.bitcast_convert_type(words, accumulation_dtype(packed.dtype))
