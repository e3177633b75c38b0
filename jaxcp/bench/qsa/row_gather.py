"""The peer of sparse attention: one program per query row and KV head that gathers K and V by token, in Triton.

The design of the public kernels for this shape: nothing is reused between rows. It gets every advantage that a caller
can give: token slots are computed beforehand, and K and V lie in one array each, without pages.
"""

import math
from functools import partial as bind

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

TILES = ((64, 4, 2), (64, 4, 3), (128, 8, 2), (32, 4, 4))
"""Tunings: (tokens per step, warps, pipeline stages)."""

LEAST_ROWS = 16  # of a tensor core's operand


def attend(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, "rows width"],
    count: Int[Array, " rows"],
    *,
    scale: float,
    tuning: tuple[int, int, int] = TILES[0],
    interpret: bool = False,
) -> Float[Array, "rows heads head_dim"]:
    """Attention of every row over the tokens `slots[row, :count[row]]`; 0 for a row without any."""
    rows, heads, dim = q.shape
    tile, warps, stages = tuning
    slots = jnp.pad(slots, [(0, 0), (0, -slots.shape[1] % tile)])
    of_row = pl.BlockSpec((None, heads, dim), lambda row, head: (row, 0, 0))
    everything = pl.BlockSpec(k.shape, lambda row, head: (0, 0, 0))
    return pl.pallas_call(
        bind(row_gather_kernel, tile=tile, group=heads // k.shape[1], scale=scale * math.log2(math.e)),
        grid=(rows, k.shape[1]),
        in_specs=[
            of_row,
            pl.BlockSpec((None, slots.shape[1]), lambda row, head: (row, 0)),
            pl.BlockSpec((1,), lambda row, head: (row,)),
            everything,
            everything,
        ],
        out_specs=of_row,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="row_gather",
    )(q, slots, count, k, v)


def row_gather_kernel(q_ref, slots_ref, count_ref, k_ref, v_ref, o_ref, *, tile: int, group: int, scale: float):
    """One row and KV head. Operand rows beyond the group repeat its last head, and store the same again."""
    head, count = pl.program_id(1), count_ref[0]
    operand_rows = max(LEAST_ROWS, 1 << (group - 1).bit_length())
    heads = head * group + jnp.minimum(jnp.arange(operand_rows), group - 1)
    q = q_ref[heads]
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)

    def step(i, carry):
        o, top, total = carry
        inside = i * tile + jnp.arange(tile) < count
        at = jnp.where(inside, slots_ref[pl.ds(i * tile, tile)], 0)
        k, v = k_ref[at, head], v_ref[at, head]
        logits = jnp.where(inside[None], plgpu.dot(q, k.T), -jnp.inf)
        new_top = jnp.maximum(top, logits.max(1))
        p = jnp.exp2(logits - new_top[:, None])
        kept = jnp.exp2(top - new_top)
        o = o * kept[:, None] + plgpu.dot(p.astype(v.dtype), v)
        return o, new_top, total * kept + p.sum(1)

    rows = q.shape[0]
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    o, _, total = lax.fori_loop(0, pl.cdiv(count, tile), step, start)
    o_ref[heads] = (o / jnp.where(total > 0, total, 1)[:, None]).astype(o_ref.dtype)
