"""A llama-style decoder as plain functions over a pytree of weights, tensor-parallel over the context-parallel axis.

One mesh axis serves both: rank r keeps the weights of its query heads and the KV rows of its tokens.

    x = embedding[token]
    x = x + W_o attention(rope(W_q n), rope(W_k n), W_v n)      n = rms_norm(x)      for each layer
    x = x + W_down (silu(W_gate n) * W_up n)                    n = rms_norm(x)
    logits = embedding rms_norm(x)

Query heads, FFN and vocabulary are split over the axis and padded with zeros where they do not divide; key and value
projections are the same on every rank, because each rank needs every new token's row to store its own. So a layer costs
two all-reduces besides what attention moves. Attention itself is an argument: the decoder knows nothing of caches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

Weights = dict[str, Any]
"""{"embedding", "norm", "blocks": {name: [layers, ...]}} of float32 matrices [outputs, inputs]."""

Attend = Callable[[Array, Array, Array, Any, Array], tuple[Array, Any]]
"""(q [tokens, heads_per_rank, head_dim], k and v [tokens, kv_heads, head_dim], cache, layer) -> (o as q, cache)."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Geometry of a llama-style decoder; sizes in elements, context in tokens."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    rope_base: float
    epsilon: float

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


# Axis of each weight that is split over the ranks; the others are the same everywhere.
_SPLIT = {"embedding": 0, "query": 1, "output": 2, "gate": 1, "up": 1, "down": 2}


def partition_specs(weights: Weights, axis_name: str) -> Weights:
    """The pytree of `PartitionSpec` that belongs to `weights`, for shard_map."""

    def spec(path, _):
        split = _SPLIT.get(path[-1].key)
        return P() if split is None else P(*[None] * split, axis_name)

    return jax.tree_util.tree_map_with_path(spec, weights)


def place(weights: Weights, config: LlamaConfig, mesh: Mesh, axis_name: str) -> Weights:
    """Host weights onto the devices of `mesh`; each process copies only its own devices' parts.

    Heads are padded as a whole, so that rank r holds heads r*h ... r*h + h - 1 with h = ceil(heads / cp).
    """
    cp = mesh.shape[axis_name]
    unit = {"query": config.head_dim, "output": config.head_dim}

    def put(path, weight: np.ndarray, spec: P) -> Array:
        name, shape = path[-1].key, list(weight.shape)
        if name in _SPLIT:
            step = cp * unit.get(name, 1)
            shape[_SPLIT[name]] = -(-shape[_SPLIT[name]] // step) * step
        return jax.make_array_from_callback(
            tuple(shape), NamedSharding(mesh, spec), lambda index: _padded(weight, index, shape)
        )

    return jax.tree_util.tree_map_with_path(put, weights, partition_specs(weights, axis_name))


def _padded(weight: np.ndarray, index: Any, shape: list[int]) -> np.ndarray:
    """weight[index] of `weight` extended by zeros to `shape`."""
    part = weight[index]
    wanted = [len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True)]
    return np.pad(part, [(0, size - got) for size, got in zip(wanted, part.shape, strict=True)])


def rms_norm(
    x: Float[Array, "tokens width"], scale: Float[Array, " width"], epsilon: float
) -> Float[Array, "tokens width"]:
    """x / sqrt(mean(x^2) + epsilon) * scale."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rope(
    x: Float[Array, "tokens heads dim"], positions: Int[Array, " tokens"], base: float
) -> Float[Array, "tokens heads dim"]:
    """Rotary position embedding of adjacent pairs, the order in which GGUF stores a llama's q and k.

    (x[2i], x[2i+1]) turned by the angle position * base^(-2i / dim)
    """
    dim = x.shape[-1]
    frequency = (base ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
    angle = positions[:, None, None] * frequency
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def embed(
    embedding: Float[Array, "rows width"], tokens: Int[Array, " tokens"], axis_name: str
) -> Float[Array, "tokens width"]:
    """Rows of a vocabulary split over the axis: the owner's row, summed with everybody else's zeros."""
    local = tokens - lax.axis_index(axis_name) * embedding.shape[0]
    mine = (local >= 0) & (local < embedding.shape[0])
    rows = embedding[jnp.where(mine, local, 0)]
    return lax.psum(jnp.where(mine[:, None], rows, 0), axis_name)


def hidden(
    weights: Weights,
    tokens: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    cache: Any,
    attend: Attend,
    config: LlamaConfig,
    axis_name: str,
) -> tuple[Float[Array, "tokens width"], Any]:
    """Last hidden states of `tokens`, before the final norm. Runs inside shard_map.

    One scan over the layers: unrolled, 30 layers compile for 20 s and run at half the speed on CPU.

    Args:
      weights: this rank's part.
      tokens: [tokens] ids.
      positions: [tokens] of each token in its request, from 0.
      cache: carried through `attend`.
      attend: attention over this rank's heads, given the layer's index.
    """

    def heads(y, matrix):
        return linear(y, matrix).reshape(len(tokens), -1, config.head_dim)

    def block(carry, layer):
        x, cache = carry
        index, w = layer
        y = rms_norm(x, w["attention_norm"], config.epsilon)
        q = rope(heads(y, w["query"]), positions, config.rope_base)
        k = rope(heads(y, w["key"]), positions, config.rope_base)
        o, cache = attend(q, k, heads(y, w["value"]), cache, index)
        x = x + lax.psum(linear(o.reshape(len(tokens), -1), w["output"]), axis_name)
        y = rms_norm(x, w["ffn_norm"], config.epsilon)
        y = jax.nn.silu(linear(y, w["gate"])) * linear(y, w["up"])
        return (x + lax.psum(linear(y, w["down"]), axis_name), cache), None

    x = embed(weights["embedding"], tokens, axis_name)
    (x, cache), _ = lax.scan(block, (x, cache), (jnp.arange(config.layers), weights["blocks"]))
    return x, cache


def linear(x: Float[Array, "tokens inputs"], matrix: Float[Array, "outputs inputs"]) -> Float[Array, "tokens outputs"]:
    """x @ matrix.T."""
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


def greedy(
    weights: Weights, x: Float[Array, "tokens width"], config: LlamaConfig, axis_name: str
) -> tuple[Int[Array, " tokens"], Float[Array, " tokens"]]:
    """The best next token of each row, and by how much its logit leads the second best. Runs inside shard_map.

    The vocabulary stays split: a rank offers its best two logits, and the ranks' offers are compared. Of equal logits
    the smallest id wins, as in argmax over the whole vocabulary.
    """
    logits = linear(rms_norm(x, weights["norm"], config.epsilon), weights["embedding"])
    first_id = lax.axis_index(axis_name) * logits.shape[1]
    ids = first_id + jnp.arange(logits.shape[1])
    logits = jnp.where(ids < config.vocabulary, logits, -jnp.inf)
    local = jnp.argmax(logits, axis=1)
    best = jnp.max(logits, axis=1)
    second = jnp.max(jnp.where(jnp.arange(logits.shape[1]) == local[:, None], -jnp.inf, logits), axis=1)
    offers = lax.all_gather(jnp.stack([best, second]), axis_name)  # [cp, 2, tokens]
    names = lax.all_gather(first_id + local, axis_name)  # [cp, tokens]
    winner = jnp.argmax(offers[:, 0], axis=0)
    top = lax.top_k(offers.reshape(-1, len(x)).T, 2)[0]
    return jnp.take_along_axis(names, winner[None], axis=0)[0], top[:, 0] - top[:, 1]
