"""The stored prefix of every request, gathered over the ranks into token order, a chunk at a time.

A chunk starts and ends on a widened page, where the owners' cycle starts anew: every rank contributes the same number
of rows, the gather has equal sizes for ragged requests without moving padding by hand, and token order is a transpose:

    [cp, requests, granules, I, ...]  ->  [requests, granules, cp, I, ...]        I = granularity

Rows at or beyond a request's length are whatever the pages hold; the caller's bounds keep them out.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxcp.attention.api import usable_pages
from jaxcp.attention.paged import read_pages
from jaxcp.cache import Cache, CacheConfig
from jaxcp.exchange import Exchange
from jaxcp.layout import Interleave
from jaxcp.storage import decode


def pages_per_chunk(cache: Cache, chunk: int) -> int:
    """Widened pages that hold `chunk` tokens, at most those of a request."""
    return min(-(-chunk // cache.layout.widened(cache.config.page_size)), cache.page_table.shape[1])


def gather_chunk(
    cache: Cache, layer: Array, first_page: Array, pages: int, axis_name: str
) -> tuple[Float[Array, "requests keys kv_heads key_dim"], Float[Array, "requests keys kv_heads value_dim"] | None]:
    """Keys and values of `pages` widened pages of every request, in token order, on every rank; in shard_map.

    Args:
      layer: int32 scalar.
      first_page: index into each request's row of the page table.
      pages: pages to gather; what lies beyond the table is garbage.

    Returns:
      (keys, values) of tokens [first_page, first_page + pages) * width; values are None for a latent cache.
    """
    table, _ = usable_pages(cache.page_table, cache.k.shape[1])
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    ids = lax.dynamic_slice_in_dim(table, first_page, pages, axis=1)

    def gather(rows):
        return decode(in_token_order(read_pages(rows, layer, ids), cache.layout, axis_name))

    return gather(cache.k), None if cache.v is None else gather(cache.v)


def in_token_order(
    rows: Shaped[Array, "requests own kv_heads dim"], layout: Interleave, axis_name: str
) -> Shaped[Array, "requests keys kv_heads dim"]:
    """Every rank's stored rows of whole cycles, all-gathered and put in token order."""
    if layout.cp == 1:
        return rows
    requests, own, kv_heads, dim = rows.shape
    ranks = lax.all_gather(rows, axis_name).reshape(layout.cp, requests, -1, layout.granularity, kv_heads, dim)
    return ranks.transpose(1, 2, 0, 3, 4, 5).reshape(requests, own * layout.cp, kv_heads, dim)


@dataclasses.dataclass(frozen=True)
class OwnHeads:
    """The query heads that a rank keeps, in runs that share a KV head.

    Rank r keeps heads [r h, (r + 1) h). With g query heads per KV head, runs of gcd(g, h) heads never cross a KV head's
    border on any rank, so the split is static although r is traced; only which KV head a run uses depends on r.

    Attributes:
      kv: [groups], KV head of each run.
      real: [heads_per_rank], whether the row has a head.
    """

    kv: Int[Array, "groups"]
    real: Bool[Array, "heads_per_rank"]

    @classmethod
    def of(cls, exchange: Exchange, kv_heads: int, rank: Array) -> "OwnHeads":
        """For this rank of `exchange`."""
        own, shared = exchange.heads_per_rank, exchange.heads // kv_heads
        run = own if kv_heads == 1 else math.gcd(own, shared)
        first = rank * own + jnp.arange(0, own, run)
        return cls(jnp.minimum(first // shared, kv_heads - 1), rank * own + jnp.arange(own) < exchange.heads)

    @property
    def groups(self) -> int:
        """Number of runs."""
        return self.kv.shape[0]

    def keys_and_values(self, k: Array, v: Array | None, config: CacheConfig) -> tuple[Array, Array]:
        """Keys and values [requests, keys, groups, dim] of the runs, from those of all KV heads."""
        v = k[..., : config.value_dim] if v is None else v
        return (k, v) if config.kv_heads == 1 else (jnp.take(k, self.kv, axis=2), jnp.take(v, self.kv, axis=2))
