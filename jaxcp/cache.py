"""A paged KV cache whose tokens are spread over the ranks of a mesh axis.

Every rank holds `pages` pages of `page_size` rows for each layer. The allocator hands out *widened* pages: widened page
g is page g of every rank, cp * page_size tokens in all, and `Interleave` says which rank stores which of them. One page
table therefore serves all ranks.

A rank writes the rows it owns. What it does not own, padding tokens, and rows for which a request has no page go to
page 0 of each rank, which is reserved for that and never read: a scatter of fixed shape, without a branch. Rows without
a page are also counted per request, so that lengths known only on the device cannot go wrong silently.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxcp.attention.api import usable_pages
from jaxcp.errors import CacheOverflowError, invalid
from jaxcp.layout import INT32_MAX, Interleave, positive_int
from jaxcp.pages import checked_page_table, even_page_table
from jaxcp.storage import cache_dtype, encode, page_dtype


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What one cached token is.

    Attributes:
      layers: attention layers that share the cache and its page table.
      kv_heads: KV heads, at least 1.
      key_dim, value_dim: widths of a key and a value row.
      latent: MLA: a value is the first `value_dim` columns of the one shared key row, and is not stored again.
      dtype: bfloat16, float16, float32 or float8_e4m3fn (unscaled, saturating at 448, kept as uint8); float64 for
        checks.
      page_size: rows of a page on one rank.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    dtype: Any = "bfloat16"
    page_size: int = 16

    def __post_init__(self):
        for name in ("layers", "kv_heads", "key_dim", "value_dim", "page_size"):
            positive_int(name, getattr(self, name))
        if self.latent and (self.kv_heads != 1 or self.value_dim > self.key_dim):
            raise invalid(
                "latent",
                f"kv_heads={self.kv_heads}, key_dim={self.key_dim}, value_dim={self.value_dim}",
                "kv_heads=1 and value_dim <= key_dim",
                "A latent cache stores one shared row per token.",
            )
        object.__setattr__(self, "dtype", cache_dtype(self.dtype))

    @classmethod
    def gqa(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: Any = "bfloat16", page_size: int = 16):
        """Grouped-query attention: `kv_heads` keys and values of `head_dim`."""
        return cls(layers, kv_heads, head_dim, head_dim, False, dtype, page_size)

    @classmethod
    def mla(
        cls, *, layers: int, latent_dim: int = 512, rope_dim: int = 64, dtype: Any = "bfloat16", page_size: int = 16
    ):
        """Absorbed MLA: one row [latent | rope] per token, whose first `latent_dim` columns are the value."""
        return cls(layers, 1, latent_dim + rope_dim, latent_dim, True, dtype, page_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.kv_heads * (self.key_dim + (0 if self.latent else self.value_dim)) * self.dtype.itemsize

    def bytes_per_rank(self, pages: int) -> int:
        """Bytes of `pages` pages of all layers on one rank, page 0 included."""
        return self.layers * pages * self.page_size * self.row_bytes


@bind(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "page_table", "dropped"],
    meta_fields=["config", "layout", "groups"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of one mesh axis; a pytree to donate, to carry through a scan over layers, and to pass to shard_map.

    Attributes:
      k: [layers, groups * cp * pages, page_size, kv_heads, key_dim], sharded on axis 1; in shard_map
        [layers, pages, ...].
      v: likewise with value_dim; None for a latent cache.
      page_table: [requests, pages_per_request], int32: ids of widened pages in token order, the same on all ranks of a
        group; 0 where a request has no page. Replace it (`dataclasses.replace`) when requests come and go.
      dropped: [requests], int32: cache rows that had no page, summed over layers; `check` raises when it is not 0.
      config, layout: static.
      groups: static; data-parallel groups, each with ranks, pages and requests of its own.
    """

    k: Any
    v: Any
    page_table: Any
    dropped: Any
    config: CacheConfig
    layout: Interleave
    groups: int = 1

    @property
    def requests(self) -> int:
        """Requests in a batch."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens for which a request's row of the page table has room."""
        return self.page_table.shape[1] * self.layout.widened(self.config.page_size)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of keys and values on one rank, page 0 included (of the global cache, outside shard_map)."""
        return self.config.bytes_per_rank(self.k.shape[1] // (self.layout.cp * self.groups))

    def partition_specs(self, axis_name: str | None, data_axes: Sequence[str] = ()) -> "Cache":
        """The same pytree with PartitionSpecs for leaves: rows over both kinds of axes, requests over `data_axes`."""
        # P() and not P(None): jax 0.11 takes them for different shardings, and would compile a second step.
        rows, requests = P(None, axis_name), P()
        if data_axes:
            rows, requests = P(None, (*data_axes, axis_name)), P(tuple(data_axes))
        return dataclasses.replace(
            self, k=rows, v=None if self.v is None else rows, page_table=requests, dropped=requests
        )


def init_cache(
    config: CacheConfig,
    layout: Interleave,
    *,
    pages: int,
    requests: int,
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    page_table: Any = None,
    data_axes: Sequence[str] = (),
) -> Cache:
    """A cache of zeros, made shard by shard on its devices.

    Args:
      config: what a token is.
      layout: who owns which token; its cp is the size of the mesh axis.
      pages: pages of one rank, the reserved page 0 included.
      requests: requests in a batch, over all data groups.
      mesh, axis_name: where the ranks are; both None for one device and cp = 1.
      page_table: [requests, pages_per_request], host integers, 0 for "no page"; by default the pages are dealt out
        evenly. `PagePool` makes tables for requests that come and go.
      data_axes: axes of the mesh over which requests are split; every coordinate has its own pages. Along axes that
        are named nowhere the cache is replicated.

    Raises:
      ValueError: cp other than the axis size, ids outside the pool, a pool beyond int32 slots, requests that the data
        groups cannot share.
    """
    positive_int("pages", pages)
    positive_int("requests", requests)
    widened = layout.widened(config.page_size)
    groups = _data_groups(layout, mesh, axis_name, data_axes)
    if requests % groups:
        raise invalid("requests", requests, f"a multiple of {groups}, the data groups", "Pad the batch.")
    if pages < 2 or pages * widened > INT32_MAX:
        raise invalid(
            "pages",
            pages,
            f"2 <= pages <= {INT32_MAX // widened}",
            "Page 0 is reserved, and token slots of the whole pool are int32.",
        )
    if page_table is None:
        table = np.tile(even_page_table(pages, requests // groups), (groups, 1))
    else:
        table = checked_page_table(page_table, pages, requests)
    dtype = page_dtype(config.dtype)
    shape = (config.layers, groups * layout.cp * pages, config.page_size, config.kv_heads)

    def zeros():
        k = jnp.zeros((*shape, config.key_dim), dtype)
        v = None if config.latent else jnp.zeros((*shape, config.value_dim), dtype)
        return Cache(k, v, jnp.asarray(table), jnp.zeros(requests, jnp.int32), config, layout, groups)

    if mesh is None:
        return jax.jit(zeros)()
    specs = jax.eval_shape(zeros).partition_specs(axis_name, data_axes)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))()


def checked(cache: Any) -> Cache:
    """`cache`, or the error that names the leaf whose shape or dtype does not fit the config."""
    if not isinstance(cache, Cache):
        raise invalid("cache", type(cache).__name__, "a Cache", "Make one with decode.init_cache.", TypeError)
    config, pages = cache.config, f"[layers={cache.config.layers}, pages, page_size={cache.config.page_size}, "
    widths = {"k": config.key_dim} | ({} if config.latent else {"v": config.value_dim})
    for name, dim in widths.items():
        leaf, row = getattr(cache, name), (config.page_size, config.kv_heads, dim)
        if leaf.ndim != 5 or leaf.shape[0] != config.layers or leaf.shape[2:] != row:
            raise invalid(
                f"cache.{name}.shape",
                leaf.shape,
                f"{pages}kv_heads={config.kv_heads}, dim={dim}]",
                "Make the cache with decode.init_cache.",
            )
        if leaf.dtype != page_dtype(config.dtype):
            raise invalid(
                f"cache.{name}.dtype",
                leaf.dtype,
                str(page_dtype(config.dtype)),
                "The config's dtype decides; float8_e4m3fn is kept as uint8.",
                TypeError,
            )
    table = cache.page_table
    if table.ndim != 2 or table.dtype != jnp.int32 or cache.dropped.shape != table.shape[:1]:
        raise invalid(
            "cache.page_table",
            f"{table.dtype}{list(table.shape)}",
            f"int32[{cache.dropped.shape[0]}, pages_per_request]",
            "One row of page ids per request.",
        )
    return cache


def write(
    cache: Cache,
    layer: Array,
    k: Float[Array, "requests query_tokens kv_heads key_dim"],
    v: Float[Array, "requests query_tokens kv_heads value_dim"] | None,
    first: Int[Array, "requests"],
    counts: Int[Array, "requests"],
    rank: Array,
) -> Cache:
    """Stores the rows that `rank` owns of tokens first ... first + counts - 1 of each request; in place if donated.

    Args:
      layer: int32 scalar.
      k, v: rows of the new tokens, the same on every rank; those from `counts` on are padding.
      first: position of the first new token of each request; anything outside the request's pages is dropped.
      rank: along the context-parallel axis.
    """
    config, layout = cache.config, cache.layout
    position = first[:, None] + jnp.arange(k.shape[1])
    real = jnp.arange(k.shape[1]) < counts[:, None]
    slots, stored = _slots(cache, position)
    row = layout.write_rows(jnp.where(real & stored, slots, 0), rank)
    index = (layer, row // config.page_size, row % config.page_size)

    def put(pages, rows):
        # Without the barrier XLA:CPU fuses the scatter into a reader of the pages, and then copies the whole cache.
        rows = encode(rows, config.dtype)
        return lax.optimization_barrier(pages.at[index].set(rows, mode="drop", wrap_negative_indices=False))

    dropped = cache.dropped + jnp.sum(real & ~stored, axis=1, dtype=jnp.int32)
    return dataclasses.replace(cache, k=put(cache.k, k), v=None if v is None else put(cache.v, v), dropped=dropped)


def check(cache: Cache) -> None:
    """Raises if rows were dropped since the cache was made; reads the device, so call it between steps.

    A process looks at the requests that its own devices hold; only data groups can live elsewhere.

    Raises:
      CacheOverflowError: a length known only on the device lay outside the pages of its request.
    """
    dropped = np.zeros(cache.requests, np.int32)
    for shard in cache.dropped.addressable_shards:
        dropped[shard.index] = np.asarray(shard.data)
    if dropped.any():
        worst = int(np.argmax(dropped))
        raise CacheOverflowError(
            f"cache: request {worst} lost {dropped[worst]} rows, counted over layers ({np.count_nonzero(dropped)} of "
            f"{dropped.size} requests lost some); expected every position inside the request's pages, at most "
            f"{cache.capacity} tokens. The rows were dropped and nothing else was overwritten: allocate more pages."
        )


def room(cache: Cache) -> Int[Array, "requests"]:
    """Tokens for which each request has pages, up to the first gap in its row of the page table."""
    return usable_pages(cache.page_table, cache.k.shape[1])[1] * cache.layout.widened(cache.config.page_size)


def _slots(cache: Cache, position: Int[Array, "requests query_tokens"]) -> tuple[Array, Array]:
    """(virtual slot of each position, whether the request has a page for it); any slot where it has none."""
    table, _ = usable_pages(cache.page_table, cache.k.shape[1])
    stored = (position >= 0) & (position < room(cache)[:, None])
    slots = jax.vmap(lambda ids, p: cache.layout.slots(ids, p, cache.config.page_size))(
        table, jnp.where(stored, position, 0)
    )
    return slots, stored


def _data_groups(layout: Interleave, mesh: Mesh | None, axis_name: str | None, data_axes: Sequence[str]) -> int:
    """Number of data groups, once the axes are known to exist and to fit the layout."""
    if (mesh is None) != (axis_name is None):
        raise invalid("mesh, axis_name", (mesh, axis_name), "both or neither", "One device needs no mesh.", TypeError)
    sizes = {} if mesh is None else dict(mesh.shape)
    for name, axis in (("axis_name", axis_name), *(("data_axes", axis) for axis in data_axes)):
        if axis is not None and axis not in sizes:
            raise invalid(name, repr(axis), f"an axis of the mesh: {tuple(sizes)}", "Name the axes to split over.")
    size = sizes.get(axis_name, 1)
    if layout.cp != size:
        raise invalid(
            "layout.cp", layout.cp, f"{size}, the size of axis {axis_name!r}", "Every rank of the axis owns a share."
        )
    return math.prod(sizes[axis] for axis in data_axes)
