"""One layer's weights from safetensors files."""

import contextlib
import json
import pathlib

from jaxcp.errors import invalid
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.params import Params, from_tensors

INDEX = "model.safetensors.index.json"


def load_params(path: str | pathlib.Path, config: QSAConfig, prefix: str, dtype="bfloat16") -> Params:
    """Weights of the layer whose tensor names start with `prefix`.

    Norm weights are stored as in the checkpoint, zero-centred: the gain is 1 + w.

    Args:
      path: a .safetensors file, or a checkpoint folder (with or without an index file).
      config: geometry of the layer.
      prefix: for instance "model.language_model.layers.3.self_attn."; a trailing dot is added if it lacks one.
      dtype: to which every weight is cast: bfloat16, float32 or float64.

    Raises:
      FileNotFoundError: no safetensors file there.
      ValueError: no tensor has the prefix; or one is missing, unknown, or of another shape.
    """
    from safetensors import safe_open  # an extra: pip install jaxcp[models]

    prefix = prefix.removesuffix(".") + "."
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="numpy")) for file in _files(pathlib.Path(path), prefix)]
        names = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # the handle is no mapping
        tensors = {
            name.removeprefix(prefix): file.get_tensor(name) for name, file in names.items() if name.startswith(prefix)
        }
        if not tensors:
            raise invalid(
                "prefix", repr(prefix), "the start of some tensor's name", f"QSA layers here: {_layers(names)}."
            )
        return from_tensors(tensors, config, dtype)


def _files(path: pathlib.Path, prefix: str) -> list[pathlib.Path]:
    """Files that can hold the layer: the one given, those the index names for it, or all of the folder."""
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        of_name = json.loads(index.read_text())["weight_map"]
        return [
            path / file
            for file in sorted({f for name, f in of_name.items() if name.startswith(prefix)} or set(of_name.values()))
        ]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"path: got {path}; expected a .safetensors file or a folder with some. Check the path."
        )
    return files


def _layers(names) -> str:
    marker = "indexer.index_qk_proj.weight"
    return ", ".join(sorted(name.removesuffix(marker) for name in names if name.endswith(marker))) or "none"
