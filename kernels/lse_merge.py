"""Merge of partial attention results by their log-sum-exp, in one Mosaic GPU kernel.

Same maths as `jaxcp.lse.merge`: NaN and +inf LSEs are empty, a weight of 0 selects 0 and never multiplies, float32
accumulation in source order. The kernel reads either separate arrays or the blocks an all-to-all delivers, in place:

    packed[source] = [ rows * dim rows | rows LSEs | padding ]            32-bit words

Rows of one source follow each other, so the work is cut into blocks of the flat array of rows. A block is a part of a
row, a row, or a few whole rows. One warpgroup loads its block of every source and the LSEs of its rows (the same
address for all threads) before the first use: the loads of all sources are in flight at once, and as no thread needs
another's data there is nothing to synchronise.

At one token the kernel is bound by the instructions of a single warp, hence
 - 16-bit rows are handled as 32-bit words: one select serves two elements, and unpacking is a shift or a mask;
 - sums run over unnormalised weights, so that they need not wait for the division. Weights are at most 2^-k with
   2^k >= sources (the shift m + k instead of the maximum m; any shift gives the same result), so that the sum cannot
   overflow where the mean does not.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from jaxcp import varying
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
      block: words of a source that a warpgroup merges at a time.
      blocks: consecutive blocks of a program.
    """

    block: int
    blocks: int = 1


FEW_SOURCES = 2
MANY_BLOCKS = 128
"""With so few sources a program has too little under way to hide its start: two blocks share one where there are many.

µs on an H200 with one and with two blocks to a program, 16 heads of 512, bfloat16: 2 sources, 1 token 0.90 and 0.93, 8
tokens 1.06 and 0.99, 128 tokens 2.43 and 1.95, 4096 tokens 50.6 and 47.0; 8 sources, 1 token 1.07 and 1.25, 128 tokens
3.71 and 3.74, 1024 tokens 35.5 and 36.0.
"""


def tiling(sources: int, rows: int, dim: int, dtype: Any) -> Tiling | None:
    """The cut of [rows, dim] without rest, or None."""
    row = dim * jnp.dtype(dtype).itemsize // 4
    block = next((block for block in (512, 256) if row % block == 0), THREADS)
    count, rest = divmod(rows * row, block)
    if rest or (row % block and block % row):
        return None
    return Tiling(block, blocks=2 if sources <= FEW_SOURCES and count >= MANY_BLOCKS and count % 2 == 0 else 1)


def blocker(sources: int, rows: int, dim: int, dtype: Any) -> str | None:
    """Why the kernel cannot merge these shapes, or None."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        return f"rows of dtype {dtype.name}; it merges {', '.join(DTYPES)}"
    if sources > MAX_SOURCES:
        return f"{sources} sources exceed its {MAX_SOURCES}"
    if dim * dtype.itemsize % 4 or tiling(sources, rows, dim, dtype) is None:
        return f"{rows} rows of {dim} x {dtype.name} cannot be cut into blocks of {THREADS} words"
    return None


def merge_packed(
    packed: UInt32[Array, "sources words"],
    *,
    rows: int,
    dim: int,
    dtype: Any,
    base: LogBase,
    return_lse: bool = False,
    cut: Tiling | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows"] | None]:
    """Merge of received blocks, read in place: o = sum_i o_i b^(l_i - l), l = log_b sum_i b^l_i.

    Args:
      packed: [sources, words]; see the top of this file.
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
    problem = _Problem(packed.shape[0], rows, dim, jnp.dtype(dtype), base, return_lse)
    # The same buffer twice: with one pointer the compiler asks for the thread's index, for which the loads of words
    # wait, only after the loads of all LSEs; with two it does so before. That is the order for separate arrays too.
    return _merge(problem, packed, packed, cut, interpret)


def merge_separate(
    o: Float[Array, "sources rows dim"],
    lse: Float[Array, "sources rows"],
    *,
    base: LogBase,
    return_lse: bool = False,
    cut: Tiling | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows"] | None]:
    """`merge_packed` for rows and LSEs in arrays of their own."""
    sources, rows, dim = o.shape
    per_word = 4 // o.dtype.itemsize
    pairs = o.reshape(sources, -1, per_word) if per_word > 1 else o.reshape(sources, -1)
    words = lax.bitcast_convert_type(pairs, jnp.uint32)
    return _merge(_Problem(sources, rows, dim, o.dtype, base, return_lse), words, lse, cut, interpret)


@dataclasses.dataclass(frozen=True)
class _Problem:
    sources: int
    rows: int
    dim: int
    dtype: np.dtype
    base: LogBase
    return_lse: bool

    @property
    def row(self) -> int:
        """Words of a row."""
        return self.dim * self.dtype.itemsize // 4


def _merge(p: _Problem, rows: Array, lse: Array, cut: Tiling | None, interpret: Any) -> tuple[Array, Array | None]:
    why, fitting = blocker(p.sources, p.rows, p.dim, p.dtype), tiling(p.sources, p.rows, p.dim, p.dtype)
    if why or fitting is None:
        raise ValueError(f"{NAME}: {why}")
    cut = cut or fitting

    def lse_merge(rows_ref, lse_ref, *outputs):
        starts = [(_first_block(cut) + b) * cut.block for b in range(cut.blocks)]
        loaded = [_load(p, cut, rows_ref, lse_ref, start) for start in starts]
        for start, (lses, words) in zip(starts, loaded, strict=True):
            _merge_block(p, cut, start, lses, words, *outputs)

    rows, lse = varying.alike(rows, lse)
    # The outputs differ between the ranks of a shard_map as the inputs do.
    array = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(rows).manual_axis_type)
    out = [array((p.rows * p.row,), jnp.uint32)] + [array((p.rows,), jnp.float32)] * p.return_lse
    words, *merged_lse = plgpu.kernel(
        lse_merge,
        out_type=tuple(out),
        grid=(p.rows * p.row // (cut.block * cut.blocks),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp2 and log2 of the hardware: 2 units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # LSEs are scalars, and only Lane can bitcast those
            unsafe_no_auto_barriers=True,  # safe: no memory is both read and written
        ),
        interpret=interpret,
    )(rows, lse)
    o = lax.bitcast_convert_type(words, p.dtype).reshape(p.rows, p.dim)
    return o, merged_lse[0] if p.return_lse else None


def _first_block(cut: Tiling):
    """Index of the program's first block of the flat rows."""
    return lax.axis_index("program") * cut.blocks


def _load(p: _Problem, cut: Tiling, rows_ref, lse_ref, start) -> tuple[list[list[Array]], list[Array]]:
    """LSEs by row and source, and the words of every source, of the block that begins at word `start`."""
    first = start // p.row
    if lse_ref.dtype == jnp.uint32:  # packed: after the rows of the same source
        lse = lambda i, row: lax.bitcast_convert_type(lse_ref[i, p.rows * p.row + row], jnp.float32)  # noqa: E731
    else:
        lse = lambda i, row: lse_ref[i, row]  # noqa: E731
    lses = [[lse(i, first + k) for i in range(p.sources)] for k in range(max(1, cut.block // p.row))]
    words = [plgpu.load(rows_ref.at[i, pl.ds(start, cut.block)], layout=_layout(cut.block)) for i in range(p.sources)]
    return lses, words


def _layout(block: int):
    """Consecutive words of a block per thread."""
    return plgpu.Layout.WG_STRIDED((block,), vec_size=block // THREADS)


def _merge_block(p: _Problem, cut: Tiling, start, lses, words, o_ref, lse_ref=None) -> None:
    weights, scales, merged = zip(*(_weights(row, p.base) for row in lses), strict=True)
    o_ref[pl.ds(start, cut.block)] = _weighted_mean(p, cut.block, weights, scales, words)
    if lse_ref is None:
        return

    def store_lse():
        for k, lse in enumerate(merged):
            lse_ref[start // p.row + k] = lse

    if cut.block < p.row:  # several blocks share the row; the first writes
        pl.when(start % p.row == 0)(store_lse)
    else:
        store_lse()


def _weights(lses: Sequence[Array], base: LogBase) -> tuple[list[Array], Array, Array]:
    """Of one row: a weight per source, what normalises them, and the merged LSE; all scalars."""
    shift = math.ceil(math.log2(len(lses)))
    to_log2, from_log2 = np.float32(base.ln / math.log(2.0)), np.float32(math.log(2.0) / base.ln)
    lses = [jnp.where(lse < jnp.inf, lse, -jnp.inf) for lse in lses]
    m = _maximum(lses)
    m = jnp.where(m == -jnp.inf, 0.0, m) + np.float32(shift * from_log2)
    # The difference is scaled, not the LSEs: those may be finite and near the end of float32's range.
    weights = [jnp.exp2(lse - m if base is LogBase.TWO else (lse - m) * to_log2) for lse in lses]
    s = functools.reduce(lambda a, b: a + b, weights)  # in source order; about 2^-shift or more unless all are empty
    divisor = jnp.maximum(s, np.float32(2.0 ** -(shift + 1)))
    log = jnp.log2(divisor) if base is LogBase.TWO else jnp.log2(divisor) * from_log2
    return weights, 1.0 / divisor, jnp.where(s > 0, m + log, -jnp.inf)


def _maximum(values: Sequence[Array]) -> Array:
    """Maximum by a tree: its depth, not the number of values, is waited for."""
    while len(values) > 1:
        pairs = [jnp.maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + list(values[len(pairs) * 2 :])
    return values[0]


def _weighted_mean(p: _Problem, block: int, weights, scales, words: Sequence[Array]) -> Array:
    """Words of scale * sum_i w_i o_i; `weights[k][i]` and `scales[k]` are those of the block's row k."""

    def spread(by_row: Sequence[Array]) -> Array:
        """One scalar per row to [block]."""
        spread_out = jnp.broadcast_to(by_row[0], (block,))
        for k, value in enumerate(by_row[1:], start=1):
            word = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=_layout(block))
            spread_out = jnp.where(word >= k * p.row, value, spread_out)
        return spread_out

    def terms(i: int) -> list[Array]:
        w = spread([row[i] for row in weights])
        return [w * value for value in _unpacked(jnp.where(w > 0, words[i], jnp.uint32(0)), p.dtype)]

    sums = terms(0)
    for i in range(1, p.sources):
        sums = [total + term for total, term in zip(sums, terms(i), strict=True)]
    scale = spread(scales)
    return _packed([total * scale for total in sums], p.dtype)


def _unpacked(words: Array, dtype: np.dtype) -> list[Array]:
    """float32 values of the elements in each word, the low one first."""
    if dtype.itemsize == 4:
        return [lax.bitcast_convert_type(words, jnp.float32)]
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return [lax.bitcast_convert_type(bits, jnp.float32) for bits in (words << 16, words & jnp.uint32(0xFFFF0000))]
    halves = (words & jnp.uint32(0xFFFF), words >> 16)
    return [lax.bitcast_convert_type(half.astype(jnp.uint16), dtype).astype(jnp.float32) for half in halves]


def _packed(values: Sequence[Array], dtype: np.dtype) -> Array:
    """Inverse of `_unpacked`, rounding to nearest."""
    if dtype.itemsize == 4:
        return lax.bitcast_convert_type(values[0], jnp.uint32)
    low, high = (lax.bitcast_convert_type(value.astype(dtype), jnp.uint16).astype(jnp.uint32) for value in values)
    return high << 16 | low
