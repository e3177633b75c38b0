"""Several requests in one forward: ragged lengths and prefixes, any order, nothing read behind a valid range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session, close, joined, same_selection

from jaxcp import qsa

C, W = oracle.TINY, oracle.weights(oracle.TINY)
PREFIXES = [0, 1, 6, 16, 64]


def compare(got, x, dtype="float32", config=C, tensors=W):
    """got: (y, selections) of the last rows of request `x`."""
    want = oracle.layer(config, tensors, x)
    n = len(got[0])
    same_selection(got[1], want.blocks[len(x) - n :])
    close(got[0], want.y[len(x) - n :], dtype)


def test_ragged_batch_with_prefixes():
    """Every length with every prefix in one batch: around the budget, around blocks, one token, none."""
    lengths = [0, 1, 3, 4, 5, *range(C.row_width - 4, C.row_width + 3), 67]
    cases = [(prefix, length) for prefix in PREFIXES for length in lengths]
    x = [oracle.hidden(C, sum(case), seed) for seed, case in enumerate(cases)]
    run = Session(C, W, requests=len(cases), tokens=136)
    run.feed({i: x[i][:prefix] for i, (prefix, _) in enumerate(cases)})
    got = run.feed({i: x[i][prefix:] for i, (prefix, _) in enumerate(cases)})
    run.finish()
    for i, (_, length) in enumerate(cases):
        assert len(got[i][0]) == length
        compare(got[i], x[i])


@pytest.mark.slow
def test_ragged_batch_at_the_models_budget():
    """Lengths around 2051 and a long one, with prefixes, at budget 2048 and ratio 4."""
    config, lengths = oracle.BUDGET, [1, 3, 4, 5, *range(2047, 2054), 8193]
    prefixes = [2048, 64, 6, 1, 0, 1, 6, 64, 0, 1, 6, 64]
    tensors = oracle.weights(config)
    x = [oracle.hidden(config, sum(case), i) for i, case in enumerate(zip(prefixes, lengths, strict=True))]
    with jax.enable_x64(True):
        run = Session(config, tensors, "float64", requests=len(x), tokens=10304, page_size=64)
        run.feed({i: x[i][:p] for i, p in enumerate(prefixes)})
        got = run.feed({i: x[i][p:] for i, p in enumerate(prefixes)})
        run.finish()
    for i in range(len(x)):
        compare(got[i], x[i], "float64", config, tensors)


def poisoned(run):
    """NaN in every place nothing was written to, dumps included."""

    def fill(a):
        return jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a

    run.cache = jax.tree.map(fill, run.cache)
    return run


def test_nan_behind_every_valid_range():
    """Unwritten pages, other pages, dumps, ring slots and padding rows hold NaN; none is ever read."""
    x = [oracle.hidden(C, n, n) for n in (37, 50, 61)]
    run, cuts = poisoned(Session(C, W)), [(0, 14, 35, 36), (0, 1, 40, 47), (0, 0, 30, 57)]
    pieces = {r: [] for r in range(3)}
    for a, b in ((0, 1), (1, 2), (2, 3)):
        parts = {r: x[r][cuts[r][a] : cuts[r][b]] for r in range(3)}
        tokens, plan = sum(map(len, parts.values())), qsa.plan(
            [len(p) for p in parts.values()], run.lengths, cache=run.cache, min_rows=96
        )  # fmt: skip
        rows = np.full((plan.rows, C.hidden), np.nan, np.float32)
        rows[:tokens] = np.concatenate(list(parts.values()))
        y, run.cache = qsa.prefill(run.params, jnp.asarray(rows), run.cache, plan)
        assert np.isfinite(y).all()
        assert not np.asarray(y)[tokens:].any()
        at = 0
        for r, part in parts.items():
            pieces[r].append(np.asarray(y)[at : (at := at + len(part))])
            run.lengths[r] += len(part)
    last = run.step({r: x[r][cuts[r][3] :] for r in range(3)}, k=4)
    run.finish()
    for r in range(3):
        close(np.concatenate([*pieces[r], last[r][0]]), oracle.layer(C, W, x[r]).y, "float32")


def test_permuting_requests_permutes_results():
    x = [oracle.hidden(C, n, n) for n in (5, 33, 20)]
    straight = Session(C, W).feed(dict(enumerate(x)))
    turned = Session(C, W).feed({2: x[1], 0: x[2], 1: x[0]})
    for mine, theirs in ((0, 1), (1, 2), (2, 0)):
        np.testing.assert_array_equal(straight[mine][0], turned[theirs][0])
        assert straight[mine][1] == turned[theirs][1]


def test_decode_with_idle_and_short_requests():
    x = [oracle.hidden(C, n, n) for n in (40, 41, 30)]
    run = Session(C, W)
    pieces = {r: [run.feed({r: x[r][:25]})[r]] for r in range(3)}
    for counts in ((2, 0, 1), (0, 2, 2), (1, 1, 0), (2, 2, 2)):
        parts = {r: x[r][run.lengths[r] : run.lengths[r] + n] for r, n in enumerate(counts) if n}
        for r, piece in run.step(parts, k=2).items():
            pieces[r].append(piece)
    run.finish()
    for r in range(3):
        compare(joined(pieces[r]), x[r][: run.lengths[r]])


def test_padding_rows_of_decode_are_zero():
    run = Session(C, W)
    x = jnp.asarray(oracle.hidden(C, 6))
    y, run.cache = qsa.decode(run.params, x, run.cache, [2, 1, 0], counts=[2, 1, 0])
    assert np.asarray(y)[[0, 1, 2]].any(axis=1).all()
    assert not np.asarray(y)[3:].any()
    assert not np.asarray(run.cache.ring_positions)[0, 3, :, 0].max() >= 0, "an idle request keeps its ring"


@pytest.mark.parametrize(("ratio", "budget"), [(1, 7), (5, 20)])
def test_any_ratio_and_budget(ratio, budget):
    config = dataclasses.replace(C, ratio=ratio, budget=budget)
    tensors, x = oracle.weights(config), oracle.hidden(config, 40)
    run = Session(config, tensors, page_size=10 if ratio == 5 else 8)
    compare(joined([run.feed({0: x[:13]})[0], run.feed({0: x[13:]})[0]]), x, config=config, tensors=tensors)
    run.finish()
