"""What `jaxcp demo` shows of context-parallel QSA: that wrong peers are seen, and what scores near the cut excuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qsa_parallel import stale, swapped

from jaxcp import overlap, qsa
from jaxcp.qsa import demo, demo_ranks
from jaxcp.topology import make_mesh

CONFIG = dataclasses.replace(demo.SMALL, budget=64)
"""Rows of up to 67 tokens."""

TOKENS = 256
LAYOUTS = ("zigzag", "interleave")


compiled_and_run = demo_ranks.over_ranks


@functools.cache
def over_ranks(layout):
    """What the ranks give; made once for all tests that use or damage it."""
    params = qsa.init_params(CONFIG, jax.random.key(0), "float32")
    x = demo.token_rows(TOKENS, CONFIG.hidden).astype("float32")
    return compiled_and_run(params, x, make_mesh(8), layout, "overlapped")


@pytest.fixture
def damaged(monkeypatch):
    """(damage) -> the comparison after damage(y, blocks) of the zigzag ranks' answer."""

    def compare(damage):
        answer, report = over_ranks("zigzag")
        y, blocks = (a.copy() for a in answer)
        damage(y, blocks)
        monkeypatch.setattr(demo_ranks, "LAYOUTS", ["zigzag"])
        monkeypatch.setattr(demo_ranks, "over_ranks", lambda *_: (demo_ranks.Answer(y, blocks), report))
        return demo_ranks.compare(CONFIG, TOKENS)[0]

    return compare


def test_every_layout_is_equal(monkeypatch, capsys):
    monkeypatch.setattr(demo_ranks, "over_ranks", lambda params, x, mesh, layout, schedule: over_ranks(layout))
    assert demo_ranks.run(CONFIG, TOKENS)
    shown = " ".join(capsys.readouterr().out.split())
    assert "QSA prefill of 256 tokens over 8 ranks, float32" in shown
    assert "NO" not in shown
    for layout in LAYOUTS:
        assert f"{layout} │ 256 │ 256 │ 0" in shown
        index_keys = shown.index(f"{layout} 1. index keys: all-gather f32[256,16]")
        assert index_keys < shown.index(f"{layout} 2. K and V: all-gather f32[256,64]")
        assert f"{layout} 3." not in shown


def swapped_index(small, large, local, axis_name):
    """Every rank takes its neighbour's index keys for its own."""
    small, local, finish = overlap.SCHEDULES["overlapped"](small, large, local, axis_name)
    return jnp.roll(small, len(small) // 8, axis=0), local, finish


@pytest.mark.parametrize("broken", [swapped, stale, swapped_index])
def test_wrong_peer_rows_fail_the_demo(broken, monkeypatch, capsys):
    name = broken.__name__  # programs are kept by the name of their schedule
    monkeypatch.setitem(overlap.SCHEDULES, name, broken)
    monkeypatch.setattr(demo_ranks, "LAYOUTS", ["zigzag"])
    found = demo_ranks.compare(CONFIG, TOKENS, schedule=name)
    assert (found[0].wrong > 0) == (broken is swapped_index)
    assert (found[0].error > demo_ranks.TOLERANCE) == (broken is not swapped_index)
    monkeypatch.setattr(demo_ranks, "compare", lambda *_: found)
    assert not demo_ranks.run(CONFIG, TOKENS)
    assert "NO" in capsys.readouterr().out


def test_one_row_is_enough(damaged):
    def wrong(y, blocks):
        y[77, 3] += 1e-3

    def no_number(y, blocks):
        y[77, 3] = np.nan

    assert not damaged(wrong).equal
    assert not damaged(no_number).equal
    assert damaged(lambda y, blocks: None).equal


def test_a_row_near_the_cut_is_counted_apart(damaged, monkeypatch):
    """The weakest block of row 200 gives way to one that is not selected; its output is another then, too."""

    def other_block(y, blocks):
        absent = np.setdiff1d(np.arange(200 // 4), blocks[200])
        blocks[200] = np.sort(np.append(blocks[200][1:], absent[0]))
        y[200] = 1e3

    far = damaged(other_block)
    assert (far.wrong, far.near, far.equal) == (1, 0, False)
    monkeypatch.setattr(demo_ranks, "NEAR", 1e9)
    near = damaged(other_block)
    assert (near.wrong, near.near, near.equal) == (0, 1, True)
    assert near.error < demo_ranks.TOLERANCE


SCORES = np.array([0.5, 1.0, 2.0, 1.00005, 3.0, 1.0 - 0.00005])


@pytest.mark.parametrize(("want", "got", "near"), [
    ([1, 2, 4], [2, 3, 4], True),  # 1.00005 for 1
    ([1, 2, 4], [2, 4, 5], True),  # 0.99995 for 1
    ([3, 2, 4], [2, 4, 5], True),
    ([1, 2, 4], [0, 2, 4], False),  # 0.5 for 1
    ([1, 2, 4], [1, 3, 4], False),  # 1.00005 for 2, whatever the cut
    ([1, 2, 4], [2, 4, -1], False),
    ([1, 2, 4], [2, 4, 6], False),  # not visible
    ([2, 4, -1], [1, 2, 4], False),
])  # fmt: skip
def test_what_is_near_the_cut(want, got, near):
    assert demo_ranks.differ_at_the_cut(SCORES, np.array(want), np.array(got)) == near


def test_scores_of_zero_are_one_cut():
    assert demo_ranks.differ_at_the_cut(np.array([0.0, 0.0, 1.0]), np.array([0, 2]), np.array([1, 2]))


def test_one_device_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert demo_ranks.run(CONFIG, TOKENS)
    assert "left out: 1" in capsys.readouterr().out
