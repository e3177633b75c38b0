"""Sparse attention by the CUDA kernels of kernels/csrc/qsa (attend_params.h says how they work).

There is no dense kernel for short contexts: where little more than the budget is visible, a tile's union is everything
visible. On an H200, 2048 rows over 8192 keys take 0.35 ms if rows share their selections and 0.72 ms if they share
nothing; cuDNN's dense attention takes 0.55 ms without a mask and 1.51 ms with the selection as its bias
(benchmarks/qsa_h200.json).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcp.lse import LogBase, Partial
from jaxcp.qsa import library
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.params import Params
from jaxcp.qsa.queries import ROWS_AT_ONCE, Queries
from jaxcp.qsa.rope import Table
from jaxcp.qsa.scopes import ATTENTION
from jaxcp.storage import E4M3

ATTEND, MIX = "jaxcp_qsa_attend", "jaxcp_qsa_mix"
HEAD_DIMS = (64, 128, 256)
ROTARY_UNIT = 16
"""A multiple of it can be rotated by the kernels (heads.h)."""
TILE_HEADS, TILE_ROWS, CHUNK, MOST_SPLITS = 64, 8, 64, 64
"""Limits of the kernels: MMA rows and query rows of a tile, tokens per step, parts of a list (attend_params.h)."""
MOST_SLOTS, MOST_UNITS = 1 << 24, 1 << 32
"""Blocks of a layer, and 16-byte units of a layer's keys or of all queries, that its 32-bit numbers can tell apart."""
LIST_WORDS = 1 << 24
"""32-bit words of lists at a time: 64 MiB, some 32,000 rows of 512 blocks."""

PROCESSORS = 132
"""Blocks that run at once; a fixed number, so that results do not depend on the device."""
WALK_US = {"tile": 65, "row": 35}
"""A block's walk over a whole list: 2,500 tokens of a tile, 2,051 of a row (H200)."""
BLOCK_US = {"tile": 4, "row": 5}
"""What a block takes beside its walk: start, first loads, the merge of its warps (H200)."""
MERGE_US, MERGE_BYTES_PER_US = 0.035, 1e6
"""What one more part of every list takes in the merge kernel, beside writing and reading its partials (H200)."""


class Work(NamedTuple):
    """How a call is cut up.

    Attributes:
      tile_rows: query rows that share a gather; 1: rows go alone.
      splits: parts of every list, merged by a kernel of their own.
      slice: rows whose lists exist at a time.
      scratch: 32-bit words, of lists, partials and queries.
    """

    tile_rows: int
    splits: int
    slice: int
    scratch: int


def blocker(config: QSAConfig, cache: Cache, platform: str) -> str | None:
    """Why the kernels cannot serve this cache, or None; host facts only."""
    group, pages = config.heads // config.kv_heads, cache.k.shape[1]
    if why := library.blocker(platform):
        return why
    if cache.dtype != jnp.bfloat16:
        return f"its dtype is bfloat16, not {cache.dtype}"
    if cache.kv_dtype == E4M3:
        return "K and V stored as float8_e4m3fn are not built in"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim = {config.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if group > TILE_HEADS:
        return f"{group} query heads per KV head exceed its {TILE_HEADS}"
    if config.ratio & (config.ratio - 1):
        return f"ratio = {config.ratio} is not a power of two"
    if pages * cache.blocks_per_page > MOST_SLOTS:
        return f"{pages} pages of {cache.blocks_per_page} blocks exceed its {MOST_SLOTS} blocks per layer"
    if math.prod(cache.k.shape[1:]) // 8 >= MOST_UNITS:
        return "a layer's keys of 64 GiB or more exceed its 32-bit offsets"
    return None


def plan(rows: int, config: QSAConfig, width: int, longest: int, *, from_products: bool = False) -> Work:
    """How to cut up `rows` query rows that select `width` blocks each, at most `longest` neighbours of one request.

    With `from_products` the queries of a slice are made in scratch.
    """
    group = config.heads // config.kv_heads
    tile_rows = min(TILE_ROWS, TILE_HEADS // group)
    if longest < tile_rows:  # a tile would be a union of strangers
        tile_rows = 1
    words = 2 + tile_rows * (width + 1)
    slice_rows = max(1, LIST_WORDS // words) * tile_rows
    if from_products:
        slice_rows = min(slice_rows, max(1, ROWS_AT_ONCE // tile_rows) * tile_rows)
    tiles = -(-rows // tile_rows)
    part = rows * config.heads * (config.head_dim + 1)
    splits = 1
    if rows <= slice_rows:
        most = min(MOST_SPLITS, max(1, tile_rows * (width + 1) * config.ratio // CHUNK))
        splits = _splits(tiles * config.kv_heads, most, "row" if tile_rows == 1 else "tile", 8 * part)
    lists = min(tiles, slice_rows // tile_rows) * words if tile_rows > 1 or group > 16 else 0
    queries = min(rows, slice_rows) * config.heads * config.head_dim // 2 if from_products and lists else 0
    partials = splits * part if splits > 1 else 0
    return Work(tile_rows, splits, slice_rows, max(1, -(-lists // 4) * 4 + partials + queries))


def _splits(items: int, most: int, kind: str, part_bytes: int) -> int:
    """Parts per list that take least time: rounds of blocks, each a part and what a block takes; and the merge."""

    def microseconds(splits: int) -> float:
        merge = splits * (MERGE_US + part_bytes / MERGE_BYTES_PER_US) if splits > 1 else 0
        return -(-items * splits // PROCESSORS) * (WALK_US[kind] / splits + BLOCK_US[kind]) + merge

    return min(range(1, most + 1), key=microseconds)


def attend_cuda(
    q: Float[Array, "rows heads head_dim"],
    blocks: Int[Array, "rows k"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
) -> Partial:
    """Every row's attention over the cache, as `sparse.attend_xla`; blocks below v(p), ascending, -1 behind."""
    work = plan(len(q), config, blocks.shape[1], queries.longest)
    results = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        jax.ShapeDtypeStruct((work.scratch,), jnp.int32),
    ]
    keys = _keys(blocks, cache, layer, queries)
    o, lse, _ = library.call(ATTEND, results, q, *keys, attributes=_attributes(work, config))
    return Partial(o, lse, LogBase.TWO)


def attended_for(config: QSAConfig) -> Callable | None:
    """`attended_cuda` where it can rotate the queries; None: XLA makes them, for `attend_cuda`."""
    return attended_cuda if config.rotary_dim % ROTARY_UNIT == 0 else None


def attended_cuda(
    params: Params,
    q_gate: Float[Array, "rows q_gate_features"],
    angles: Table,
    blocks: Int[Array, "rows k"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
) -> Float[Array, "rows features"]:
    """Gated attention of every row from its products, as `mixing.attended`, in one call."""
    config, rows = params.config, len(q_gate)
    work = plan(rows, config, blocks.shape[1], queries.longest, from_products=True)
    results = [
        jax.ShapeDtypeStruct((rows, q_gate.shape[1] // 2), q_gate.dtype),
        jax.ShapeDtypeStruct((work.scratch,), jnp.int32),
    ]
    with jax.named_scope(ATTENTION):
        mixed, _ = library.call(
            MIX, results, q_gate, params.q_norm, *angles, *_keys(blocks, cache, layer, queries),
            attributes=_attributes(work, config) | {"eps": np.float32(config.eps)},
        )  # fmt: skip
    return mixed


def _keys(blocks: Int[Array, "rows k"], cache: Cache, layer, queries: Queries) -> tuple[Array, ...]:
    """Operands that say what rows attend to."""
    rows, layer = queries.rows, jnp.asarray(layer, jnp.int32)
    return blocks.astype(jnp.int32), rows.request, rows.position, cache.page_table, cache.k, cache.v, layer


def _attributes(work: Work, config: QSAConfig) -> dict[str, np.generic]:
    return {
        "ratio": np.int64(config.ratio),
        "tile_rows": np.int64(work.tile_rows),
        "splits": np.int64(work.splits),
        "slice": np.int64(work.slice),
        "scale_log2e": np.float32(config.scale * math.log2(math.e)),
    }
