"""Merge of partial attention results by their log-sum-exp, in one Mosaic GPU kernel.

Same maths as `jaxcp.lse.merge`: NaN and +inf LSEs are empty, a weight of 0 selects 0 and never multiplies, float32
accumulation in source order. The kernel reads either separate arrays or the blocks an all-to-all delivered, in place:

    packed[source] = [ rows * dim rows | rows LSEs (two 16-bit words each beside 16-bit rows) | padding ]

Rows of one source follow each other, so the work is cut into blocks of the flat array of rows. A block is at most one
row or a few whole rows; one warpgroup loads its block of every source and the LSEs of its rows (the same address for
all threads), all before the first use, and nothing is shared between threads. So there is nothing to synchronise, and
the loads of all sources are in flight at once: at c = 8 a thread has 8 x 8 bytes, an SM over 100 KB under way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt

from jaxcp.lse import LogBase

NAME = "lse_merge"
"""What the kernel is called in compiled programs and traces."""

THREADS = 128
"""Of a warpgroup."""

MAX_SOURCES = 32
"""Beyond, a thread's loads no longer fit in its registers."""

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the flat array of rows is cut.

    Attributes:
      block: elements of a source that one warpgroup merges at a time.
      warpgroups: blocks of a program, one each.
    """

    block: int
    warpgroups: int


BLOCKS = (512, 256, 128)
"""Elements per warpgroup, best first: 4, 2 or 1 per thread. 8-byte loads reach the copy rate on an H200."""


def tiling(rows: int, dim: int) -> Tiling | None:
    """Largest block that cuts [rows, dim] without rest at row borders or inside rows, or None."""
    for block in BLOCKS:
        if rows * dim % block == 0 and (dim % block == 0 or block % dim == 0):
            return Tiling(block, warpgroups=1)
    return None


def blocker(sources: int, rows: int, dim: int, dtype: Any) -> str | None:
    """Why the kernel cannot merge these shapes, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"rows of dtype {jnp.dtype(dtype).name}; it merges {', '.join(DTYPES)}"
    if sources > MAX_SOURCES:
        return f"{sources} sources exceed its {MAX_SOURCES}"
    if tiling(rows, dim) is None:
        return f"{rows} rows of {dim} cannot be cut into blocks of {BLOCKS[-1]}"
    return None


def merge_packed(
    packed: UInt[Array, "sources words"], *, rows: int, dim: int, dtype: Any, base: LogBase, return_lse: bool = False,
    cut: Tiling | None = None, interpret: Any = None,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows"] | None]:
    """Merge of received blocks, read in place: o = sum_i o_i b^(l_i - l), l = log_b sum_i b^l_i.

    Args:
      packed: [sources, words], unsigned integers as wide as `dtype`; see the top of this file.
      rows: of each source.
      dim: of a row.
      dtype: of the rows: bfloat16, float16 or float32.
      base: of the LSEs.
      return_lse: also return the merged LSE.
      cut: overrides `tiling`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      o [rows, dim] in `dtype`; lse [rows] float32 in `base`, or None.
    """
    dtype = jnp.dtype(dtype)
    problem = _Problem(packed.shape[0], rows, dim, dtype, base, return_lse)
    return _merge(problem, _packed_rows, _packed_lse, [packed], cut, interpret)


def merge_separate(
    o: Float[Array, "sources rows dim"], lse: Float[Array, "sources rows"], *, base: LogBase, return_lse: bool = False,
    cut: Tiling | None = None, interpret: Any = None,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows"] | None]:
    """`merge_packed` for rows and LSEs in arrays of their own."""
    sources, rows, dim = o.shape
    problem = _Problem(sources, rows, dim, o.dtype, base, return_lse)
    return _merge(problem, _separate_rows, _separate_lse, [o.reshape(sources, rows * dim), lse], cut, interpret)


@dataclasses.dataclass(frozen=True)
class _Problem:
    sources: int
    rows: int
    dim: int
    dtype: np.dtype
    base: LogBase
    return_lse: bool


# How a block's rows, [block] in the problem's dtype, and one row's LSE, a float32 scalar, are read.


def _packed_rows(problem: _Problem, refs, source: int, start, count: int):
    return lax.bitcast_convert_type(_load(refs[0], source, start, count), problem.dtype)


def _packed_lse(problem: _Problem, refs, source: int, row):
    first = problem.rows * problem.dim
    if problem.dtype.itemsize == 4:
        return lax.bitcast_convert_type(refs[0][source, first + row], jnp.float32)
    low, high = (refs[0][source, first + 2 * row + half].astype(jnp.uint32) for half in range(2))
    return lax.bitcast_convert_type(high << 16 | low, jnp.float32)


def _separate_rows(problem: _Problem, refs, source: int, start, count: int):
    del problem
    return _load(refs[0], source, start, count)


def _separate_lse(problem: _Problem, refs, source: int, row):
    del problem
    return refs[1][source, row]


def _load(ref, source: int, start, count: int):
    return plgpu.load(ref.at[source, pl.ds(start, count)], layout=_layout(count))


def _layout(count: int):
    """Consecutive elements per thread, at most 16 bytes of float32."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=min(count // THREADS, 4))


def _merge(problem: _Problem, load_rows: Callable, load_lse: Callable, operands: Sequence[Array], cut: Tiling | None,
           interpret: Any) -> tuple[Array, Array | None]:
    p = problem
    if why := blocker(p.sources, p.rows, p.dim, p.dtype):
        raise ValueError(f"{NAME}: {why}")
    cut = cut or tiling(p.rows, p.dim)

    def lse_merge(*refs):
        inputs, (o_ref, *lse_refs) = refs[: len(operands)], refs[len(operands) :]
        start = _block_index(cut) * cut.block
        first_row = start // p.dim
        row_count = max(1, cut.block // p.dim)
        lses = [[load_lse(p, inputs, i, first_row + k) for i in range(p.sources)] for k in range(row_count)]
        rows = [load_rows(p, inputs, i, start, cut.block) for i in range(p.sources)]
        weights, merged = zip(*(_weights(row_lses, p.base) for row_lses in lses), strict=True)
        o_ref[pl.ds(start, cut.block)] = _weighted_sum(weights, rows, p.dim).astype(p.dtype)
        if lse_refs:
            _store_lse(lse_refs[0], merged, first_row, start % p.dim == 0 if cut.block < p.dim else None)

    # The outputs differ between the ranks of a shard_map as the inputs do.
    array = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(operands[0]).manual_axis_type)
    out = [array((p.rows * p.dim,), p.dtype)] + [array((p.rows,), jnp.float32)] * p.return_lse
    threads = {"num_threads": cut.warpgroups, "thread_name": "warpgroup"} if cut.warpgroups > 1 else {}
    o, *lse = plgpu.kernel(
        lse_merge,
        out_type=tuple(out),
        grid=(p.rows * p.dim // (cut.block * cut.warpgroups),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp2 and log2 of the hardware: 2 units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # LSEs are scalars, and only Lane can bitcast those
            unsafe_no_auto_barriers=True,  # safe: no memory is both read and written
        ),
        interpret=interpret,
        **threads,
    )(*operands)
    return o.reshape(p.rows, p.dim), lse[0] if p.return_lse else None


def _block_index(cut: Tiling):
    """Which block of the flat rows this warpgroup merges."""
    program = lax.axis_index("program")
    return program if cut.warpgroups == 1 else program * cut.warpgroups + lax.axis_index("warpgroup")


def _weights(lses: Sequence[Array], base: LogBase) -> tuple[list[Array], Array]:
    """Normalised weight of each source and the merged LSE, all scalars."""
    to_log2, from_log2 = np.float32(base.ln / math.log(2.0)), np.float32(math.log(2.0) / base.ln)
    lses = [jnp.where(lse < jnp.inf, lse, -jnp.inf) for lse in lses]
    m = functools.reduce(jnp.maximum, lses)
    m = jnp.where(m == -jnp.inf, 0.0, m)
    # The difference is scaled, not the LSEs: those may be finite and near the end of float32's range.
    powers = [jnp.exp2(lse - m if base is LogBase.TWO else (lse - m) * to_log2) for lse in lses]
    s = functools.reduce(lambda a, b: a + b, powers)  # in source order; at least 1 unless all are empty
    divisor = jnp.maximum(s, 1.0)
    log = jnp.log2(divisor) if base is LogBase.TWO else jnp.log2(divisor) * from_log2
    inverse = 1.0 / divisor
    return [power * inverse for power in powers], jnp.where(s > 0, m + log, -jnp.inf)


def _weighted_sum(weights: Sequence[Sequence[Array]], rows: Sequence[Array], dim: int) -> Array:
    """sum_i w_i rows_i in float32 over a block; `weights[k][i]` is that of source i in the block's row k."""
    (block,) = rows[0].shape
    element = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=_layout(block)) if len(weights) > 1 else None
    total = None
    for i, values in enumerate(rows):
        w = jnp.broadcast_to(weights[0][i], (block,))
        for k in range(1, len(weights)):
            w = jnp.where(element >= k * dim, weights[k][i], w)
        term = jnp.where(w > 0, w * values.astype(jnp.float32), 0.0)
        total = term if total is None else total + term
    return total


def _store_lse(ref, merged: Sequence[Array], first_row, is_first_block) -> None:
    """Writes a block's LSEs; where a row spans several blocks, only its first does."""

    def store():
        for k, lse in enumerate(merged):
            ref[first_row + k] = lse

    if is_first_block is None:
        store()
    else:
        pl.when(is_first_block)(store)
