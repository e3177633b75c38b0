"""Caches of a stack of QSA layers: paged K/V, compressed index keys in the same pages, and a ring of pending raw keys.

Addressing. A page holds `page_size` tokens of one request, and a block never straddles pages (page_size is a multiple
of the ratio), so block n of a request lies beside its tokens: page page_table[request, n ratio / page_size], place n
mod (page_size / ratio). Sharing, moving or saving a page therefore moves its index keys too; there is no second
table. Offsets are never linearised by us: page, place and feature stay separate indices, each far below 2^31.

Ring. Raw index keys of a block that is still incomplete wait in slot `position mod ring`, with their logical and rope
positions. The ring is wider than a block, ratio - 1 + max_query_tokens slots, so that a decode call's tokens may all
be taken back (rejected drafts) and the block they touched is still whole: of a request of S tokens the ring holds the
last `ring`, and a prefix P >= S - max_query_tokens needs those from floor(P / ratio) ratio >= P - ratio + 1 on.
Compression reads the ring and never writes it, so repeating positions is harmless. Each slot says which position it
holds; a forward that needs another one counts a fault instead of using a wrong key silently.

Dumps. Page 0 and ring row 0 belong to nobody: whatever must not be written anywhere else is written there. Nothing
reads them. Table entry 0 means "no page".
"""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp.errors import CacheOverflowError, StaleCacheError, invalid
from jaxcp.layout import positive_int
from jaxcp.pages import checked_page_table, even_page_table
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.params import model_dtype
from jaxcp.storage import E4M3, page_dtype

_ARRAYS = ("k", "v", "index", "ring_keys", "ring_positions", "page_table", "faults")
_STATIC = ("dtype", "kv_dtype", "index_dtype", "max_query_tokens")


@bind(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Everything a stack of QSA layers remembers; made by `init_cache`.

    Attributes:
      k, v: [layers, pages, page_size, kv_heads, head_dim]: rotated keys, values. Storage of e4m3 is uint8, its bits.
      index: [layers, pages, page_size / ratio, index_dim]: compressed index keys, normed and rotated.
      ring_keys: [layers, 1 + requests, ring, index_dim]: raw index keys; request b in row b + 1.
      ring_positions: int32 [layers, 1 + requests, ring, 4]: (logical, temporal, height, width); logical -1 if unused.
      page_table: int32 [requests, pages_per_request]; 0 where a request has no page.
      faults: int32 [2]: rows dropped for want of room, blocks whose pending keys were not in the ring.
      dtype: static; the layer's dtype.
      kv_dtype, index_dtype: static; of stored K/V and index keys: `dtype` or float8_e4m3fn.
      max_query_tokens: static; most tokens per request in one decode call.
    """

    k: Any
    v: Any
    index: Any
    ring_keys: Any
    ring_positions: Any
    page_table: Any
    faults: Any
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    index_dtype: jnp.dtype
    max_query_tokens: int

    @property
    def layers(self) -> int:
        """QSA layers that share the page table."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    @property
    def blocks_per_page(self) -> int:
        """Compressed index keys per page."""
        return self.index.shape[2]

    @property
    def ring(self) -> int:
        """Raw index keys kept per request."""
        return self.ring_keys.shape[2]

    @property
    def requests(self) -> int:
        """Requests that can be held at once."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the page table can address."""
        return self.page_table.shape[1] * self.page_size

    def with_page_table(self, page_table: Any) -> "Cache":
        """The same cache with another table of pages: host integers [requests, pages_per_request], 0 for "no page"."""
        table = checked_page_table(page_table, self.k.shape[1], self.requests)
        return dataclasses.replace(self, page_table=jax.device_put(table))


def init_cache(
    config: QSAConfig,
    *,
    requests: int,
    pages: int,
    layers: int = 1,
    page_size: int = 64,
    page_table: Any = None,
    dtype="bfloat16",
    kv_dtype=None,
    index_dtype=None,
    max_query_tokens: int | None = None,
) -> Cache:
    """An empty cache.

    Args:
      config: geometry of the layers.
      requests: rows of the page table.
      pages: pages per layer, page 0 (the dump) included.
      layers: QSA layers.
      page_size: tokens per page, a multiple of the ratio.
      page_table: host integers [requests, pages_per_request]; 0 where there is no page. By default the pages are dealt
        out evenly, in order.
      dtype: the layer's: bfloat16, float32 or float64.
      kv_dtype, index_dtype: `dtype` (also if None) or float8_e4m3fn, stored without a scale.
      max_query_tokens: most tokens per request in one decode call, all of which may be taken back; the ratio if None.

    Raises:
      ValueError: counts that are not positive or do not fit together, or a table that names a page that is not there.
      TypeError: a dtype that cannot be stored.
    """
    layers, pages, requests = (
        positive_int("layers", layers),
        positive_int("pages", pages),
        positive_int("requests", requests),
    )
    if positive_int("page_size", page_size) % config.ratio:
        raise invalid(
            "page_size", page_size, f"a multiple of ratio = {config.ratio}", "A block must not straddle pages."
        )
    tokens = config.ratio if max_query_tokens is None else positive_int("max_query_tokens", max_query_tokens)
    dtype = model_dtype("dtype", dtype)
    kv_dtype, index_dtype = (_stored("kv_dtype", kv_dtype, dtype), _stored("index_dtype", index_dtype, dtype))
    if page_table is None:
        page_table = even_page_table(pages, requests)
    blocks, ring = page_size // config.ratio, config.ratio - 1 + tokens
    rows = (layers, pages, page_size, config.kv_heads, config.head_dim)
    return Cache(
        k=jnp.zeros(rows, page_dtype(kv_dtype)),
        v=jnp.zeros(rows, page_dtype(kv_dtype)),
        index=jnp.zeros((layers, pages, blocks, config.index_dim), page_dtype(index_dtype)),
        ring_keys=jnp.zeros((layers, 1 + requests, ring, config.index_dim), dtype),
        ring_positions=jnp.full((layers, 1 + requests, ring, 4), -1, jnp.int32),
        page_table=jax.device_put(checked_page_table(page_table, pages, requests)),
        faults=jnp.zeros(2, jnp.int32),
        dtype=dtype,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        max_query_tokens=tokens,
    )


def check(cache: Cache) -> None:
    """Raises if a forward met lengths, known only on the device, that the cache could not serve. Reads the device.

    Raises:
      CacheOverflowError: rows had no room and were dropped.
      StaleCacheError: a prefix ended inside a block whose pending keys the cache does not hold.
    """
    dropped, stale = (int(n) for n in np.asarray(cache.faults))
    if dropped:
        raise CacheOverflowError(
            f"cache: {dropped} rows beyond the pages of their request were dropped; expected lengths within "
            f"{cache.capacity} tokens and every page allocated. Allocate pages before the forward."
        )
    if stale:
        raise StaleCacheError(
            f"cache: {stale} blocks were compressed without the keys of their first tokens; expected prefix lengths "
            f"that end where the cache does, or at most max_query_tokens = {cache.max_query_tokens} before. "
            "Prefill those requests again."
        )


def check_cache(cache: Cache, config: QSAConfig) -> None:
    """Raises unless the cache was made for layers of this geometry; looks at shapes only."""
    want = (config.kv_heads, config.head_dim, config.index_dim, config.ratio)
    got = (*cache.k.shape[3:], cache.index.shape[3], cache.page_size // cache.blocks_per_page)
    if got != want:
        raise invalid(
            "cache",
            f"(kv_heads, head_dim, index_dim, ratio) = {got}",
            f"{want}, the layer's",
            "Make it with init_cache(config).",
        )


def _stored(name: str, dtype: Any, default: jnp.dtype) -> jnp.dtype:
    dtype = default if dtype is None else jnp.dtype(dtype)
    if dtype not in (default, E4M3):
        raise invalid(name, dtype, f"{default} (the layer's) or {E4M3}", "Other dtypes are not stored.", TypeError)
    return dtype
