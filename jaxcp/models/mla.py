"""A decoder layer with multi-head latent attention (MLA), tensor-parallel over the context-parallel axis.

A token caches one row [latent | rope] for all heads. In the *expanded* form a head's keys and values are made from it:

    k_n = [W_UK latent_n | rope_n]      v_n = W_UV latent_n      o = sum_n softmax_n(scale q.k_n) v_n

In the *absorbed* form, W_UK moves to the query and W_UV behind the sum, so that attention reads the cached rows alone:

    q' = [W_UK^T q_nope | q_rope]       o = W_UV sum_n softmax_n(scale q'.[latent_n | rope_n]) latent_n

Both give the same numbers; `layer` is the absorbed form over a sharded cache, `expanded` the other one without a cache.

Source: DeepSeek-V2 (2024), sections 2.1.2 and 2.1.3, without query compression and without YaRN.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxcp import decode
from jaxcp.exchange import Exchange
from jaxcp.lse import accumulation_dtype
from jaxcp.models.llama import rms_norm, rope
from jaxcp.products import contract

Weights = dict[str, Array]
"""One layer, by name; `shapes` lists them."""


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Geometry of a layer; sizes in elements."""

    width: int
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    ffn: int
    rope_base: float = 10000.0
    epsilon: float = 1e-6

    @classmethod
    def deepseek_v2_lite(cls) -> "MLAConfig":
        """DeepSeek-V2-Lite's first layer, the one with a dense FFN."""
        return cls(width=2048, heads=16, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512, ffn=10944)

    @property
    def scale(self) -> float:
        """Factor of the logits: the width of an expanded key ** -0.5."""
        return (self.nope_dim + self.rope_dim) ** -0.5

    def cache(self, layers: int, dtype: Any = "bfloat16", page_size: int = 16) -> decode.CacheConfig:
        """The cache of `layers` such layers."""
        return decode.CacheConfig.mla(
            layers=layers, latent_dim=self.latent_dim, rope_dim=self.rope_dim, dtype=dtype, page_size=page_size
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight; inputs first, except where an axis of heads leads."""
        return {
            "attention_norm": (self.width,),
            "query": (self.heads, self.width, self.nope_dim + self.rope_dim),
            "compress": (self.width, self.latent_dim + self.rope_dim),
            "latent_norm": (self.latent_dim,),
            "up_key": (self.heads, self.latent_dim, self.nope_dim),
            "up_value": (self.heads, self.latent_dim, self.value_dim),
            "output": (self.heads, self.value_dim, self.width),
            "ffn_norm": (self.width,),
            "gate": (self.width, self.ffn),
            "up": (self.width, self.ffn),
            "down": (self.ffn, self.width),
        }


_SPLIT = {"query": 0, "up_key": 0, "up_value": 0, "output": 0, "gate": 1, "up": 1, "down": 0}
"""Axis of each weight that is split over the ranks; the others are the same everywhere."""


def random_weights(config: MLAConfig, key: Array, dtype: Any = "bfloat16") -> Weights:
    """Weights of unit gain: normal with variance 1 / inputs, norms 1."""
    shapes = config.shapes()
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {
        name: jnp.ones(shape, dtype)
        if len(shape) == 1
        else jax.random.normal(keys[name], shape, dtype) * shape[-2] ** -0.5
        for name, shape in shapes.items()
    }


def padded(weights: Weights, cp: int) -> Weights:
    """`weights` with zero heads and FFN columns, so that every split axis divides by `cp`."""

    def pad(name, x):
        widths = [(0, -size % cp if axis == _SPLIT.get(name) else 0) for axis, size in enumerate(x.shape)]
        return jnp.pad(x, widths)

    return {name: pad(name, x) for name, x in weights.items()}


def partition_specs(config: MLAConfig, axis_name: str) -> dict[str, P]:
    """`PartitionSpec` of each weight, for shard_map."""
    return {name: P(*[None] * _SPLIT[name], axis_name) if name in _SPLIT else P() for name in config.shapes()}


def layer(
    weights: Weights,
    x: Float[Array, "tokens width"],
    cache: decode.Cache,
    lengths: Int[Array, "requests"],
    *,
    config: MLAConfig,
    exchange: Exchange,
    index: Any = 0,
    counts: Int[Array, "requests"] | None = None,
    prefill: bool = False,
) -> tuple[Float[Array, "tokens width"], decode.Cache]:
    """One layer over the new tokens of every request, absorbed; in shard_map over the exchange's axis.

    Args:
      weights: this rank's part of `padded` weights.
      x: [requests * query_tokens, width], the same on every rank.
      cache: of `config.cache`; donate it.
      lengths: [requests], int32, including the new tokens.
      index: layer of the cache; may be traced.
      counts: [requests], int32: real new tokens per request, all by default.
      prefill: gather the prefix instead of the queries; for many new tokens.
    """
    tokens = x.shape[0] // lengths.shape[0]
    first = lengths - (tokens if counts is None else counts)
    positions = (first[:, None] + jnp.arange(tokens)).reshape(-1)
    nope, turned, latent, key_rope = _project(weights, x, positions, config)
    q = jnp.concatenate([_einsum("thn,hln->thl", nope, weights["up_key"]), turned], axis=-1)
    attend = decode.prefill if prefill else decode.attention
    o, cache = attend(
        q, latent, key_rope, cache, lengths, exchange=exchange, layer=index, counts=counts, scale=config.scale
    )
    o = _einsum("thl,hlv->thv", o, weights["up_value"])
    x = x + lax.psum(_einsum("thv,hvw->tw", o, weights["output"]), exchange.axis_name)
    return x + lax.psum(_ffn(weights, x, config), exchange.axis_name), cache


def expanded(weights: Weights, x: Float[Array, "tokens width"], *, config: MLAConfig) -> Float[Array, "tokens width"]:
    """The same layer over one whole request, keys and values expanded per head, without a cache or ranks."""
    nope, turned, latent, key_rope = _project(weights, x, jnp.arange(x.shape[0]), config)
    k = _einsum("nl,hld->nhd", latent, weights["up_key"])
    v = _einsum("nl,hlv->nhv", latent, weights["up_value"])
    s = (_einsum("thd,nhd->htn", nope, k) + _einsum("thr,nr->htn", turned, key_rope)) * config.scale
    s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
    o = _einsum("htn,nhv->thv", jax.nn.softmax(s, axis=-1), v)
    x = x + _einsum("thv,hvw->tw", o, weights["output"])
    return x + _ffn(weights, x, config)


def _project(weights: Weights, x: Array, positions: Array, config: MLAConfig) -> tuple[Array, Array, Array, Array]:
    """(nope part of the queries, their rope part, latent, rope part of the key); queries of the heads in `weights`."""
    x = _norm(x, weights["attention_norm"], config)
    q = _einsum("tw,hwd->thd", x, weights["query"])
    row = _einsum("tw,wl->tl", x, weights["compress"])
    latent = _norm(row[:, : config.latent_dim], weights["latent_norm"], config)
    key_rope = rope(row[:, None, config.latent_dim :], positions, config.rope_base)[:, 0]
    turned = rope(q[..., config.nope_dim :], positions, config.rope_base)
    return q[..., : config.nope_dim], turned.astype(x.dtype), latent, key_rope.astype(x.dtype)


def _ffn(weights: Weights, x: Array, config: MLAConfig) -> Array:
    """W_down (silu(W_gate n) * W_up n), the part of the FFN columns in `weights`."""
    n = _norm(x, weights["ffn_norm"], config)
    gate, up = (_einsum("tw,wf->tf", n, weights[name]) for name in ("gate", "up"))
    return _einsum("tf,fw->tw", jax.nn.silu(gate) * up, weights["down"])


def _norm(x: Array, scale: Array, config: MLAConfig) -> Array:
    """RMS norm, in float32 or better."""
    return rms_norm(x.astype(accumulation_dtype(x.dtype)), scale, config.epsilon).astype(x.dtype)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """`contract`, rounded to the operands' dtype."""
    return contract(equation, a, b).astype(a.dtype)
