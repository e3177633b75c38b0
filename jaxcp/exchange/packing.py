"""Layout of the one buffer that `a2a` sends to each destination.

    [ tokens * h * dim rows | tokens * h LSEs | pad to 16 bytes ]

Rows come first and the block is a multiple of 16 bytes, so every row of every source starts on 16 bytes where
dim * itemsize does. Beside 16-bit rows a 32-bit LSE takes the place of two elements.

The block is made of unsigned integers. As bfloat16 it would not survive: XLA:CPU takes bfloat16 through float32 even to
copy it, which quiets the signalling NaNs that low halves of LSEs look like.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from jaxcp.lse import accumulation_dtype

ALIGNMENT = 16
"""Bytes."""


def word(dim: int, dtype: np.dtype) -> np.dtype:
    """The unsigned integer of which blocks are made: as wide as an LSE, or as an element where that cuts no row."""
    lse_bytes = jnp.dtype(accumulation_dtype(dtype)).itemsize
    return np.dtype(f"uint{8 * (lse_bytes if dim * dtype.itemsize % lse_bytes == 0 else dtype.itemsize)}")


def packed_words(rows: int, dim: int, dtype: np.dtype) -> int:
    """Words of one destination's block of `rows` rows of `dim`."""
    row_bytes = dim * dtype.itemsize + jnp.dtype(accumulation_dtype(dtype)).itemsize
    return math.ceil(rows * row_bytes / ALIGNMENT) * ALIGNMENT // word(dim, dtype).itemsize


def as_words(x: Float[Array, "... width"], word: np.dtype) -> UInt[Array, "... words"]:
    """The bits of the last axis as words, wider or narrower than the elements."""
    ratio = word.itemsize / x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], -1, int(ratio))
    words = lax.bitcast_convert_type(x, word)
    return words.reshape(*words.shape[:-2], -1) if ratio < 1 else words


def from_words(words: UInt[Array, "... words"], dtype: np.dtype) -> Float[Array, "... width"]:
    """Inverse of `as_words`."""
    ratio = dtype.itemsize / words.dtype.itemsize
    if ratio > 1:
        words = words.reshape(*words.shape[:-1], -1, int(ratio))
    x = lax.bitcast_convert_type(words, dtype)
    return x.reshape(*x.shape[:-2], -1) if ratio < 1 else x


def pack(o: Float[Array, "tokens heads dim"], lse: Float[Array, "tokens heads"], cp: int) -> UInt[Array, "cp words"]:
    """For each destination a block with the rows and LSEs of its heads; (0, -inf) in rows without a head."""
    tokens, heads, dim = o.shape
    kind = word(dim, o.dtype)
    # Words first, order second: the whole packing is then one fusion (a fusion cannot change an element's width).
    o_words, lse_words = as_words(o, kind), as_words(lse[..., None], kind)
    empty = np.full(1, -np.inf, lse.dtype).view(kind)
    rows = _by_destination(o_words, np.zeros(o_words.shape[-1], kind), cp)
    lses = _by_destination(lse_words, empty, cp)
    padding = packed_words(tokens * -(-heads // cp), dim, o.dtype) - rows.shape[1] - lses.shape[1]
    return jnp.concatenate([rows, lses, jnp.zeros((cp, padding), kind)], axis=1)


def unpack(
    packed: UInt[Array, "peers words"], rows: int, dim: int, dtype: np.dtype
) -> tuple[Float[Array, "peers rows dim"], Float[Array, "peers rows"]]:
    """Inverse of `pack` for rows of `dtype`."""
    peers, width = packed.shape[0], packed.dtype.itemsize
    lse_dtype = jnp.dtype(accumulation_dtype(dtype))
    first_lse = rows * dim * dtype.itemsize // width
    end = first_lse + rows * lse_dtype.itemsize // width
    o = from_words(packed[:, :first_lse].reshape(peers, rows, -1), dtype)
    return o, from_words(packed[:, first_lse:end].reshape(peers, rows, -1), lse_dtype)[..., 0]


def _by_destination(words: UInt[Array, "tokens heads width"], empty: np.ndarray, cp: int) -> UInt[Array, "cp words"]:
    """Rows ordered by destination, token, head; `empty` [width] is the row without a head."""
    tokens, heads, width = words.shape
    missing = -heads % cp
    if missing:
        words = jnp.concatenate([words, jnp.broadcast_to(empty, (tokens, missing, width))], axis=1)
    return words.reshape(tokens, cp, -1, width).swapaxes(0, 1).reshape(cp, (heads + missing) // cp * tokens * width)
