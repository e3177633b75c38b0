"""Sparse attention by XLA, run through the table that every implementation is run through (test_qsa_attend_gpu.py)."""

import itertools

import jax
import numpy as np
import pytest
import qsa_attention_cases as attention

from jaxcp.qsa.sparse import ATTEND

pytestmark = pytest.mark.xdist_group("qsa_attention")  # cases of one shape share a program


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "bfloat16") for case in attention.CASES),
        *((case, "float32") for case in attention.SHARING),
        (attention.SHARING[0], "float64"),
    ],
    ids=str,
)
def test_matches_oracle(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        problem = case.problem(dtype)
        attention.check(problem, attention.run(ATTEND["xla"], problem))


def test_the_table_covers_what_it_says():
    """Every choice with every group size and dim, every tail, rows without a block and with fewer than are selected."""
    pairs = {(case.choice, size) for case in attention.SHARING for size in (("group", case.group), ("dim", case.dim))}
    sizes = [*(("group", g) for g in (1, 8, 12, 16)), *(("dim", d) for d in (64, 128, 256))]
    assert pairs >= set(itertools.product(("random", "shared", "half", "disjoint"), sizes))
    ends = [position + 1 for *_, position in attention.RAGGED.places]
    assert {end % 4 for end in ends} == {0, 1, 2, 3}
    assert {min(end // 4, 20) for end in ends} >= {0, 1, 20}


def test_choices_share_what_they_say():
    """Of the blocks of eight neighbours: all, half, none; at random a few."""
    shared = {}
    for case in attention.SHARING[:4]:
        rows = case.problem("bfloat16").blocks[6:14]
        assert (rows >= 0).all()
        shared[case.choice] = np.mean([len(np.intersect1d(a, b)) / 20 for a, b in itertools.combinations(rows, 2)])
    assert shared["shared"] > 0.95
    assert 0.4 < shared["half"] < 0.7
    assert 0 < shared["random"] < 0.3
    assert shared["disjoint"] == 0
