"""What a layer does between its products with weights, each operation by one implementation.

prepare       norms and rotations of the rows' products
write_index   compressed keys, and the newest raw ones into the rings
write_kv      K and V into pages
select        scoring and block selection
attended      queries, sparse attention, gate
"""

from collections.abc import Callable
from functools import partial as bind
from typing import NamedTuple

from jaxcp.qsa import kernel_store, layer, mixing, update
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.resolve import Implementation, resolve
from jaxcp.qsa.selection import SELECT
from jaxcp.qsa.sparse import ATTEND

PREPARE = {"cuda": Implementation(kernel_store.prepare, kernel_store.blocker), "xla": Implementation(layer.prepare)}
"""Implementations by name, the best first; each has the signature of `layer.prepare`."""

WRITE_INDEX = {
    "cuda": Implementation(kernel_store.write_index, kernel_store.blocker),
    "xla": Implementation(update.write_index),
}
"""Implementations by name, the best first; each has the signature of `update.write_index`."""

WRITE_KV = {
    "cuda": Implementation(kernel_store.write_kv, kernel_store.blocker),
    "xla": Implementation(update.write_kv),
}
"""Implementations by name, the best first; each has the signature of `update.write_kv`."""


class Operations(NamedTuple):
    """Functions of a layer; see the module.

    Attributes:
      prepare: as `layer.prepare`.
      write_index: as `update.write_index`.
      write_kv: as `update.write_kv`.
      select: as `selection.select_xla`.
      attended: as `mixing.attended` without its last argument.
    """

    prepare: Callable
    write_index: Callable
    write_kv: Callable
    select: Callable
    attended: Callable


def operations(implementation: str, config: QSAConfig, cache: Cache) -> Operations:
    """The operations by the implementation of that name; "auto" takes the best for each.

    Raises:
      ValueError: no implementation has the name.
      BackendError: the named one is blocked.
    """

    def chosen(operation: str, table: dict[str, Implementation]) -> Implementation:
        return resolve(operation, table, implementation, config, cache)

    attention = chosen("sparse attention", ATTEND)
    return Operations(
        prepare=chosen("norms and rotations", PREPARE).run,
        write_index=chosen("the index of the cache", WRITE_INDEX).run,
        write_kv=chosen("K and V of the cache", WRITE_KV).run,
        select=chosen("selection", SELECT).run,
        attended=attention.attended(config) or bind(mixing.attended, attend=attention.run),
    )
