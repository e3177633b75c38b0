"""Matrix products of 16-bit and wider operands with the accumulation that attention needs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp.lse import accumulation_dtype


def contract(equation: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """einsum of two operands of one dtype, accumulated and returned in float32 (float64 for float64).

    float32 operands use the highest precision (a GPU's default is TF32). On CPU 16-bit operands are widened first,
    which changes no product: XLA:CPU refuses some shapes of bfloat16 operands with a float32 result.
    """
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)

    def widened(a, b):
        return jnp.einsum(equation, a.astype(wide), b.astype(wide), precision=lax.Precision.HIGHEST)

    def native(a, b):
        return jnp.einsum(equation, a, b, preferred_element_type=wide)

    return lax.platform_dependent(a, b, cpu=widened, default=native)
