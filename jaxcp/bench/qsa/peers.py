"""What a layer's parts are measured beside: other implementations of part of their work."""

from collections.abc import Callable
from functools import partial as bind

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp.bench import _measure
from jaxcp.bench._measure import Program
from jaxcp.bench.qsa import programs, row_gather
from jaxcp.bench.qsa.cases import Case, Inputs
from jaxcp.qsa import QSAConfig, flashinfer_topk
from jaxcp.qsa.kernel_attend import attend_cuda
from jaxcp.qsa.selection import scores, token_rows

SCRATCH_BYTES = 64 << 20
SHORT = 4


def blocker() -> str | None:
    """Why the peers that are kernels of GPUs cannot run here, or None."""
    return None if (platform := jax.default_backend()) == "gpu" else f"a kernel of GPUs; jax runs on {platform!r}"


def top_k(score: Float[Array, "rows blocks"], k: int) -> Program:
    """`lax.top_k` of scores that are given: unordered ids, no scoring, no padding."""
    return Program(lambda score: lax.top_k(score, k)[1], (score,))


def flashinfer_top_k(score: Float[Array, "rows blocks"], visible: Array, k: int) -> Program:
    """FlashInfer's top-k of scores that are given, exact and in order of ids."""
    return Program(lambda score, visible: flashinfer_topk.top_blocks(score, visible, k), (score, visible))


def visible_blocks(inputs: Inputs) -> Array:
    """Visible blocks of each row, int32 [rows]."""
    return jnp.asarray((inputs.case.positions + 1) // inputs.config.ratio, jnp.int32)


def dense(inputs: Inputs) -> Program:
    """cuDNN's dense attention over all keys, of one request; causal where the rows are all of its tokens."""
    case = inputs.case
    k, v = (x[None] for x in contiguous(inputs))
    options = {"scale": inputs.config.scale, "is_causal": case.rows == case.keys, "implementation": "cudnn"}
    return Program(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options), (inputs.q[None], k, v))


def is_short(inputs: Inputs) -> bool:
    """Whether rows see at most a few times what they select, so that all keys may be less work than a gather."""
    return inputs.case.keys <= SHORT * inputs.config.budget


def masked(inputs: Inputs) -> Callable[[Array], Program]:
    """cuDNN's dense attention with a selection, given later, as its mask; the mask is there already."""
    k, v = (x[None] for x in contiguous(inputs))
    options = {"scale": inputs.config.scale, "implementation": "cudnn"}

    def run(q, k, v, bias):
        return (jax.nn.dot_product_attention(q, k, v, bias, **options)[0],)

    return lambda blocks: Program(run, (inputs.q[None], k, v, _bias(blocks, inputs.table, inputs.case, inputs.config)))


@bind(jax.jit, static_argnums=(2, 3))
def _bias(blocks, table, case: Case, config: QSAConfig) -> Float[Array, "1 1 rows keys"]:
    """0 where a row attends to a token of its request, else a number that no logit outweighs."""
    tokens = token_rows(blocks, case.queries(table).rows.position, config.ratio)
    tokens = jnp.where(tokens < 0, case.keys, tokens)  # behind the last one: dropped
    hidden = jnp.full((case.rows, case.keys), -1e30, jnp.bfloat16)
    return hidden.at[jnp.arange(case.rows)[:, None], tokens].set(0, mode="drop")[None, None]


def gather(inputs: Inputs, tuning: tuple[int, int, int]) -> Callable[[Array], Program]:
    """`row_gather` over a selection that is given later; all share one executable."""
    k, v = contiguous(inputs)
    attend = bind(row_gather.attend, scale=inputs.config.scale, tuning=tuning)

    def run(q, k, v, slots, count):
        return (attend(q, k, v, slots, count),)

    static = inputs.case, inputs.config.ratio, inputs.cache.capacity
    return lambda blocks: Program(run, (inputs.q, k, v, *_slots(blocks, inputs.table, *static)))


def alone(inputs: Inputs, blocks: Array) -> Program:
    """Our kernel without what neighbouring rows share; its time does not depend on the selection."""

    def function(q, blocks, cache, layer, queries, config):
        return attend_cuda(q, blocks, cache, layer, queries._replace(longest=1), config)

    return programs.attend(function, inputs)(blocks)


def tuned(inputs: Inputs, blocks: Array) -> tuple[int, int, int]:
    """The tuning with which `gather` is fastest on the first case that asks, for its geometry."""
    config = inputs.config
    if config not in _tunings:
        candidates = [gather(inputs, tuning)(blocks) for tuning in row_gather.TILES]
        times = _measure.device_times(candidates, repeat=5)
        _tunings[config] = min(zip(times, row_gather.TILES, strict=True), key=lambda pair: pair[0].us)[1]
    return _tunings[config]


_tunings: dict[QSAConfig, tuple[int, int, int]] = {}


@bind(jax.jit, static_argnums=(2, 3, 4))
def _slots(blocks, table, case: Case, ratio: int, capacity: int) -> tuple[Array, Array]:
    """(slots, count) of `row_gather.attend`: where `contiguous` has the tokens of each row."""
    rows = case.queries(table).rows
    tokens = token_rows(blocks, rows.position, ratio)
    slots = jnp.maximum(tokens, 0) + rows.request[:, None] * capacity
    slots = jnp.pad(slots, [(0, 0), (0, -slots.shape[1] % 128)])  # whole steps of every tuning
    return slots, jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)


def contiguous(inputs: Inputs) -> tuple[Array, Array]:
    """K and V of all requests without pages, [requests * capacity, kv_heads, head_dim]."""
    cache = inputs.cache
    table = cache.page_table.reshape(-1)
    return _unpaged(cache.k, table), _unpaged(cache.v, table)


@jax.jit
def _unpaged(pool, table):
    return pool[0, table].reshape(-1, *pool.shape[3:])


def all_scores(inputs: Inputs) -> Float[Array, "rows blocks"]:
    """Scores of all rows, -inf where a block is not visible."""
    case, cache, ratio = inputs.case, inputs.cache, inputs.config.ratio
    index_q = inputs.projected.index_q.reshape(case.requests, case.each, *inputs.projected.index_q.shape[1:])
    visible = visible_blocks(inputs).reshape(case.requests, case.each)
    return _scores(index_q, visible, cache.index, cache.page_table, blocks=case.keys // ratio)


@bind(jax.jit, static_argnames="blocks")
def _scores(index_q, visible, pool, page_table, *, blocks: int):
    def of_request(request):
        index_q, visible, pages = request
        keys = pool[0, pages].reshape(-1, pool.shape[-1])[:blocks]

        def of_row(row):
            index_q, visible = row
            return jnp.where(jnp.arange(blocks) < visible, scores(index_q[None], keys)[0], -jnp.inf)

        at_once = max(1, SCRATCH_BYTES // (index_q.shape[1] * blocks * 4))
        return lax.map(of_row, (index_q, visible), batch_size=at_once)

    return lax.map(of_request, (index_q, visible, page_table)).reshape(-1, blocks)
