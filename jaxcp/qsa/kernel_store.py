"""Norms, rotations and writes into the cache by the CUDA kernels of kernels/csrc/qsa (heads.h, store.h)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxcp.qsa import library
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.indexing import quotient, remainder, take
from jaxcp.qsa.kernel_attend import HEAD_DIMS, ROTARY_UNIT
from jaxcp.qsa.layer import Products, Projected
from jaxcp.qsa.params import Params
from jaxcp.qsa.rope import Table, table
from jaxcp.qsa.segments import Segments

PREPARE, STORE_KV, STORE_INDEX = "jaxcp_qsa_prepare", "jaxcp_qsa_store_kv", "jaxcp_qsa_store_index"
MOST_RATIO = 32


def blocker(config: QSAConfig, cache: Cache, platform: str) -> str | None:
    """Why the kernels cannot serve this cache, or None; host facts only."""
    if why := library.blocker(platform):
        return why
    if cache.dtype != jnp.bfloat16:
        return f"its dtype is bfloat16, not {cache.dtype}"
    for name in ("head_dim", "index_dim"):
        if getattr(config, name) not in HEAD_DIMS:
            return f"{name} = {getattr(config, name)} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if config.rotary_dim % ROTARY_UNIT:
        return f"rotary_dim = {config.rotary_dim} is not a multiple of {ROTARY_UNIT}"
    if config.ratio > MOST_RATIO:
        return f"ratio = {config.ratio} exceeds its {MOST_RATIO}"
    return None


def prepare(params: Params, of: Products, angles: Table) -> Projected:
    """Norms and rotations of the rows' products, as `layer.prepare`, in one kernel."""
    c, rows = params.config, len(of.k)
    shapes = (rows, 2, c.kv_heads, c.head_dim), (rows, c.index_heads, c.index_dim), (rows, c.index_dim)
    return Projected(*library.call(
        PREPARE, [jax.ShapeDtypeStruct(shape, of.k.dtype) for shape in shapes],
        of.k, of.v, of.index, params.k_norm, params.indexer.q_layernorm, *angles,
        attributes={"eps": np.float32(c.eps)},
    ))  # fmt: skip


def write_kv(
    cache: Cache,
    layer: Int[Array, ""],
    kv: Shaped[Array, "rows 2 kv_heads head_dim"],
    request: Int[Array, " rows"],
    position: Int[Array, " rows"],
) -> Cache:
    """The cache with K and V of these tokens, as `update.write_kv`; in place, nothing into the dump."""
    pools = cache.k, cache.v
    k, v = library.call(
        STORE_KV, _like(*pools),
        kv.reshape(len(kv), -1), request, position, cache.page_table, _number(layer), *pools,
        attributes={}, in_place={5: 0, 6: 1},
    )  # fmt: skip
    return dataclasses.replace(cache, k=k, v=v)


def write_index(
    params: Params,
    cache: Cache,
    layer: Int[Array, ""],
    index_k: Float[Array, "rows index_dim"],
    rope: Int[Array, "3 rows"],
    segments: Segments,
) -> Cache:
    """The cache with compressed keys and the newest raw ones, as `update.write_index`; in place, nothing into dumps."""
    config = params.config
    angles = (table(config, positions, jnp.float32) for positions in (rope, _pending(config, cache, layer, segments)))
    written = cache.index, cache.ring_keys, cache.ring_positions, cache.faults
    index, keys, positions, faults = library.call(
        STORE_INDEX, _like(*written),
        index_k, params.indexer.k_layernorm, *(a for pair in angles for a in pair), rope, jnp.stack(segments),
        cache.page_table, _number(layer), *written,
        attributes={"ratio": np.int64(config.ratio), "eps": np.float32(config.eps)},
        in_place={10: 0, 11: 1, 12: 2, 13: 3},
    )  # fmt: skip
    return dataclasses.replace(cache, index=index, ring_keys=keys, ring_positions=positions, faults=faults)


def _pending(config: QSAConfig, cache: Cache, layer: Int[Array, ""], segments: Segments) -> Int[Array, "3 segments"]:
    """Rope positions that the rings have for the first token of the block in which each request's prefix ends."""
    first = quotient(jnp.maximum(segments.prefix, 0), config.ratio) * config.ratio
    return take(cache.ring_positions, layer, segments.request + 1, remainder(first, cache.ring))[:, 1:].T


def _like(*arrays: Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def _number(layer) -> Int[Array, ""]:
    return jnp.asarray(layer, jnp.int32)
