"""A case on one device, layer by layer: what a rank's share is held against, and what its peers would send it."""

import dataclasses
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from jaxcp import qsa
from jaxcp.bench import fill
from jaxcp.bench.prefill.cases import PAGE_SIZE, Case
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.layer import prepare, products
from jaxcp.qsa.parallel import packed_kv
from jaxcp.qsa.rope import table
from jaxcp.qsa.segments import rows_of


@dataclasses.dataclass(frozen=True)
class Whole:
    """A case's arrays, on the device.

    Attributes:
      case: what they are of.
      params: random weights, stacked.
      cache: holds the prefixes only, in all layers.
      x: [tokens, hidden], into the first layer.
      y: [tokens, hidden], of the first layer.
      blocks: int32 [tokens, k], selected in the first layer.
      index, kv: [layers, tokens, features], raw index keys, and K and V as stored, of all tokens in packed order.
    """

    case: Case
    params: qsa.Params
    cache: qsa.Cache
    x: Float[Array, "tokens hidden"]
    y: Float[Array, "tokens hidden"]
    blocks: Int32[Array, "tokens k"]
    index: Float[Array, "layers tokens index_dim"]
    kv: Shaped[Array, "layers tokens features"]

    @property
    def config(self) -> qsa.QSAConfig:
        """Geometry."""
        return self.params.config

    @property
    def layers(self) -> int:
        """Of the stack."""
        return self.cache.layers


def make_whole(case: Case, config: qsa.QSAConfig, layers: int, dtype: str = "bfloat16", seed: int = 0) -> Whole:
    """Random weights and tokens through the layers on one device, with residual connections. Pages in random order."""
    weights, prefix, tokens = jax.random.split(jax.random.key(seed), 3)
    params = jax.jit(jax.vmap(lambda key: qsa.init_params(config, key, dtype)))(jax.random.split(weights, layers))
    before = _filled(case, params, _empty(case, config, layers, dtype, seed), prefix)
    x = jax.random.normal(tokens, (case.tokens, config.hidden), dtype)
    cache, plan, rows, made = jax.tree.map(jnp.copy, before), case.plan(before, 1), x, []
    for layer in range(layers):
        rows, cache, of = _layer(params, plan.pad(rows), cache, plan, jax.device_put(np.int32(layer)))
        rows = rows[: case.tokens]
        made.append(of if layer == 0 else of[2:])
    y, blocks, *_ = made[0]
    index, kv = (jnp.stack([of[-which] for of in made])[:, : case.tokens] for which in (2, 1))
    qsa.check(cache)
    return Whole(case, params, before, x, y[: case.tokens], blocks[: case.tokens], index, kv)


def _empty(case: Case, config: qsa.QSAConfig, layers: int, dtype: str, seed: int) -> qsa.Cache:
    requests, pages = len(case.lengths), -(-case.longest // PAGE_SIZE)
    order = 1 + np.random.default_rng(seed).permutation(requests * pages).reshape(requests, pages)
    pool = {"pages": 1 + order.size, "page_size": PAGE_SIZE, "page_table": order}
    return qsa.init_cache(config, requests=requests, layers=layers, dtype=dtype, **pool)


def _filled(case: Case, params: qsa.Params, cache: qsa.Cache, key: jax.Array) -> qsa.Cache:
    """The cache with random prefixes."""
    for layer in range(cache.layers):
        of_layer, at = jax.tree.map(lambda a, i=layer: a[i], params), jax.device_put(np.int32(layer))
        for request, tokens in enumerate(case.prefix):
            part = jax.random.fold_in(jax.random.fold_in(key, layer), request)
            cache = fill.request(of_layer, cache, part, at, request=request, tokens=tokens)
    return cache


@bind(jax.jit, donate_argnames="cache")
def _layer(params, x, cache, plan, layer):
    """The next layer's input, the cache, and (y, selection, index keys, K|V) of a layer."""
    params = jax.tree.map(lambda a: a[layer], params)
    result = qsa.prefill(params, x, cache, plan, layer=layer, return_selection=True)
    y, cache, blocks = result  # pyright: ignore[reportAssignmentType]
    position = rows_of(plan.segments, len(x)).position
    rope = jnp.broadcast_to(jnp.maximum(position, 0), (3, len(x)))
    projected = prepare(params, products(params, x), table(params.config, rope, accumulation_dtype(x.dtype)))
    return x + y, cache, (y, blocks, projected.index_k, packed_kv(cache, projected))
