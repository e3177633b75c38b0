"""Softmax attention over one block of keys, and the loop that merges blocks: shared by decode and prefill.

    s_n = scale q . k_n  (n < bound)      l = log_b sum_n b^{s_n / ln b}      o = sum_n e^{s_n} v_n / sum_n e^{s_n}

Blocks merge through `jaxcp.lse`. A loop holds one block of scores, [requests, kv heads, rows, keys of a block], so its
memory does not grow with the number of keys, and it stops at the longest bound of the batch.

Keys at or beyond every bound of their request are selected away, whatever they hold (unwritten pages hold anything).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcp import lse, varying
from jaxcp.lse import LogBase, Partial
from jaxcp.products import contract

SCORE_BYTES = 16 << 20
"""Bound on one block of float32 scores, unless a single page or unit of keys already exceeds it."""

MAX_BLOCK_KEYS = 1024
"""Longest block: on 2 CPU cores 512 and 1024 keys are the fastest (54 ms for 768 x 6000 keys, 3 KV heads, dim 64)
and 2048 falls out of the cache (71 ms)."""

NAN_LSE = 8e37
"""LSE of a row with a NaN logit: all the weight of a merge, in either base. A NaN LSE means "no key seen" there, and
would turn a broken key into a plausible result without a rank's keys."""

Blocks = Callable[[Array], tuple[Array, Array]]
"""index of a block -> its keys [requests, keys, kv_heads, key_dim] and values [requests, keys, kv_heads, value_dim]."""


def block_keys(rows: int, unit: int) -> int:
    """Keys per block for `rows` score rows: a multiple of `unit`, within both bounds where possible."""
    keys = min(SCORE_BYTES // (4 * max(rows, 1)), MAX_BLOCK_KEYS)
    return max(keys // unit, 1) * unit


def group_heads(q: Array, requests: int, kv_heads: int) -> Array:
    """[requests * query_tokens, heads, dim] -> [requests, kv_heads, query_tokens * (heads / kv_heads), dim]."""
    tokens, heads, dim = q.shape
    q = q.reshape(requests, tokens // requests, kv_heads, heads // kv_heads, dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(requests, kv_heads, -1, dim)


def ungroup_heads(partial: Partial, query_tokens: int, dtype) -> Partial:
    """The inverse of `group_heads` for a partial: o [tokens, heads, dim] in `dtype`, lse [tokens, heads]."""
    requests, kv_heads, rows, dim = partial.o.shape
    split = (requests, kv_heads, query_tokens, rows // query_tokens)
    o = partial.o.astype(dtype).reshape(*split, dim).transpose(0, 2, 1, 3, 4)
    l = partial.lse.reshape(split).transpose(0, 2, 1, 3)
    return Partial(o.reshape(requests * query_tokens, -1, dim), l.reshape(requests * query_tokens, -1), partial.base)


def attend(
    q: Float[Array, "requests kv_heads rows key_dim"],
    k: Float[Array, "requests keys kv_heads key_dim"],
    v: Float[Array, "requests keys kv_heads value_dim"],
    bound: Int[Array, "requests rows"],
    *,
    scale: float,
    base: LogBase,
) -> Partial:
    """Attention of every row over the first `bound` keys of the block; o and lse in the accumulation dtype.

    Args:
      q: rows of a request that share a KV head; matrix products run in its dtype and accumulate in float32.
      k, v: any floating dtype; cast to q's.
      bound: keys that each row sees, counted from the start of the block; may be negative or beyond the block.
      scale: factor of the logits before the softmax.
      base: of the returned LSE.
    """
    index = jnp.arange(k.shape[1])
    written = index < jnp.max(bound, axis=1, initial=0)[:, None]
    v = jnp.where(written[..., None, None], v.astype(q.dtype), 0)
    s = contract("bgrd,bngd->bgrn", q, k.astype(q.dtype))
    s = jnp.where(index < bound[:, None, :, None], s * scale, -jnp.inf)
    m = jnp.max(s, axis=-1, keepdims=True)
    m = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(s - m)
    z = jnp.sum(p, axis=-1)
    o = contract("bgrn,bngd->bgrd", p.astype(q.dtype), v)
    some = z != 0  # NaN included
    o = jnp.where(some[..., None], o / jnp.where(some, z, 1)[..., None], 0)
    l = jnp.where(some, (m[..., 0] + jnp.log(z)) / base.ln, -jnp.inf)
    return Partial(o, jnp.where(jnp.isnan(l), NAN_LSE, l), base)


def attend_blocks(
    q: Float[Array, "requests kv_heads rows key_dim"],
    read: Blocks,
    bound: Int[Array, "requests rows"],
    *,
    keys: int,
    value_dim: int,
    scale: float,
    base: LogBase,
) -> Partial:
    """Attention of every row over its first `bound` keys, read block by block.

    Args:
      q, bound, scale, base: as for `attend`; `bound` counts from the first key of block 0.
      read: reads a block of `keys` keys.
      value_dim: width of a value.

    Returns:
      o [requests, kv_heads, rows, value_dim], lse [requests, kv_heads, rows] in the accumulation dtype.
    """
    empty = lse.neutral((*q.shape[:-1], value_dim), lse.accumulation_dtype(q.dtype), base)

    def step(i, merged):
        return lse.merge_two(merged, attend(q, *read(i), bound - i * keys, scale=scale, base=base))

    return merge_steps(empty, step, -(-jnp.max(bound, initial=0) // keys))


def attend_rows(
    start: Partial,
    q: Float[Array, "requests kv_heads rows key_dim"],
    k: Float[Array, "requests keys kv_heads key_dim"],
    v: Float[Array, "requests keys kv_heads value_dim"],
    bound: Int[Array, "requests rows"],
    *,
    scale: float,
    base: LogBase,
) -> Partial:
    """`start` merged with the attention over the first `bound` of the keys given, in blocks of bounded score memory."""
    keys = min(block_keys(q.shape[0] * q.shape[1] * q.shape[2], 1), k.shape[1])
    if keys == k.shape[1]:
        return lse.merge_two(start, attend(q, k, v, bound, scale=scale, base=base))
    bound = jnp.minimum(bound, k.shape[1])  # it may lie beyond the keys given, and must not reach the padding
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % keys), (0, 0), (0, 0))) for x in (k, v))

    def step(i, merged):
        ki, vi = (lax.dynamic_slice_in_dim(x, i * keys, keys, axis=1) for x in (k, v))
        return lse.merge_two(merged, attend(q, ki, vi, bound - i * keys, scale=scale, base=base))

    return merge_steps(start, step, jnp.minimum(-(-jnp.max(bound, initial=0) // keys), k.shape[1] // keys))


def merge_steps(start: Partial, step: Callable[[Array, Partial], Partial], count: Array) -> Partial:
    """step(count - 1, ... step(0, start)) for a count known on the device."""
    return lax.fori_loop(0, count, step, _varying_as(start, step, count))


def _varying_as(start: Partial, step: Callable[[Array, Partial], Partial], count: Array) -> Partial:
    """`start`, marked as varying over the mesh axes over which a step's result varies (shard_map's check_vma)."""
    leaves, tree = jax.tree.flatten(start)
    results = jax.eval_shape(lambda i, merged: jax.tree.leaves(step(i, merged)), jnp.zeros_like(count), start)
    marked = [varying.over(varying.axes(y), x)[0] for x, y in zip(leaves, results, strict=True)]
    return jax.tree.unflatten(tree, marked)
