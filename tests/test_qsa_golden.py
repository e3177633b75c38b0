"""A QSA layer against an independent implementation's outputs and selections (free of ties at the cut)."""

import contextlib
import pathlib

import jax
import numpy as np
import pytest
from qsa_runs import Session, joined

from jaxcp import qsa
from jaxcp.qsa.selection import token_rows

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = {
    "q_proj.weight": "w_q", "k_proj.weight": "w_k", "v_proj.weight": "w_v", "o_proj.weight": "w_o",
    "q_norm.weight": "q_norm", "k_norm.weight": "k_norm", "indexer.index_qk_proj.weight": "w_index",
    "indexer.q_layernorm.weight": "index_q_norm", "indexer.k_layernorm.weight": "index_k_norm",
}  # fmt: skip
COUNTS = ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "index_heads", "index_dim", "budget", "ratio")


def session(golden, dtype) -> Session:
    config = qsa.QSAConfig(
        **{name: int(golden[name]) for name in COUNTS},
        rope_theta=float(golden["rope_theta"]),
        mrope_section=tuple(golden["mrope_section"].tolist()),
        eps=float(golden["eps"]),
    )
    return Session(config, {name: golden[key] for name, key in NAMES.items()}, dtype, rows=70)


def check(golden, y, blocks, tolerance):
    n = len(golden["x"])
    padded = np.full((n, max(map(len, blocks))), -1)
    for i, row in enumerate(blocks):
        padded[i, : len(row)] = row
    rows = np.asarray(token_rows(jax.numpy.asarray(padded), jax.numpy.arange(n), int(golden["ratio"])))
    selected = np.zeros((n, n), bool)
    selected[np.nonzero(rows >= 0)[0], rows[rows >= 0]] = True
    np.testing.assert_array_equal(selected, golden["selected"])
    np.testing.assert_allclose(y, golden["y"], rtol=0, atol=tolerance * np.abs(golden["y"]).max())


@pytest.mark.parametrize("name", ["oneshot", "chunks", "mrope"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 5e-6), ("float32", 2e-5)])
def test_all_rows(name, dtype, tolerance):
    golden = np.load(GOLDEN / f"qsa_tiny_{name}.npz")
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        run, at, pieces = session(golden, dtype), 0, []
        for n in golden["chunks"]:
            part = slice(at, at := at + int(n))
            rope = golden["rope_positions"][:, part]
            pieces.append(run.feed({0: golden["x"][part]}, {0: rope})[0])
        run.finish()
        check(golden, *joined(pieces), tolerance)


def test_prefill_then_decode_with_image_positions():
    golden = np.load(GOLDEN / "qsa_tiny_mrope.npz")
    run, pieces = session(golden, "float32"), []
    x, rope = golden["x"], golden["rope_positions"]
    pieces.append(run.feed({0: x[:30]}, {0: rope[:, :30]})[0])
    for at in range(30, 60, 3):
        pieces.append(run.step({0: x[at : at + 3]}, k=3, rope={0: rope[:, at : at + 3]})[0])
    run.finish()
    check(golden, *joined(pieces), 2e-5)
