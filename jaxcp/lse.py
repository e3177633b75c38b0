"""Partial attention results and how they merge: the only place where merging is defined.

A rank that attends over a part of the keys returns a *partial*: the softmax-weighted values over its own keys, and the
log-sum-exp (LSE) of its logits. Partials of disjoint key sets merge exactly:

    l_i <- -inf where l_i is NaN or +inf        m = max_i l_i  (0 where all are -inf)
    w_i = b^(l_i - m)       s = sum_i w_i       o = sum_i o_i w_i / s       l = m + log_b s

A row without a key is the neutral element (o = 0, l = -inf). A zero weight *selects* 0 instead of multiplying, so that
whatever an empty shard left in its buffer (NaN times 0 is NaN) cannot leak. Sums run in source order: the same inputs
give the same bits. Kernels elsewhere implement exactly this and are tested against it.

Source: the online-softmax identity (Milakov and Gimelshein, 2018), as used for split keys by FlashDecoding.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from functools import partial as bind

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcp.errors import invalid


class LogBase(enum.Enum):
    """Base of a log-sum-exp. Kernels disagree about it, so it travels with every LSE and has no default."""

    TWO = "2"
    E = "e"

    @property
    def ln(self) -> float:
        """Natural logarithm of the base."""
        return math.log(2.0) if self is LogBase.TWO else 1.0

    def exp(self, x: Array) -> Array:
        """base ** x."""
        return jnp.exp2(x) if self is LogBase.TWO else jnp.exp(x)

    def log(self, x: Array) -> Array:
        """Logarithm of x to this base."""
        return jnp.log2(x) if self is LogBase.TWO else jnp.log(x)


@bind(jax.tree_util.register_dataclass, data_fields=["o", "lse"], meta_fields=["base"])
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over a part of the keys.

    Attributes:
      o: [..., heads, dim], bfloat16, float16 or float32: softmax-weighted values, normalised over the keys seen.
      lse: [..., heads] (a trailing unit axis is accepted), float32: log-sum-exp of the scaled logits, in `base`;
        -inf, NaN and +inf all mean "no key seen".
      base: base of `lse`.

    float64 is accepted for `o` together with a float64 `lse`, for checks in higher precision.

    Raises:
      TypeError: `base` is missing or not a `LogBase`.
    """

    o: Float[Array, "... heads dim"]
    lse: Float[Array, "..."]
    base: LogBase = None  # pyright: ignore[reportAssignmentType]  # no default: __post_init__ refuses None

    def __post_init__(self):
        if not isinstance(self.base, LogBase):
            raise invalid(
                "Partial.base",
                repr(self.base),
                "LogBase.TWO or LogBase.E",
                "Pass the base in which the kernel that made `lse` takes its logarithm; there is no default, because a "
                "wrong guess is a silent numerical error.",
                TypeError,
            )


def accumulation_dtype(dtype) -> jnp.dtype:
    """dtype in which partials of `dtype` are summed and their LSE is kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def validated(partial: Partial, name: str = "partial", *, rank: int | None = None) -> Partial:
    """`partial` with a unit LSE axis dropped, or the error that says what is wrong with it.

    Args:
      partial: to check; only shapes and dtypes are looked at.
      name: what to call it in messages.
      rank: number of axes `o` must have; any if None.

    Raises:
      TypeError: not a `Partial`, or a dtype that is not accepted.
      ValueError: shapes of `o` and `lse` that do not belong together.
    """
    if not isinstance(partial, Partial):
        raise invalid(
            name,
            type(partial).__name__,
            "a jaxcp.Partial(o, lse, base)",
            "Wrap the pair and name the LSE's base.",
            TypeError,
        )
    o, lse = partial.o, partial.lse
    if o.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        raise invalid(
            f"{name}.o.dtype", o.dtype, "bfloat16, float16 or float32", "Cast the attention output.", TypeError
        )
    if rank is not None and o.ndim != rank:
        raise invalid(
            f"{name}.o.shape",
            o.shape,
            f"{rank} axes, [tokens, heads, dim]" if rank == 3 else f"{rank} axes",
            "Fold batch axes into tokens.",
        )
    if o.ndim < 2:
        raise invalid(f"{name}.o.shape", o.shape, "[..., heads, dim]", "Keep the head axis, even with one head.")
    if lse.shape == (*o.shape[:-1], 1) and lse.shape != o.shape[:-1]:
        lse = lse[..., 0]
    if lse.shape != o.shape[:-1]:
        raise invalid(
            f"{name}.lse.shape",
            lse.shape,
            f"{o.shape[:-1]} (o's shape without dim, optionally with a unit axis)",
            "Give one LSE per row of o.",
        )
    if lse.dtype != accumulation_dtype(o.dtype):
        raise invalid(
            f"{name}.lse.dtype",
            lse.dtype,
            str(accumulation_dtype(o.dtype)),
            "LSEs are kept in float32; a 16-bit LSE loses the merge's precision.",
            TypeError,
        )
    return Partial(o, lse, partial.base)


def convert(lse: Float[Array, "..."], source: LogBase, target: LogBase) -> Float[Array, "..."]:
    """`lse` in base `target`: l_target = l_source * ln(source) / ln(target)."""
    return lse if source is target else lse * (source.ln / target.ln)


def with_base(partial: Partial, base: LogBase) -> Partial:
    """The same partial with its LSE expressed in `base`."""
    return Partial(partial.o, convert(partial.lse, partial.base, base), base)


def neutral(shape: Sequence[int], dtype, base: LogBase) -> Partial:
    """The neutral element of `merge`: o = 0 of `shape` = [..., heads, dim], lse = -inf of [..., heads]."""
    return Partial(jnp.zeros(shape, dtype), jnp.full(shape[:-1], -jnp.inf, accumulation_dtype(dtype)), base)


def sanitize(lse: Float[Array, "..."]) -> Float[Array, "..."]:
    """NaN and +inf become -inf ("no key seen"); finite values and -inf stay."""
    return jnp.where(lse < jnp.inf, lse, -jnp.inf)


def weights(lse: Float[Array, "sources ..."], base: LogBase) -> tuple[Float[Array, "sources ..."], Float[Array, "..."]]:
    """Normalised weights w_i / s of the sources on axis 0, and the merged LSE.

    Args:
      lse: [sources, ...], float32, in `base`.
      base: of `lse`.

    Returns:
      [sources, ...] weights that sum to 1 (all 0 where every source is empty), and [...] merged LSE (-inf there).
    """
    lse = sanitize(lse)
    m = jnp.max(lse, axis=0, initial=-jnp.inf)
    m = jnp.where(m == -jnp.inf, 0, m)
    w = base.exp(lse - m)
    s = jnp.zeros_like(m)
    for i in range(lse.shape[0]):  # source order is part of the result's definition
        s = s + w[i]
    return jnp.where(s > 0, w / jnp.where(s > 0, s, 1), 0), jnp.where(s > 0, m + base.log(s), -jnp.inf)


def select(weight: Float[Array, "... "], o: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
    """weight * o in the accumulation dtype, and exactly 0 where weight is 0, whatever o holds there."""
    weight = weight[..., None]
    return jnp.where(weight > 0, weight * o.astype(accumulation_dtype(o.dtype)), 0)


def merge(partials: Partial) -> Partial:
    """Merge of the sources on axis 0: o = sum_i o_i b^(l_i - l), l = log_b sum_i b^l_i.

    Args:
      partials: o [sources, ..., heads, dim], lse [sources, ..., heads].

    Returns:
      o [..., heads, dim] in the dtype of the input, lse [..., heads] in float32 and the same base. A row that is empty
      in every source is (0, -inf). No source at all gives the neutral element.
    """
    partials = validated(partials, "partials")
    w, lse = weights(partials.lse, partials.base)
    o = jnp.zeros(partials.o.shape[1:], w.dtype)
    for i in range(partials.o.shape[0]):
        o = o + select(w[i], partials.o[i])
    return Partial(o.astype(partials.o.dtype), lse, partials.base)


def merge_two(a: Partial, b: Partial) -> Partial:
    """Merge of two partials of the same shape; the result's base and dtype are `a`'s."""
    a, b = validated(a, "a"), validated(b, "b")
    if a.o.shape != b.o.shape:
        raise invalid("b.o.shape", b.o.shape, f"{a.o.shape}, the shape of a.o", "Partials merge row by row.")
    b = with_base(b, a.base)
    return merge(Partial(jnp.stack([a.o, b.o.astype(a.o.dtype)]), jnp.stack([a.lse, b.lse]), a.base))
