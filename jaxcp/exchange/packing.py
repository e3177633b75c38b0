"""Layout of the one buffer that `a2a` sends to each destination.

    [ tokens * h * dim rows | tokens * h LSEs | pad to 16 bytes ]

Rows come first and the block is a multiple of 16 bytes, so every row of every source starts on 16 bytes where
dim * itemsize does. A 32-bit LSE travels as two 16-bit words, low half first, next to 16-bit rows.

The block is made of unsigned integers of the row's width. As bfloat16 it would not survive: XLA:CPU takes bfloat16
through float32 even to copy it, which quiets the signalling NaNs that low halves of LSEs look like.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from jaxcp.lse import accumulation_dtype

ALIGNMENT = 16
"""Bytes."""


def word(dtype: np.dtype) -> np.dtype:
    """The unsigned integer as wide as `dtype`."""
    return np.dtype(f"uint{8 * dtype.itemsize}")


def lse_words(dtype: np.dtype) -> int:
    """Words that hold one LSE next to rows of `dtype`: 2 for 16-bit rows, else 1."""
    return jnp.dtype(accumulation_dtype(dtype)).itemsize // dtype.itemsize


def packed_words(rows: int, dim: int, dtype: np.dtype) -> int:
    """Words of one destination's block of `rows` rows of `dim`."""
    used = rows * (dim + lse_words(dtype))
    per_unit = ALIGNMENT // dtype.itemsize
    return -(-used // per_unit) * per_unit


def pack(o: Float[Array, "tokens heads dim"], lse: Float[Array, "tokens heads"], cp: int) -> UInt[Array, "cp words"]:
    """For each destination a block with the rows and LSEs of its heads; (0, -inf) in rows without a head."""
    tokens, heads, dim = o.shape
    dtype, rows = o.dtype, tokens * -(-heads // cp)
    # Words first, order second: the whole packing is then one fusion (a fusion cannot change an element's width).
    o_bits = lax.bitcast_convert_type(o, word(dtype))
    lse_bits = lax.bitcast_convert_type(lse, word(dtype)).reshape(tokens, heads, lse_words(dtype))
    empty = np.full(1, -np.inf, accumulation_dtype(dtype)).view(word(dtype))
    used = rows * (dim + lse_words(dtype))
    padding = jnp.zeros((cp, packed_words(rows, dim, dtype) - used), word(dtype))
    blocks = [_by_destination(o_bits, np.zeros(dim, word(dtype)), cp), _by_destination(lse_bits, empty, cp), padding]
    return jnp.concatenate(blocks, axis=1)


def _by_destination(words: UInt[Array, "tokens heads width"], empty: np.ndarray, cp: int) -> UInt[Array, "cp words"]:
    """Rows ordered by destination, token, head; `empty` [width] is the row without a head."""
    tokens, heads, width = words.shape
    missing = -heads % cp
    if missing:
        words = jnp.concatenate([words, jnp.broadcast_to(empty, (tokens, missing, width))], axis=1)
    return words.reshape(tokens, cp, -1, width).swapaxes(0, 1).reshape(cp, (heads + missing) // cp * tokens * width)


def unpack(
    packed: UInt[Array, "peers words"], rows: int, dim: int, dtype: np.dtype
) -> tuple[Float[Array, "peers rows dim"], Float[Array, "peers rows"]]:
    """Inverse of `pack` for rows of `dtype`."""
    peers, width = packed.shape[0], lse_words(dtype)
    o = packed[:, : rows * dim].reshape(peers, rows, dim)
    words = packed[:, rows * dim : rows * (dim + width)]
    if width > 1:  # bitcast_convert_type joins the last axis into the wider type
        words = words.reshape(peers, rows, width)
    return lax.bitcast_convert_type(o, dtype), lax.bitcast_convert_type(words, accumulation_dtype(dtype))
