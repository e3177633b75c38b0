"""Exactness of the block selection: order, ties, zeros, padding, no future."""

from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from qsa_runs import ids, same_selection

from jaxcp.qsa.selection import all_visible, scores, token_rows, top_blocks

ROWS, BLOCKS = 6, 24
few_values = st.sampled_from([-0.0, 0.0, 1.0, 1.0000001, 2.0, 3.5, 1e-40, -1.0, -2.0])
score_rows = st.lists(st.lists(few_values, min_size=BLOCKS, max_size=BLOCKS), min_size=ROWS, max_size=ROWS)
visible_counts = st.lists(st.integers(0, BLOCKS), min_size=ROWS, max_size=ROWS)
top = jax.jit(top_blocks, static_argnums=2)
rows_of_tokens = jax.jit(token_rows, static_argnums=2)


def expected(score, visible, k):
    return [oracle.largest(row[:v], k) for row, v in zip(np.asarray(score), visible, strict=True)]


@pytest.mark.parametrize("k", [1, 5, 24, 40])
@settings(max_examples=60, deadline=None)
@given(score_rows, visible_counts)
def test_largest_scores_ties_to_smaller_ids(k, score, visible):
    score = np.float32(score)
    blocks = top(jnp.asarray(score), jnp.asarray(visible), k)
    assert blocks.shape == (ROWS, k)
    same_selection(ids(blocks), expected(score, visible, k))


def test_positive_and_negative_zero_tie():
    score = np.float32([[0.0, -0.0, 0.0, -0.0, 0.0]])
    assert np.asarray(jax.lax.top_k(jnp.asarray(-score), 2)[1]).tolist() != [[0, 1]], "top_k alone ranks +0 first"
    for sign in (1, -1):
        assert top(jnp.asarray(sign * score), jnp.array([5]), 3).tolist() == [[0, 1, 2]]


def test_all_negative_scores_tie_at_zero():
    """Where no head responds, every score is exactly 0 and the first blocks win."""
    keys = jnp.asarray(np.abs(np.random.default_rng(0).normal(size=(40, 8))), jnp.float32)
    score = scores(-jnp.ones((3, 2, 8)), keys)
    assert not score.any()
    same_selection(ids(top(score, jnp.array([40, 17, 2]), 5)), [range(5), range(5), range(2)])


def test_nearly_equal_scores():
    """65,536 scores within 16 units in the last place: nothing is binned, nothing dropped."""
    rng = np.random.default_rng(1)
    score = (np.float32(1) + rng.integers(0, 16, (2, 65536)) * np.float32(2**-23)).astype(np.float32)
    score[1] = 1 + np.arange(65536) % 2 * np.float32(2**-23)
    visible = [65536, 65001]
    same_selection(ids(top(jnp.asarray(score), jnp.asarray(visible), 512)), expected(score, visible, 512))


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30])
def test_blocks_that_are_not_visible_do_not_count(value):
    score = np.float32(np.random.default_rng(2).normal(size=(ROWS, BLOCKS)))
    visible = [0, 1, 4, 5, 6, BLOCKS]
    want = expected(score, visible, 5)
    for row, v in enumerate(visible):
        score[row, v:] = value
    same_selection(ids(top(jnp.asarray(score), jnp.asarray(visible), 5)), want)


def test_the_dense_shortcut_is_the_selection():
    visible = jnp.arange(7)
    np.testing.assert_array_equal(all_visible(visible, 6), top(jnp.ones((7, 6)), visible, 6))


@pytest.mark.parametrize("ratio", [1, 2, 4, 5])
def test_token_rows(ratio):
    k, rng = 3, np.random.default_rng(ratio)
    positions = np.arange(-1, 40)
    chosen = [oracle.largest(rng.normal(size=(p + 1) // ratio), k) for p in positions]
    blocks = np.full((len(positions), k), -1, np.int32)
    for row, c in enumerate(chosen):
        blocks[row, : len(c)] = c
    rows = np.asarray(rows_of_tokens(jnp.asarray(blocks), jnp.asarray(positions), ratio))
    assert rows.shape[1] == k * ratio + ratio - 1
    for row, p, c in zip(rows, positions, chosen, strict=True):
        want = oracle.tokens(c, p, ratio)
        assert row[: len(want)].tolist() == want.tolist()
        assert (row[len(want) :] == -1).all()
        assert len(want) == ratio * min(k, (p + 1) // ratio) + (p + 1) % ratio


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=ROWS, max_size=ROWS), st.data())
def test_never_a_future_token(positions, data):
    """Whatever the scores, all tokens of row p are distinct and <= p, and the tail is there."""
    seed = data.draw(st.integers(0, 2**20))
    score = np.random.default_rng(seed).choice(np.float32([0, 1, 2, np.inf]), (ROWS, 25))
    position = jnp.asarray(positions)
    blocks = top(jnp.asarray(score), (position + 1) // 4, 5)
    for row, p in zip(np.asarray(rows_of_tokens(blocks, position, 4)), positions, strict=True):
        valid = row[row >= 0].tolist()
        assert len(set(valid)) == len(valid)
        assert max(valid) <= p
        assert set(range((p + 1) // 4 * 4, p + 1)) <= set(valid)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores(dtype):
    rng = np.random.default_rng(3)
    a, c = (jnp.asarray(rng.normal(size=s), dtype) for s in ((5, 4, 16), (9, 16)))
    exact = np.einsum("rhd,nd->rhn", np.asarray(a, np.float64), np.asarray(c, np.float64))
    want = np.maximum(exact, 0).sum(1) / 4
    got = jax.jit(bind(scores))(a, c)
    assert got.dtype == jnp.float32, "scores are compared in float32"
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
