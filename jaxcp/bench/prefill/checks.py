"""A rank's rows held against those that one device computed, outside the timed runs.

A product's last bits depend on how many rows it has, and scores that lie next to each other at the cut may then change
places. Rows of the same selection must agree to the dtype's tolerance; where selections differ, the blocks concerned
must score alike.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxcp import qsa
from jaxcp.bench.prefill.share import Share, first_layer, own_rows
from jaxcp.bench.qsa.checks import TOLERANCE, row_scores
from jaxcp.errors import JaxcpError
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.layer import prepare, products
from jaxcp.qsa.rope import table

SAMPLE = 64
"""Rows of another selection whose scores are looked at."""

SCORE_TOLERANCE = {"bfloat16": 2**-7, "float32": 1e-4}
"""Of scores at the cut, relative to the row's largest."""

SWAPPED_TOLERANCE = 0.1
"""Of outputs of such rows, relative to the largest output: a few of 512 blocks change a row by a few per cent."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far the rank's rows of the first layer are those of one device.

    Attributes:
      rows: compared.
      other_rows: rows that select other blocks.
      error: of outputs, relative to the largest one, in rows of the same selection.
      swapped_error: in the others.
      gap: of the scores of blocks that only one of the two selects, relative to the row's largest; of sampled rows.
    """

    rows: int
    other_rows: int
    error: float
    swapped_error: float
    gap: float


def first_layer_agrees(share: Share, implementation: str = "auto") -> Agreement:
    """Computes the rank's first layer and compares it.

    Raises:
      JaxcpError: it is wrong.
    """
    return agreement(share, *first_layer(share, implementation))


def agreement(share: Share, y: Array, blocks: Array, cache: qsa.Cache) -> Agreement:
    """Compares the rank's first layer: y [local rows, hidden], selection and cache.

    Raises:
      JaxcpError: it is wrong.
    """
    whole, dtype = share.whole, share.whole.params.dtype.name
    qsa.check(cache)
    if np.asarray(y[share.rows :], np.float32).any():
        raise JaxcpError(f"bench prefill: {whole.case.name}: padding rows of rank {share.rank} are not 0.")
    want_y, want_blocks = (own_rows(share.plan, a, share.rank)[: share.rows] for a in (whole.y, whole.blocks))
    found = _compared(share, cache, y[: share.rows], blocks[: share.rows], want_y, want_blocks)
    bounds = {"error": TOLERANCE[dtype], "swapped_error": SWAPPED_TOLERANCE, "gap": SCORE_TOLERANCE[dtype]}
    for name, bound in bounds.items():
        if not getattr(found, name) <= bound:
            what = f"{whole.case.name}, rank {share.rank} of {share.plan.cp}, is not what one device computes"
            raise JaxcpError(f"bench prefill: {what}: {name} {getattr(found, name):.3g}; expected <= {bound:.3g}.")
    return found


def _compared(share: Share, cache: qsa.Cache, y: Array, blocks: Array, want_y: Array, want_blocks: Array) -> Agreement:
    error = np.asarray(jnp.abs(y - want_y).astype(jnp.float32).max(1)) / float(jnp.abs(want_y).max())
    differs = np.asarray((blocks != want_blocks).any(1))
    rows = np.flatnonzero(differs)
    sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).astype(int)]
    selections = (np.asarray(x[sample]) for x in (blocks, want_blocks))
    gaps = [_gap(*of_row) for of_row in zip(_scores(share, cache, sample), *selections, strict=True)]
    same, swapped = (float(error[which].max(initial=0)) for which in (~differs, differs))
    return Agreement(len(y), len(rows), same, swapped, max(gaps, default=0.0))


def _gap(score: np.ndarray, blocks: np.ndarray, want: np.ndarray) -> float:
    """Between the scores of the blocks that only one of two selections has."""
    alone = score[np.setxor1d(blocks[blocks >= 0], want[want >= 0])]
    return float((alone.max() - alone.min()) / np.abs(score).max()) if alone.size else np.inf


def _scores(share: Share, cache: qsa.Cache, sample: np.ndarray) -> np.ndarray:
    """Of the first layer's visible blocks, for these rows of the rank: [rows, blocks], 0 where none is visible."""
    position, config = share.positions[sample], share.whole.config
    ends = np.cumsum(share.whole.case.lengths)
    request = np.searchsorted(ends, share.tokens[sample], side="right")
    index_q = _index_queries(share.whole.params, share.x[sample], jnp.asarray(position, jnp.int32))
    blocks = share.whole.case.longest // config.ratio
    found = np.asarray(row_scores(index_q, jnp.asarray(request, jnp.int32), cache, blocks))
    return np.where(np.arange(blocks) < (position[:, None] + 1) // config.ratio, found, 0)


@jax.jit
def _index_queries(params, x, position) -> Float[Array, "rows heads dim"]:
    params = jax.tree.map(lambda a: a[0], params)
    rope = jnp.broadcast_to(position, (3, len(x)))
    return prepare(params, products(params, x), table(params.config, rope, accumulation_dtype(x.dtype))).index_q
