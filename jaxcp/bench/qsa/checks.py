"""Results of measured programs, held against the XLA implementation on a sample of rows, outside the timed runs."""

from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxcp.bench.qsa import peers
from jaxcp.bench.qsa.cases import Case, Inputs
from jaxcp.errors import JaxcpError
from jaxcp.lse import Partial
from jaxcp.qsa import QSAConfig
from jaxcp.qsa.indexing import take
from jaxcp.qsa.layer import gated
from jaxcp.qsa.numerics import linear
from jaxcp.qsa.queries import Queries, in_steps
from jaxcp.qsa.segments import Rows, Segments
from jaxcp.qsa.selection import ABSENT, scores
from jaxcp.qsa.sparse import attend_rows, attend_xla

SAMPLE = 64
DENSE_SAMPLE = 4
TOLERANCE = {"bfloat16": 2**-6, "float32": 2e-5}
"""Of outputs, relative to the largest one: two units of bfloat16; some hundred roundings of float32."""

LSE_TOLERANCE = 1e-3

SCORE_TOLERANCE = 1e-5
"""Relative: two orders of summing the same float32 products may rank scores as near as this either way."""


def selection(what: str, inputs: Inputs, blocks: Array) -> None:
    """Raises unless sampled rows hold the right number of ids in ascending order, and no better block was left out."""
    sample, config = _sample(inputs), inputs.config
    for row, ids, score in zip(sample, np.asarray(blocks[sample]), np.asarray(_scores_of(inputs, sample)), strict=True):
        visible = (inputs.case.positions[row] + 1) // config.ratio
        count = min(visible, config.selected_blocks)
        chosen = ids[:count]
        if (ids[count:] != -1).any() or (np.diff(chosen) <= 0).any() or ((chosen < 0) | (chosen >= visible)).any():
            raise _wrong(what, inputs, f"row {row} selects {ids.tolist()}")
        dropped = np.delete(score[:visible], chosen)
        missed = dropped.max(initial=-np.inf) - score[chosen].min(initial=np.inf)
        if not missed <= SCORE_TOLERANCE * np.abs(score[:visible]).max(initial=0):
            raise _wrong(what, inputs, f"row {row} leaves out a score {missed:.3g} above its least")


def ranked(what: str, inputs: Inputs, ids: Array) -> None:
    """Raises unless ids in any order, of which those of invisible blocks do not count, are a right selection."""
    visible = (inputs.case.positions + 1)[:, None] // inputs.config.ratio
    ids = jnp.sort(jnp.where(ids < jnp.asarray(visible), ids, ABSENT))
    selection(what, inputs, jnp.where(ids == ABSENT, -1, ids))


def attention(what: str, inputs: Inputs, blocks: Array, result: tuple[Array, ...]) -> None:
    """Raises unless sampled rows of `result`, (o,) or (o, lse), are the attention over their selection."""
    sample = _sample(inputs)
    want = _attended(inputs, blocks, sample)
    _compare(what, inputs, result[0][sample], want.o)
    if len(result) > 1 and not (error := float(jnp.abs(result[1][sample] - want.lse).max())) <= LSE_TOLERANCE:
        raise _wrong(what, inputs, f"an LSE is off by {error:.3g}; expected <= {LSE_TOLERANCE:.3g}")


def mixer(what: str, inputs: Inputs, result: tuple[Array, Array]) -> None:
    """Raises unless (gated rows, selection) are right in sampled rows."""
    mixed, blocks = result
    selection(what, inputs, blocks)
    _compare(what, inputs, mixed[_sample(inputs)], _gated(inputs, blocks))


def layer(what: str, inputs: Inputs, result: tuple[Array, Array]) -> None:
    """Raises unless sampled rows of y follow from the selection, for result = (y, selection)."""
    y, blocks = result
    _compare(what, inputs, y[_sample(inputs)], linear(_gated(inputs, blocks), inputs.params.o_proj))


def dense(what: str, inputs: Inputs, o: Array) -> None:
    """Raises unless a few rows of `o` [1, rows, heads, head_dim] are attention over all keys, or all up to each row."""
    case, (k, v) = inputs.case, peers.contiguous(inputs)
    sample = np.linspace(0, case.rows - 1, DENSE_SAMPLE).astype(int)
    count = case.positions[sample] + 1 if case.rows == case.keys else np.full(len(sample), case.keys)
    scale = inputs.config.scale
    want = [_attend_all(inputs.q[row], k, v, n, scale) for row, n in zip(sample, count, strict=True)]
    _compare(what, inputs, o[0, sample], jnp.stack(want))


def _gated(inputs: Inputs, blocks: Array) -> Float[Array, "rows features"]:
    sample = _sample(inputs)
    return gated(_attended(inputs, blocks, sample).o, inputs.gate[sample])


def _sample(inputs: Inputs) -> np.ndarray:
    return np.unique(np.linspace(0, inputs.case.rows - 1, SAMPLE).astype(int))


def _scores_of(inputs: Inputs, sample: np.ndarray) -> Float[Array, "rows blocks"]:
    request = jnp.asarray(sample // inputs.case.each)
    return row_scores(inputs.projected.index_q[sample], request, inputs.cache, inputs.case.keys // inputs.config.ratio)


@bind(jax.jit, static_argnums=3)
def row_scores(index_q, request, cache, blocks: int):
    """Scores [rows, blocks] of these index queries, of the first blocks of these rows of the cache, first layer."""

    def of_row(row):
        index_q, request = row
        keys = cache.index[0, take(cache.page_table, request)].reshape(-1, index_q.shape[-1])[:blocks]
        return scores(index_q[None], keys)[0]

    return in_steps(of_row, (index_q, request), blocks * index_q.shape[-1] * 4)


def _attended(inputs: Inputs, blocks: Array, sample: np.ndarray) -> Partial:
    case = inputs.case
    request, position = (jnp.asarray(a, jnp.int32) for a in (sample // case.each, case.positions[sample]))
    rows = Rows(request, request, position)
    return _attend(
        inputs.q[sample], blocks[sample], inputs.cache, inputs.layer, inputs.table, rows, case, inputs.config
    )


@bind(jax.jit, static_argnums=(6, 7))
def _attend(q, blocks, cache, layer, table, rows, case: Case, config: QSAConfig) -> Partial:
    return attend_xla(q, blocks, cache, layer, Queries(Segments(*table), rows, case.keys, case.each), config)


@bind(jax.jit, static_argnums=4)
def _attend_all(q, k, v, count, scale: float):
    return attend_rows(q, k, v, count, scale)[0]


def _compare(what: str, inputs: Inputs, got: Array, want: Array) -> None:
    exact = np.asarray(want, np.float64)
    error = np.abs(np.asarray(got, np.float64) - exact).max() / np.abs(exact).max()
    bound = TOLERANCE[inputs.params.dtype.name]
    if not error <= bound:
        raise _wrong(what, inputs, f"error {error:.3g}; expected <= {bound:.3g}")


def _wrong(what: str, inputs: Inputs, how: str) -> JaxcpError:
    return JaxcpError(f"bench qsa: {what} is wrong for {inputs.case}: {how}.")
