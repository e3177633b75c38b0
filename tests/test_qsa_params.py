"""Weights: names and shapes of the checkpoint, safetensors files, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session, close

from jaxcp import qsa
from jaxcp.qsa.params import check_params, shapes

safetensors = pytest.importorskip("safetensors.numpy")
C, W = oracle.TINY, oracle.weights(oracle.TINY)
PREFIX = "model.language_model.layers.3.self_attn."


def in_checkpoint(weights, prefix=PREFIX):
    return {prefix + name: a for name, a in weights.items()}


def test_shapes_of_the_released_model():
    assert shapes(qsa.QSAConfig.flash_next()) == {
        "q_proj.weight": (12288, 2560), "k_proj.weight": (512, 2560), "v_proj.weight": (512, 2560),
        "o_proj.weight": (2560, 6144), "q_norm.weight": (256,), "k_norm.weight": (256,),
        "indexer.index_qk_proj.weight": (640, 2560), "indexer.q_layernorm.weight": (128,),
        "indexer.k_layernorm.weight": (128,),
    }  # fmt: skip


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX.removesuffix(".")])
def test_one_file(tmp_path, prefix):
    others = {"model.language_model.layers.3.mlp.weight": np.ones(3, np.float32)}
    safetensors.save_file(in_checkpoint(W) | others, tmp_path / "m.safetensors")
    params = qsa.load_params(tmp_path / "m.safetensors", C, prefix, dtype="float32")
    np.testing.assert_array_equal(params.q_proj, W["q_proj.weight"])
    np.testing.assert_array_equal(params.indexer.k_layernorm, W["indexer.k_layernorm.weight"])


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_of_shards(tmp_path, index):
    names = list(W)
    halves = {f"model-{i}.safetensors": {n: W[n] for n in names[i::2]} for i in range(2)}
    for file, part in halves.items():
        safetensors.save_file(in_checkpoint(part), tmp_path / file)
    if index:
        of_name = {PREFIX + n: file for file, part in halves.items() for n in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_name}))
    params = qsa.load_params(tmp_path, C, PREFIX)
    assert params.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.v_proj, jnp.asarray(W["v_proj.weight"], jnp.bfloat16))


def test_bfloat16_files_are_read_bit_for_bit(tmp_path):
    half = {n: np.asarray(jnp.asarray(a, jnp.bfloat16)) for n, a in W.items()}
    safetensors.save_file(in_checkpoint(half), tmp_path / "m.safetensors")
    params = qsa.load_params(tmp_path, C, PREFIX)
    np.testing.assert_array_equal(np.asarray(params.o_proj).view(np.uint16), half["o_proj.weight"].view(np.uint16))


def test_norm_gain_is_one_plus_the_weight():
    zero = W | {n: np.zeros_like(a) for n, a in W.items() if a.ndim == 1}
    x = oracle.hidden(C, 20)
    close(Session(C, zero).feed({0: x})[0][0], oracle.layer(C, zero, x).y, "float32")
    assert np.abs(oracle.layer(C, zero, x).y).max() > 0.1


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("indexer.q_layernorm.weight", None, r"no indexer\.q_layernorm\.weight"),
        ("q_proj.bias", np.zeros(64, np.float32), r"unknown q_proj\.bias"),
        ("o_proj.weight", W["o_proj.weight"].T.copy(), r"o_proj\.weight.*got \(32, 16\); expected \(16, 32\)"),
        ("q_proj.weight", W["q_proj.weight"][:32], r"q_proj\.weight.*got \(32, 16\); expected \(64, 16\)"),
    ],
    ids=["missing", "unknown", "transposed", "without its gate"],
)
def test_tensors_that_are_not_the_layers(tmp_path, name, tensor, message):
    weights = {n: a for n, a in (W | {name: tensor}).items() if a is not None}
    safetensors.save_file(in_checkpoint(weights), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=message):
        qsa.load_params(tmp_path, C, PREFIX)


def test_no_such_layer_names_those_that_are_there(tmp_path):
    safetensors.save_file(in_checkpoint(W), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"layers\.4\.self_attn.*QSA layers here: model\.language_model\.layers\.3"):
        qsa.load_params(tmp_path, C, "model.language_model.layers.4.self_attn.")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        qsa.load_params(tmp_path / "nowhere", C, PREFIX)


def test_init_is_a_valid_layer():
    params = qsa.init_params(C, jax.random.key(0), "float32")
    check_params(params)
    assert 0.8 < float(jnp.std(params.q_proj)) * C.hidden**0.5 < 1.2
    assert not params.q_norm.any()
    assert not jnp.array_equal(params.k_proj, params.v_proj)
    assert len(jax.tree.leaves(params)) == 9
