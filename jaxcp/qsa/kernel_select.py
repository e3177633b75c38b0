"""Scoring and block selection by the CUDA kernels of kernels/csrc/qsa (select.h says how they work)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxcp.qsa import library
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.queries import SCRATCH_BYTES, Queries

TARGET = "jaxcp_qsa_select"
INDEX_DIMS = (64, 128)
MOST_HEADS = 8
STORED, STREAMING = 0, 1
"""Methods (select.h): scores of some rows at a time in memory; lists of candidates, no scores."""

STREAMED_K, STREAMED_HEADS = 512, 4
"""Most blocks and index heads of the streaming method."""
TILE_ROWS, LIST_BYTES, MOST_LISTS = 64, 64 * 1024 * 8, 160
"""Rows of a block of the streaming method, its lists, and how many blocks run at once at most: 80 MiB of lists."""

PROCESSORS = 132
STREAMED_MS, STREAMED_MS_PER_BLOCK, STORED_MS_PER_SCORE = 0.25, 0.023e-3, 0.007e-6
"""Cost of a round of streaming tiles, and of a stored score; H200, flash_next, ms (streaming / stored) by rows and
blocks: 8192, 8192: 0.435 / 0.474; 4096, 8192: 0.39 / 0.24; 8192, 2048: 0.19 / 0.15; 16384, 2048: 0.19 / 0.17;
4096, 32768: 1.01 / 0.91; 32768, 32768: 3.9 / 7.3 (8 x 4096 rows)."""


class Work(NamedTuple):
    """How a call is done.

    Attributes:
      method: STORED or STREAMING.
      scratch: bytes.
    """

    method: int
    scratch: int


def blocker(config: QSAConfig, cache: Cache, platform: str) -> str | None:
    """Why the kernels cannot serve this cache, or None; host facts only."""
    if why := library.blocker(platform):
        return why
    if cache.dtype != jnp.bfloat16:
        return f"its dtype is bfloat16, not {cache.dtype}"
    if config.index_dim not in INDEX_DIMS:
        return f"index_dim = {config.index_dim} is not one of {', '.join(map(str, INDEX_DIMS))}"
    if config.index_heads > MOST_HEADS:
        return f"{config.index_heads} index heads exceed its {MOST_HEADS}"
    return None


def plan(rows: int, blocks: int, k: int, heads: int) -> Work:
    """Method and memory for rows that see up to `blocks` blocks and select k; at most 80 MiB, or one row's scores."""
    row_bytes = -(-blocks // 64) * 64 * 4
    tiles = -(-rows // TILE_ROWS)
    streamed = -(-tiles // PROCESSORS) * (STREAMED_MS + STREAMED_MS_PER_BLOCK * blocks)
    if k <= STREAMED_K and heads <= STREAMED_HEADS and streamed < STORED_MS_PER_SCORE * rows * blocks:
        return Work(STREAMING, min(tiles, MOST_LISTS) * LIST_BYTES)
    return Work(STORED, min(rows, max(1, SCRATCH_BYTES // row_bytes)) * row_bytes)


def select(
    index_q: Float[Array, "rows index_heads index_dim"],
    cache: Cache,
    layer: Int[Array, ""],
    queries: Queries,
    config: QSAConfig,
    blocks: int,
    k: int,
) -> Int32[Array, "rows k"]:
    """J(p) of every row, as `selection.select_xla`, for k < blocks; index_q rounded as the stored keys are.

    Args:
      blocks: bound of a row's visible blocks, within the page table.
      k: most blocks to select.
    """
    rows = queries.rows
    work = plan(len(index_q), blocks, k, config.index_heads)
    ids, _ = library.call(
        TARGET,
        [jax.ShapeDtypeStruct((len(index_q), k), jnp.int32), jax.ShapeDtypeStruct((work.scratch,), jnp.uint8)],
        index_q, cache.index, jnp.asarray(layer, jnp.int32), cache.page_table, rows.request, rows.position,
        attributes={
            "ratio": np.int64(config.ratio), "blocks": np.int64(blocks), "longest": np.int64(queries.longest),
            "method": np.int64(work.method),
        },
    )  # fmt: skip
    return ids
