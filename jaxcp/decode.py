"""Decode context parallelism: attention of new tokens over a cache that is spread over the ranks of a mesh axis.

Both functions run inside `jax.shard_map` over the axis, take the query heads that this rank keeps, and return the
attention output of the same heads: they stand exactly where attention stands in a tensor-parallel layer.

`attention` (few query tokens): gather everybody's queries, attend with all heads over own keys, exchange partials.
`prefill` (many query tokens): gather everybody's keys, chunk by chunk in token order, attend with own heads.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp import cache as _cache
from jaxcp import lse, storage
from jaxcp.attention import attention as partial_attention
from jaxcp.attention.checks import layer_index, query_tokens, request_ints
from jaxcp.attention.online import attend_rows, group_heads, merge_steps, ungroup_heads
from jaxcp.cache import Cache as Cache
from jaxcp.cache import CacheConfig as CacheConfig
from jaxcp.cache import check as check
from jaxcp.cache import init_cache as init_cache
from jaxcp.errors import invalid
from jaxcp.exchange import Exchange
from jaxcp.layout import Ints, positive_int
from jaxcp.lse import LogBase
from jaxcp.pages import PagePool as PagePool
from jaxcp.prefix import OwnHeads, gather_chunk, pages_per_chunk
from jaxcp.storage import QUERY_DTYPES


def attention(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    lengths: Ints,
    *,
    exchange: Exchange,
    layer: Any = 0,
    counts: Ints | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> tuple[Array, Cache]:
    """Stores the new tokens and attends with them over everything their request has stored; in shard_map.

        out[t, j] = sum_n softmax_n(scale q[t, j] . k_n) v_n        over positions n up to the token's own

    Args:
      q: [tokens, heads_per_rank, key_dim]: this rank's heads, head j of the group being row j mod h of rank j div h;
        rows without a head are ignored. tokens = requests * query_tokens, request by request.
      k: [tokens, kv_heads, key_dim], the same on every rank; MLA: latent [tokens, latent_dim].
      v: [tokens, kv_heads, value_dim], likewise; MLA: rope [tokens, rope_dim].
      cache: donate it, or carry it through a scan over layers: rows are written in place.
      lengths: [requests], int32, tokens per request *including* the real new ones. Host integers are checked; lengths
        on the device that lie outside the cache lose their rows, see `check`.
      exchange: merges the partials; its axis is the cache's, its heads are the group's.
      layer: which layer of the cache; may be traced.
      counts: [requests], int32: how many of the query tokens are real, all by default. Padding rows come after them,
        are not stored, and give 0.
      scale: factor of the logits; key_dim ** -0.5 by default, required for a latent cache (where it is not known).
      implementation: of the attention over own keys, see `jaxcp.attention`.

    Returns:
      [tokens, heads_per_rank, value_dim] in the dtype of `q`, and the cache. A row without a head is 0.

    Raises:
      TypeError, ValueError: shapes, dtypes or host values that do not fit the cache or the exchange.
      BackendError: `implementation` names one that cannot serve the call.
    """
    step = _Step.of(q, k, v, cache, lengths, exchange, layer, counts, scale)
    cache = step.store(cache)
    partial = partial_attention(
        gather_queries(q, exchange),
        cache.k,
        cache.v,
        cache.page_table,
        step.lengths,
        layer=step.layer,
        layout=cache.layout,
        rank=step.rank,
        scale=step.scale,
        base=LogBase.E,
        counts=step.counts,
        value_dim=cache.config.value_dim,
        implementation=implementation,
    )
    out: Any = exchange(partial)
    return out, cache


def prefill(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    lengths: Ints,
    *,
    exchange: Exchange,
    layer: Any = 0,
    counts: Ints | None = None,
    scale: float | None = None,
    chunk: int = 1024,
) -> tuple[Array, Cache]:
    """`attention` for many new tokens: gathers the prefix's keys instead of the queries; in shard_map.

    The prefix (what was stored before) is all-gathered into token order, `chunk` tokens of every request at a time; the
    new tokens' keys are on every rank already. Memory is bounded by the chunk, whatever the length of the prefix.

    Args:
      chunk: tokens of the prefix gathered at a time, rounded up to whole widened pages (cp * page_size tokens). The
        other arguments are those of `attention`.

    Returns:
      As `attention`. New tokens are attended to as the cache stores them, so cutting a prompt differently changes
      nothing beyond the order of sums.
    """
    step = _Step.of(q, k, v, cache, lengths, exchange, layer, counts, scale)
    pages = pages_per_chunk(cache, positive_int("chunk", chunk))
    if not q.shape[0]:
        return jnp.zeros((*q.shape[:2], cache.config.value_dim), q.dtype), cache
    width = pages * cache.layout.widened(cache.config.page_size)
    cache = step.store(cache)
    heads = OwnHeads.of(exchange, cache.config.kv_heads, step.rank)
    rows = group_heads(q, cache.requests, heads.groups)
    attend = functools.partial(attend_rows, scale=step.scale, base=LogBase.E)
    stored, new = step.bounds(cache, rows.shape[2] // max(step.query_tokens, 1))

    def prefix(i, merged):
        k, v = gather_chunk(cache, step.layer, i * pages, pages, exchange.axis_name)
        return attend(merged, rows, *heads.keys_and_values(k, v, cache.config), stored - i * width)

    empty = lse.neutral((*rows.shape[:3], cache.config.value_dim), lse.accumulation_dtype(q.dtype), LogBase.E)
    merged = merge_steps(empty, prefix, -(-jnp.max(stored, initial=0) // width))
    merged = attend(merged, rows, *heads.keys_and_values(*step.as_cached(cache), cache.config), new)
    out = ungroup_heads(merged, step.query_tokens, q.dtype).o
    return jnp.where(heads.real[:, None], out, 0), cache


def gather_queries(q: Float[Array, "tokens own_heads dim"], exchange: Exchange) -> Float[Array, "tokens heads dim"]:
    """Queries of all heads of the group, on every rank; in shard_map. Ranks concatenate head-major."""
    if exchange.cp > 1:
        q = lax.all_gather(q.swapaxes(0, 1), exchange.axis_name, tiled=True).swapaxes(0, 1)
    return q[:, : exchange.heads]


@dataclasses.dataclass(frozen=True)
class _Step:
    """The checked arguments of one call."""

    k: Array
    v: Array | None
    lengths: Array
    counts: Array
    layer: Array
    rank: Array
    scale: float

    @classmethod
    def of(cls, q, k, v, cache, lengths, exchange, layer, counts, scale) -> "_Step":
        config = _cache.checked(cache).config
        _check_exchange(cache, exchange)
        per_request = _check_queries(q, cache, exchange)
        k, v = _rows(k, v, q, config)
        lengths = request_ints("lengths", lengths, cache.requests, cache.capacity)
        if counts is None:
            counts = jnp.full(cache.requests, per_request, jnp.int32)
        counts = jnp.clip(request_ints("counts", counts, cache.requests, per_request), 0, per_request)
        if scale is None and config.latent:
            raise invalid(
                "scale",
                None,
                "a number",
                "An absorbed key is wider than the head it stands for; MLA scales "
                "by (qk_nope_dim + qk_rope_dim) ** -0.5.",
                TypeError,
            )
        scale = config.key_dim**-0.5 if scale is None else float(scale)
        split = (cache.requests, per_request)
        k, v = k.reshape(*split, *k.shape[1:]), None if v is None else v.reshape(*split, *v.shape[1:])
        return cls(k, v, lengths, counts, layer_index(layer, config.layers), lax.axis_index(exchange.axis_name), scale)

    @property
    def query_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def first(self) -> Array:
        """Position of each request's first new token: int32 [requests]."""
        return self.lengths - self.counts

    def store(self, cache: Cache) -> Cache:
        """The cache with the new tokens' rows."""
        return _cache.write(cache, self.layer, self.k, self.v, self.first, self.counts, self.rank)

    def as_cached(self, cache: Cache) -> tuple[Array, Array | None]:
        """The new tokens' rows as a later step will read them."""

        def cached(x):
            return storage.as_stored(x, cache.config.dtype)

        return cached(self.k), None if self.v is None else cached(self.v)

    def bounds(self, cache: Cache, per_token: int) -> tuple[Array, Array]:
        """Stored keys and new keys that each row sees, int32 [requests, query_tokens * per_token]; 0 for padding."""
        t = jnp.arange(self.query_tokens)
        real = t < self.counts[:, None]
        stored = jnp.clip(self.first, 0, _cache.room(cache))[:, None]
        stored, new = (jnp.repeat(jnp.where(real, bound, 0), per_token, axis=1) for bound in (stored, t + 1))
        return stored, new


def _rows(k: Any, v: Any, q: Array, config: CacheConfig) -> tuple[Array, Array | None]:
    """Rows to store: (k, v), or ([latent | rope], None)."""
    tokens = q.shape[0]
    if config.latent:
        shapes = {"latent": (tokens, config.value_dim), "rope": (tokens, config.key_dim - config.value_dim)}
    else:
        shapes = {"k": (tokens, config.kv_heads, config.key_dim), "v": (tokens, config.kv_heads, config.value_dim)}
    for (name, shape), x in zip(shapes.items(), (k, v), strict=True):
        if getattr(x, "shape", None) != shape:
            raise invalid(
                f"{name}.shape",
                getattr(x, "shape", type(x).__name__),
                str(shape),
                "One row per query token, as the cache's config says, the same on every rank.",
            )
        if x.dtype != q.dtype:
            raise invalid(f"{name}.dtype", x.dtype, f"{q.dtype}, the dtype of q", "Cast it.", TypeError)
    return (jnp.concatenate([k, v], axis=-1)[:, None], None) if config.latent else (k, v)


def _check_queries(q: Any, cache: Cache, exchange: Exchange) -> int:
    """Query tokens per request."""
    expected = f"[tokens, heads_per_rank={exchange.heads_per_rank}, key_dim={cache.config.key_dim}]"
    if getattr(q, "ndim", None) != 3 or q.shape[1:] != (exchange.heads_per_rank, cache.config.key_dim):
        raise invalid(
            "q.shape", getattr(q, "shape", type(q).__name__), expected, "Give the heads that this rank keeps."
        )
    if q.dtype.name not in QUERY_DTYPES:
        raise invalid("q.dtype", q.dtype, " or ".join(QUERY_DTYPES), "Cast it.", TypeError)
    return query_tokens(q.shape[0], cache.requests)


def _check_exchange(cache: Cache, exchange: Exchange) -> None:
    if cache.layout.cp != exchange.cp:
        raise invalid(
            "cache.layout.cp",
            cache.layout.cp,
            f"{exchange.cp}, the ranks of the exchange",
            "Build both for the same mesh axis.",
        )
    if exchange.heads % cache.config.kv_heads:
        raise invalid(
            "exchange.heads",
            exchange.heads,
            f"a multiple of kv_heads = {cache.config.kv_heads}",
            "Every KV head serves as many query heads.",
        )
    try:
        size = lax.axis_size(exchange.axis_name)
    except NameError:
        size = None
    if size != exchange.cp:
        got = "a call outside it" if size is None else f"an axis of {size} ranks"
        raise invalid(
            f"axis {exchange.axis_name!r}",
            got,
            f"a call inside jax.shard_map over {exchange.cp} ranks",
            "Wrap the step in jax.shard_map over the exchange's mesh.",
        )
