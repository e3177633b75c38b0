"""A llama of 2 layers with random weights as a GGUF file: nothing divides anything, so that padding is exercised."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from jaxcp.models.llama import LlamaConfig

END = 257
CONFIG = LlamaConfig(
    layers=2, width=40, heads=9, kv_heads=3, head_dim=16, ffn=37, vocabulary=261, context=96, rope_base=10000.0,
    epsilon=float(np.float32(1e-5)),
)  # fmt: skip


def write(
    path,
    *,
    architecture="llama",
    tokenizer="gpt2",
    pre="smollm",
    fields=(),
    without=(),
    extra=(),
    reshaped=None,
    end=END,
):
    """Writes the file.

    Args:
      architecture, tokenizer, pre: what the file says it is.
      fields: further (name, value) of the llama section; a value of None leaves the field out.
      without: names of tensors left out.
      extra: names of tensors added.
      end: id of the end token.
      reshaped: name of a tensor stored with one row too many.
    """
    import gguf

    c, rng = CONFIG, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    section = {
        "block_count": c.layers, "context_length": c.context, "embedding_length": c.width, "feed_forward_length": c.ffn,
        "attention.head_count": c.heads, "attention.head_count_kv": c.kv_heads, "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim, "rope.dimension_count": c.head_dim, "rope.freq_base": c.rope_base,
        "attention.layer_norm_rms_epsilon": c.epsilon, "vocab_size": c.vocabulary,
    } | dict(fields)  # fmt: skip
    for name, value in section.items():
        put = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}.get(type(value))
        if put:
            put(f"{architecture}.{name}", value)
    tokens, merges = _vocabulary()
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in (256, END) else 1 for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(end)

    query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"token_embd": (c.vocabulary, c.width), "output_norm": (c.width,)}
    for i in range(c.layers):
        block = {
            "attn_norm": (c.width,), "attn_q": (query, c.width), "attn_k": (kv, c.width), "attn_v": (kv, c.width),
            "attn_output": (c.width, query), "ffn_norm": (c.width,), "ffn_gate": (c.ffn, c.width),
            "ffn_up": (c.ffn, c.width), "ffn_down": (c.width, c.ffn),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    shapes |= dict.fromkeys(extra, (c.width,))
    for name, shape in shapes.items():
        if name in without:
            continue
        scale = 1.0 if len(shape) == 1 or name == "token_embd" else 1.5 / np.sqrt(shape[1])
        shape = (shape[0] + 1, *shape[1:]) if name == reshaped else shape
        writer.add_tensor(f"{name}.weight", (rng.normal(size=shape) * scale + (len(shape) == 1)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


@functools.cache
def path():
    """A file that is as it should be; written once."""
    return write(Path(tempfile.mkdtemp(prefix="tiny-llama-"), "tiny.gguf"))


@functools.cache
def checkpoint():
    """The same, read."""
    from jaxcp.models import checkpoint

    return checkpoint.load(path())


def ids(text):
    """Ids of ASCII letters without a merge."""
    return [_vocabulary()[0].index(letter) for letter in text]


def _vocabulary():
    """All 256 bytes in GPT-2's printable alphabet, two special tokens, three merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [alphabet[b] for b in range(256)] + ["<|im_start|>", "<|im_end|>"]
    merges = ["t h", "th e", "1 2"]
    return tokens + [merge.replace(" ", "") for merge in merges], merges
