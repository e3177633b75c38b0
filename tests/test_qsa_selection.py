"""Block selection by XLA: the table that every implementation is run through, and its parts on given scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
import qsa_selection_cases as selection
from hypothesis import given, settings
from hypothesis import strategies as st
from qsa_runs import ids, same_selection

from jaxcp.qsa.selection import SELECT, token_rows, top_blocks

pytestmark = pytest.mark.xdist_group("qsa_selection")  # cases of one shape share a program

ROWS, BLOCKS = 6, 24
few_values = st.sampled_from([-0.0, 0.0, 1.0, 1.0000001, 2.0, 3.5, 1e-40, -1.0, -2.0])
score_rows = st.lists(st.lists(few_values, min_size=BLOCKS, max_size=BLOCKS), min_size=ROWS, max_size=ROWS)
visible_counts = st.lists(st.integers(0, BLOCKS), min_size=ROWS, max_size=ROWS)
top = jax.jit(top_blocks, static_argnums=2)
rows_of_tokens = jax.jit(token_rows, static_argnums=2)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "bfloat16") for case in selection.CASES),
        *((case, "float32") for case in selection.RANKING),
        (selection.RANKING[-1], "float64"),
    ],
    ids=str,
)
def test_matches_oracle(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        problem = case.problem(dtype)
        selection.check(problem, selection.run(SELECT["xla"], problem))


@pytest.mark.parametrize("k", [5, 40])
@settings(max_examples=30, deadline=None)
@given(score_rows, visible_counts)
def test_largest_scores_ties_to_smaller_ids(k, score, visible):
    score = np.float32(score)
    blocks = top(jnp.asarray(score), jnp.asarray(visible), k)
    assert blocks.shape == (ROWS, k)
    same_selection(ids(blocks), [oracle.largest(row[:v], k) for row, v in zip(score, visible, strict=True)])


def test_positive_and_negative_zero_tie():
    score = np.float32([[0.0, -0.0, 0.0, -0.0, 0.0]])
    assert np.asarray(jax.lax.top_k(jnp.asarray(-score), 2)[1]).tolist() != [[0, 1]], "top_k alone ranks +0 first"
    for sign in (1, -1):
        assert top(jnp.asarray(sign * score), jnp.array([5]), 3).tolist() == [[0, 1, 2]]


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
