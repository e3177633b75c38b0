"""A rank whose peers' rows are there already: what its forward costs without any gather."""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxcp.overlap.gathers import Gathered
from jaxcp.qsa.indexing import take
from jaxcp.qsa.scopes import GATHERS


@bind(jax.tree_util.register_dataclass, data_fields=["index", "kv", "place", "zero", "selection"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Recorded:
    """In place of a mesh axis (`jaxcp.qsa.peers.Peers`): all ranks' rows of every layer, computed before.

    Barriers stand where gathers would: what a rank sends is computed whole, and nothing that follows a gather begins
    before it could. XLA drops what nobody reads, barriers or not; so where the given rows lie is made to depend on a
    number of everything that they replace (tests/test_bench_prefill.py counts products and kernels). Kernels want rows
    that lie by themselves, so a layer's are copied first: the part "gathers".

    Attributes:
      index: [layers + 1, rows, index_dim], raw index keys of all ranks, one rank after another. The last is not read: a
        single layer would lie in one place whatever anything depends on.
      kv: [layers + 1, rows, features], their K and V as stored.
      place: int32 scalar, which rank this is.
      zero: int32 scalar, 0, which the compiler must not know.
      selection: int32 [local rows, k], what attention reads in place of what was selected, which is computed all the
        same; None: what was selected.
    """

    index: Any
    kv: Any
    place: Any
    zero: Any
    selection: Any = None

    def at(self, rank: int) -> "Recorded":
        """The same rows for another rank."""
        return dataclasses.replace(self, place=jax.device_put(np.int32(rank)))

    def rank(self) -> Int[Array, ""]:
        """Which one it is."""
        return self.place

    def gather(self, small: Array, large: Array, local: Any, layer: Any) -> Gathered:
        """The layer's rows, once the rank's own are there."""
        local, small, large = lax.optimization_barrier((local, small, large))
        with jax.named_scope(GATHERS):
            index = take(self.index, layer + self._nothing(small, large))

        def finish(blocks):
            blocks = lax.optimization_barrier(blocks)
            with jax.named_scope(GATHERS):
                kv = take(self.kv, layer + self._nothing(blocks))
            return kv, blocks if self.selection is None else self.selection

        return index, local, finish

    def _nothing(self, *arrays: Array) -> Int[Array, ""]:
        """0, for which each of the arrays must be there."""
        return self.zero * sum(a[0, 0].astype(jnp.int32) for a in arrays)
