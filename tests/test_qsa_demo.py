"""What `jaxcp demo` shows of QSA: that its comparisons can fail, and that its statistics count what they say."""

import dataclasses

import numpy as np
import pytest

from jaxcp import qsa
from jaxcp.qsa import demo

CONFIG = dataclasses.replace(demo.SMALL, budget=64)
"""Rows of up to 67 tokens."""

TOKENS = 256


def test_all_comparisons_hold(capsys):
    assert demo.run(CONFIG, TOKENS)
    shown = " ".join(capsys.readouterr().out.split())
    assert "67 prefilled" in shown
    assert "26% of the rows see at most 67 tokens" in shown
    assert "NO" not in shown


def broken(fn, damage):
    def called(*args, **kwargs):
        return damage(fn(*args, **kwargs))

    return called


@pytest.mark.parametrize(("module", "name", "damage", "equal"), [
    (demo, "dense_layer", lambda y: y.at[-1, 0].add(1e-6), [False, False, True]),
    (demo, "dense_layer", lambda y: y.at[5, 0].set(np.nan), [False, True, True]),
    (qsa, "decode", lambda r: (r[0].at[0, 0].add(1e-6), *r[1:]), [True, True, False]),
    (qsa, "decode", lambda r: (*r[:2], r[2].at[0, 3].add(1)), [True, True, False]),
])  # fmt: skip
def test_a_difference_is_seen(module, name, damage, equal, monkeypatch, capsys):
    monkeypatch.setattr(module, name, broken(getattr(module, name), damage))
    comparisons, _ = demo.compare(CONFIG, TOKENS)
    assert [c.equal for c in comparisons] == equal


def test_a_difference_fails_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "dense_layer", broken(demo.dense_layer, lambda y: y + 1))
    assert not demo.run(CONFIG, TOKENS)
    assert "NO" in capsys.readouterr().out


def test_statistics():
    """Budget of 2 blocks of 4: rows of at most 11 tokens are below it; 12 tokens and more are beyond."""
    config = dataclasses.replace(demo.SMALL, budget=8)
    blocks = np.array([[n if n < (p + 1) // 4 else -1 for n in (0, 1)] for p in range(16)])
    blocks[12:] = [[0, 2], [0, 2], [1, 2], [2, 3]]
    got = demo.selection_statistics(config, blocks)
    assert got.below_budget == 11 / 16
    assert got.selected == pytest.approx((4 * 2 / 3 + 2 / 4) / 5)
    assert got.overlap == pytest.approx((1 + 0.5 + 1 + 0.5 + 0.5) / 5)
    assert got.own == 1 / 2  # p = 11 sees blocks 0, 1, 2 and takes 0, 1; p = 15 takes its own, 3
