"""What `jaxcp demo` shows of QSA: 8K tokens prefilled and decoded, with the dense layer as reference where it is one.

A row of at most budget + ratio - 1 tokens selects all of them, so there the layer is dense causal attention. Beyond, a
decode must repeat what one prefill over everything gives: selections equal, outputs to the tolerance. In float64, where
a matrix product's row count cannot turn the order of two scores.
"""

import dataclasses
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxcp import qsa
from jaxcp.qsa.layer import gated, output, prepare, prepare_queries, products
from jaxcp.qsa.rope import table

TOKENS = 8192
DECODED = 16
DRIFT = 0.95
"""Correlation of neighbouring token rows. Independent ones would share no more of their selections than chance."""

TOLERANCE = 1e-12
"""Relative to the largest output: some thousand roundings of 1.1e-16."""

SMALL = dataclasses.replace(
    qsa.QSAConfig.flash_next(),
    hidden=32, heads=4, head_dim=16, rotary_dim=8, mrope_section=(2, 1, 1), index_heads=2, index_dim=16,
)  # fmt: skip
"""The model's budget and ratio on heads that a laptop's CPU serves in seconds."""


class Comparison(NamedTuple):
    """Rows that must equal a reference: their largest error, relative, and whether their selections are the same."""

    what: str
    rows: int
    error: float
    same_selection: bool = True

    @property
    def equal(self) -> bool:
        """Whether they do; NaN does not."""
        return self.same_selection and self.error <= TOLERANCE


class Statistics(NamedTuple):
    """What the rows of one request selected.

    Attributes:
      below_budget: share of the rows that select everything they see.
      selected: of the other rows: mean share of their visible blocks that is selected.
      overlap: of the other rows: mean share of a row's blocks that its predecessor selected too.
      own: of the other rows that end a block: share that selected this block, so that the token attends to itself.
    """

    below_budget: float
    selected: float
    overlap: float
    own: float


def run(config: qsa.QSAConfig = SMALL, tokens: int = TOKENS) -> bool:
    """Prefills, decodes, prints a table; whether every comparison holds."""
    from rich.console import Console
    from rich.table import Table

    start = time.perf_counter()
    comparisons, statistics = compare(config, tokens)
    rows = Table("rows", "equal to", "largest error", "equal", title=f"QSA over {tokens} tokens, float64")
    for c in comparisons:
        of, to = c.what.split(" = ")
        rows.add_row(f"{c.rows} {of}", to, f"{c.error:.1e}", "yes" if c.equal else "[bold red]NO[/]")
    console = Console(file=sys.stdout)
    console.print(rows)
    console.print(
        f"{config.heads} heads of {config.head_dim} on {config.kv_heads} KV heads; {config.budget} tokens in blocks of "
        f"{config.ratio} are selected. {statistics.below_budget:.0%} of the rows see at most {config.row_width} tokens "
        f"and select all of them. The others select {statistics.selected:.0%} of their visible blocks and share "
        f"{statistics.overlap:.0%} of them with the row before; {statistics.own:.0%} of those that end a block select "
        f"it. {time.perf_counter() - start:.0f} s."
    )
    return all(c.equal for c in comparisons)


def compare(config: qsa.QSAConfig, tokens: int = TOKENS) -> tuple[list[Comparison], Statistics]:
    """Prefill and decode against dense attention up to the budget, and decode against prefill beyond it."""
    with jax.enable_x64(True):
        params = qsa.init_params(config, jax.random.key(0), "float64")
        x = token_rows(tokens, config.hidden)
        y, blocks = _prefill_once(params, x)
        short = config.row_width
        dense = np.asarray(dense_layer(params, x[:short]))
        steps = _decode_two(params, x, short)
    long_rows, long_blocks, short_rows = steps
    same = bool((long_blocks == blocks[-DECODED:]).all())
    return [
        Comparison("prefilled = dense attention", short, _error(y[:short], dense)),
        Comparison("decoded = dense attention", DECODED, _error(short_rows, dense[-DECODED:])),
        Comparison("decoded = one prefill of everything", DECODED, _error(long_rows, y[-DECODED:]), same),
    ], selection_statistics(config, blocks)


def token_rows(tokens: int, hidden: int) -> Float[Array, "tokens hidden"]:
    """Random token rows that drift: normal, neighbours correlated by DRIFT."""
    rng, rows = np.random.default_rng(0), np.empty((tokens, hidden))
    row = rng.normal(size=hidden)
    for i, noise in enumerate(rng.normal(size=(tokens, hidden))):
        rows[i] = row = DRIFT * row + (1 - DRIFT**2) ** 0.5 * noise
    return jnp.asarray(rows)


@jax.jit
def dense_layer(params: qsa.Params, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
    """The layer with dense causal attention in place of the indexer, the selection and the cache."""
    n = len(x)
    positions = jnp.broadcast_to(jnp.arange(n), (3, n))
    of, angles = products(params, x), table(params.config, positions, x.dtype)
    projected, (q, gate) = prepare(params, of, angles), prepare_queries(params, of.q_gate, angles)
    k, v = (
        jnp.repeat(a, params.config.heads // params.config.kv_heads, axis=1) for a in jnp.moveaxis(projected.kv, 1, 0)
    )
    logits = jnp.einsum("qhd,khd->hqk", q, k) * params.config.scale
    weights = jax.nn.softmax(logits, where=jnp.tri(n, dtype=bool))
    o = jnp.einsum("hqk,khd->qhd", weights, v)
    return output(params, gated(o, gate), jnp.ones(n, bool))


def selection_statistics(config: qsa.QSAConfig, blocks: np.ndarray) -> Statistics:
    """Statistics of the selected blocks [tokens, k] of all rows of one request."""
    tokens = len(blocks)
    chosen = np.zeros((tokens, tokens // config.ratio + 1), bool)
    np.put_along_axis(chosen, blocks, True, axis=1)  # -1, behind the ids, marks the last column, no block's
    chosen[:, -1] = False
    end = np.arange(1, tokens + 1)
    beyond = end > config.row_width
    share = chosen.sum(1)[beyond] / (end // config.ratio)[beyond]
    common = (chosen[1:] & chosen[:-1]).sum(1)[beyond[1:]] / config.selected_blocks
    ends_block = beyond & (end % config.ratio == 0)
    own = chosen[np.flatnonzero(ends_block), end[ends_block] // config.ratio - 1]
    return Statistics(1 - beyond.mean(), *(float(a.mean()) for a in (share, common, own)))


def _prefill_once(params: qsa.Params, x: Array) -> tuple[np.ndarray, np.ndarray]:
    """(y, selected blocks) of all rows as one chunk."""
    cache = _cache(params.config, len(x))
    plan = qsa.plan([len(x)], cache=cache)
    result = qsa.prefill(params, plan.pad(x), cache, plan, return_selection=True)
    y, cache, blocks = result  # pyright: ignore[reportAssignmentType]
    qsa.check(cache)
    return np.asarray(y[: len(x)]), np.asarray(blocks[: len(x)])


def _decode_two(params: qsa.Params, x: Array, short: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two requests, all of `x` and its first `short` tokens: all but their last DECODED prefilled, those decoded.

    Returns:
      the long request's decoded rows and selections, the short one's rows.
    """
    lengths = np.array([len(x), short])
    cache = _cache(params.config, len(x))
    for request, prefix in enumerate(lengths - DECODED):
        plan = qsa.plan([prefix], requests=[request], cache=cache)
        _, cache = qsa.prefill(params, plan.pad(x[:prefix]), cache, plan)  # pyright: ignore[reportAssignmentType]
    y, blocks = [], []
    for length in range(len(x) - DECODED + 1, len(x) + 1):
        held = lengths - len(x) + length
        result = qsa.decode(params, x[held - 1], cache, held, return_selection=True)
        out, cache, chosen = result  # pyright: ignore[reportAssignmentType]
        y.append(np.asarray(out))
        blocks.append(np.asarray(chosen[0]))
    qsa.check(cache)
    return np.array(y)[:, 0], np.array(blocks), np.array(y)[:, 1]


def _cache(config: qsa.QSAConfig, tokens: int) -> qsa.Cache:
    """An empty cache for two requests of so many tokens."""
    return qsa.init_cache(config, requests=2, pages=1 + 2 * -(-tokens // 64), dtype="float64")


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())
