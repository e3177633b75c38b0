"""Where a QSA layer rounds.

In bfloat16 a layer computes in float32 and rounds at stated points (the model's CUDA path): after every projection,
after a norm, once after a main rotation, after every product of an index rotation, before the values product, at the
output. XLA:GPU drops a narrowing conversion that is followed by a widening one (xla_allow_excess_precision, on by
default), which would move those points. `lax.reduce_precision` is never dropped, so every point goes through it here.
In float32 and float64 nothing is rounded.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp.lse import accumulation_dtype

MODEL_DTYPES = tuple(jnp.dtype(t) for t in (jnp.bfloat16, jnp.float32, jnp.float64))


def rounded(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
    """`x` with its values rounded to `dtype`, still in x's own dtype."""
    if x.dtype == dtype or jnp.dtype(dtype) not in MODEL_DTYPES or jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in the dtype it is computed in (float32, or float64 for float64), rounded as its own dtype says."""
    return rounded(x.astype(accumulation_dtype(x.dtype)), x.dtype)


def narrow(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
    """`x` rounded to `dtype` and stored in it."""
    return rounded(x, dtype).astype(dtype)


def precision(dtype) -> lax.Precision | None:
    """Matmul precision: full float32 products for float32 (GPUs default to TF32), the dtype's own otherwise."""
    return None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def linear(x: Float[Array, "... inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "... outputs"]:
    """x W^T in x's dtype; weights are stored as in the checkpoint, [outputs, inputs]."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision(x.dtype))


def norm(x: Float[Array, "... dim"], weight: Float[Array, " dim"], eps: float) -> Float[Array, "... dim"]:
    """Zero-centred RMS norm over the last axis, x already widened: x / sqrt(mean(x^2) + eps) * (1 + weight).

    The barrier keeps the sum apart from its use: XLA:GPU would otherwise make one kernel of both, which stores the
    widened result for whatever comes behind it.
    """
    squares = lax.optimization_barrier(jnp.sum(x * x, -1, keepdims=True))
    return x * lax.rsqrt(squares / x.shape[-1] + eps) * (1 + weight.astype(x.dtype))
