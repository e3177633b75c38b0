"""Text to tokens and back."""

import sys

import pytest
import tiny_llama

from jaxcp import JaxcpError
from jaxcp.models import checkpoint
from jaxcp.models.tokenizer import Tokenizer

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

TEXTS = [
    "", " ", "the", " leading and trailing \r\n\t ", "12 the 3456", "h\u00e9llo w\u00f6rld \U0001f600 \u65e5\u672c",
    "a<|im_end|>\n<|im_start|>b", "don't I'll  \n\n\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_llama.checkpoint().vocabulary)


def test_digits_stand_alone_and_merges_apply(tokenizer):
    assert tokenizer.encode("the12") == [259, ord("1"), ord("2")]  # "12" is a merge that the cut forbids


def test_special_tokens_are_matched_whole(tokenizer):
    assert tokenizer.encode("<|im_end|>") == [tiny_llama.END]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_that_ends_inside_a_character(tokenizer):
    tokens = tokenizer.encode("a\U0001f600")[:-1]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, tokens)) == "a"
    assert "a" + stream.rest() == tokenizer.decode(tokens)


def test_other_pre_tokenizers_are_refused(tmp_path):
    other = checkpoint.load(tiny_llama.write(tmp_path / "other.gguf", pre="llama-bpe"))
    with pytest.raises(NotImplementedError, match="pre-tokenizer 'llama-bpe'; expected 'smollm'"):
        Tokenizer(other.vocabulary)


def test_without_the_tokenizers_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(JaxcpError, match=r"needs the package tokenizers. Run: pip install 'jaxcp\[models\]'"):
        Tokenizer(tiny_llama.checkpoint().vocabulary)
