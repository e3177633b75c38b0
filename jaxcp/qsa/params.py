"""Weights of a QSA layer, under the names and shapes of the checkpoint."""

import dataclasses
from collections.abc import Mapping
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp

from jaxcp.errors import invalid
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.numerics import MODEL_DTYPES


@bind(jax.tree_util.register_dataclass, data_fields=["index_qk_proj", "q_layernorm", "k_layernorm"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class IndexerParams:
    """Weights of the indexer.

    Attributes:
      index_qk_proj: [(index_heads + 1) * index_dim, hidden]; the query heads, then the key head.
      q_layernorm: [index_dim], gain 1 + w of index queries.
      k_layernorm: [index_dim], gain 1 + w of pooled index keys.
    """

    index_qk_proj: Any
    q_layernorm: Any
    k_layernorm: Any


@bind(
    jax.tree_util.register_dataclass,
    data_fields=["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "indexer"],
    meta_fields=["config"],
)
@dataclasses.dataclass(frozen=True)
class Params:
    """Weights of one QSA layer; a stack of layers is the same tree with a leading axis, as `lax.scan` slices it.

    Attributes:
      q_proj: [heads * 2 * head_dim, hidden]; per head its query rows, then its gate rows.
      k_proj, v_proj: [kv_heads * head_dim, hidden].
      o_proj: [hidden, heads * head_dim].
      q_norm, k_norm: [head_dim], gain 1 + w of every main query and key vector.
      indexer: of the indexer.
      config: static; geometry that the shapes follow.
    """

    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any
    k_norm: Any
    indexer: IndexerParams
    config: QSAConfig

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the weights, which is the layer's."""
        return jnp.dtype(self.q_proj.dtype)


def shapes(config: QSAConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by its name in the checkpoint, without the layer's prefix."""
    c = config
    return {
        "q_proj.weight": (c.heads * 2 * c.head_dim, c.hidden),
        "k_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
        "v_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
        "o_proj.weight": (c.hidden, c.heads * c.head_dim),
        "q_norm.weight": (c.head_dim,),
        "k_norm.weight": (c.head_dim,),
        "indexer.index_qk_proj.weight": ((c.index_heads + 1) * c.index_dim, c.hidden),
        "indexer.q_layernorm.weight": (c.index_dim,),
        "indexer.k_layernorm.weight": (c.index_dim,),
    }


def from_tensors(tensors: Mapping[str, Any], config: QSAConfig, dtype="bfloat16") -> Params:
    """Params of one layer from its tensors by name (`shapes`), cast to `dtype`.

    Raises:
      ValueError: a name missing, unknown, or of another shape than the config says.
      TypeError: a dtype the layer does not compute in.
    """
    want, dtype = shapes(config), model_dtype("dtype", dtype)
    missing, unknown = sorted(want.keys() - tensors.keys()), sorted(tensors.keys() - want.keys())
    if missing:
        raise invalid(
            "tensors",
            f"no {', '.join(missing)}",
            f"the {len(want)} weights of a QSA layer",
            f"The tensors given are: {', '.join(sorted(tensors)) or 'none'}.",
        )
    if unknown:
        raise invalid(
            "tensors",
            f"unknown {', '.join(unknown)}",
            ", ".join(want),
            "A weight that is not used would be a different layer; remove it or check the prefix.",
        )
    for name, shape in want.items():
        if tuple(tensors[name].shape) != shape:
            raise invalid(
                f"tensors[{name!r}].shape",
                tuple(tensors[name].shape),
                str(shape),
                "Shapes follow from the config; check that it is the checkpoint's.",
            )
    fields = {name.removesuffix(".weight"): jnp.asarray(tensors[name], dtype) for name in want}
    indexer = {name.removeprefix("indexer."): fields.pop(name) for name in list(fields) if name.startswith("indexer.")}
    return Params(**fields, indexer=IndexerParams(**indexer), config=config)


def init_params(config: QSAConfig, key: jax.Array, dtype="bfloat16") -> Params:
    """Random weights: normal with deviation inputs ** -0.5, norm weights 0 (gain 1)."""
    tensors = {}
    for name, shape in shapes(config).items():
        key, sub = jax.random.split(key)
        tensors[name] = jax.random.normal(sub, shape) * shape[-1] ** -0.5 if len(shape) == 2 else jnp.zeros(shape)
    return from_tensors(tensors, config, dtype)


def check_params(params: Params) -> None:
    """Raises unless every weight has one model dtype and the config's shape."""
    flat = {f"{name}.weight": w for name, w in vars(params).items() if name not in ("indexer", "config")}
    flat |= {f"indexer.{name}.weight": w for name, w in vars(params.indexer).items()}
    model_dtype("params.q_proj.dtype", params.dtype)
    for name, shape in shapes(params.config).items():
        if flat[name].shape != shape:
            raise invalid(
                f"params: {name}.shape",
                flat[name].shape,
                str(shape),
                "One layer's weights are needed; slice a stack of layers first (lax.scan does).",
            )
        if flat[name].dtype != params.dtype:
            raise invalid(
                f"params: {name}.dtype",
                flat[name].dtype,
                f"{params.dtype}, the dtype of q_proj",
                "Cast the tree.",
                TypeError,
            )


def model_dtype(name: str, dtype) -> jnp.dtype:
    """`dtype` if a layer can compute in it, or the error that says so."""
    dtype = jnp.dtype(dtype)
    if dtype not in MODEL_DTYPES:
        raise invalid(name, dtype, "bfloat16, float32 or float64", "Cast the weights.", TypeError)
    return dtype
