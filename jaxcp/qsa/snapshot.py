"""A request's state, taken out of a cache and put back elsewhere: host tiers, disks, forks, other rows.

K/V without their index keys and pending ring give right keys and a stale selection, so all parts move together.
"""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp.errors import invalid
from jaxcp.qsa.cache import Cache

_POOLS = ("k", "v", "index")
_RINGS = ("ring_keys", "ring_positions")


@bind(jax.tree_util.register_dataclass, data_fields=[*_POOLS, *_RINGS], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a cache holds of one request; a pytree, so `jax.device_get` brings it to the host.

    Attributes:
      k, v, index: the request's pages, [layers, pages, ...] as in `Cache`.
      ring_keys, ring_positions: its ring, [layers, ring, ...].
    """

    k: Any
    v: Any
    index: Any
    ring_keys: Any
    ring_positions: Any


def save(cache: Cache, request: int, length: int) -> Snapshot:
    """State of `request`, of which the cache holds `length` tokens.

    Raises:
      ValueError: no such request, or fewer pages than its length needs.
    """
    pages = _pages(cache, request, -(-length // cache.page_size))
    pools = {name: getattr(cache, name)[:, pages] for name in _POOLS}
    return Snapshot(**pools, **{name: getattr(cache, name)[:, request + 1] for name in _RINGS})


def restore(cache: Cache, request: int, snapshot: Snapshot) -> Cache:
    """A copy of `cache` in which `request` continues from `snapshot`, in whatever pages its table names.

    Raises:
      ValueError: a snapshot of another geometry, or too few pages.
    """
    for name in (*_POOLS, *_RINGS):
        got, own = getattr(snapshot, name), getattr(cache, name)
        want = (own.shape[0], *own.shape[2:]) if name in _RINGS else (own.shape[0], snapshot.k.shape[1], *own.shape[2:])
        if got.shape != want or got.dtype != own.dtype:
            raise invalid(
                f"snapshot.{name}",
                f"{got.dtype} {got.shape}",
                f"{own.dtype} {want}",
                "Restore into a cache of the same geometry, layers and dtypes.",
            )
    pages = _pages(cache, request, snapshot.k.shape[1])
    changed = {name: getattr(cache, name).at[:, pages].set(jnp.asarray(getattr(snapshot, name))) for name in _POOLS}
    changed |= {
        name: getattr(cache, name).at[:, request + 1].set(jnp.asarray(getattr(snapshot, name))) for name in _RINGS
    }
    return dataclasses.replace(cache, **changed)


def _pages(cache: Cache, request: int, count: int) -> np.ndarray:
    """First `count` pages of the request; reads the page table."""
    if not 0 <= request < cache.requests:
        raise invalid("request", request, f"0 <= request < {cache.requests}", "It is a row of the cache.")
    pages = np.asarray(cache.page_table)[request][:count]
    if len(pages) < count or not pages.all():
        raise invalid(
            "cache.page_table",
            f"{np.count_nonzero(pages)} pages of request {request}",
            f"{count}",
            "Allocate pages first.",
        )
    return pages
