"""A request in one shot, in any chunks, token by token, by prefill or decode: one answer."""

import itertools

import jax
import numpy as np
import pytest
import qsa_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from qsa_runs import Session, close, joined, same_selection

C, W, N = oracle.TINY, oracle.weights(oracle.TINY), 45
X, ROPE = oracle.hidden(C, N), oracle.image_positions(N)


@pytest.fixture(scope="module")
def want():
    return {"text": oracle.layer(C, W, X), "image": oracle.layer(C, W, X, ROPE)}


def chunks(run, cuts, kind, feed=None):
    pieces = []
    for a, b in itertools.pairwise([0, *cuts, N]):
        rope = {0: ROPE[:, a:b]} if kind == "image" else None
        pieces.append((feed or run.feed)({0: X[a:b]}, rope=rope)[0])
    run.finish()
    return joined(pieces)


@pytest.mark.parametrize("kind", ["text", "image"])
@pytest.mark.parametrize("cuts", [[], [16], [4, 8, 20], [1, 2, 3, 7, 30], [6, 13, 27, 28, 44]])
def test_chunks(want, kind, cuts):
    y, blocks = chunks(Session(C, W), cuts, kind)
    same_selection(blocks, want[kind].blocks)
    close(y, want[kind].y, "float32")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, N - 1), max_size=6, unique=True).map(sorted))
def test_any_chunks(want, cuts):
    y, blocks = chunks(Session(C, W), cuts, "image")
    same_selection(blocks, want["image"].blocks)
    close(y, want["image"].y, "float32")


@pytest.mark.parametrize("kind", ["text", "image"])
def test_token_by_token(want, kind):
    run = Session(C, W)
    y, blocks = chunks(run, range(1, N), kind, feed=run.step)
    same_selection(blocks, want[kind].blocks)
    close(y, want[kind].y, "float32")


def test_token_by_token_in_float64(want):
    with jax.enable_x64(True):
        run = Session(C, W, "float64")
        y, blocks = chunks(run, range(1, N), "image", feed=run.step)
    same_selection(blocks, want["image"].blocks)
    close(y, want["image"].y, "float64")


@pytest.mark.parametrize("k", [2, 7])
def test_several_tokens_per_decode(want, k):
    run = Session(C, W)
    pieces = [run.feed({0: X[:18]})[0]]
    for at in range(18, N, k):
        pieces.append(run.step({0: X[at : at + k]}, k=k)[0])
    run.finish()
    y, blocks = joined(pieces)
    same_selection(blocks, want["text"].blocks)
    close(y, want["text"].y, "float32")


def test_caches_are_equal_bitwise():
    """From the same projected rows the caches do not depend on chunking: pooling has one order, the ring none."""
    a, b = Session(C, W, "bfloat16"), Session(C, W, "bfloat16")
    chunks(a, [], "text")
    chunks(b, [6, 13, 27, 28, 44], "text")
    for name in ("index", "ring_keys", "ring_positions"):
        one, many = (np.asarray(getattr(run.cache, name), np.float32)[:, 1:] for run in (a, b))
        np.testing.assert_array_equal(one, many)
