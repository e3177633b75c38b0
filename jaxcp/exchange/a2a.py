"""One all-to-all of packed blocks, then a merge that reads the received buffer in place."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcp import lse as lse_lib
from jaxcp.exchange import packing
from jaxcp.exchange.collective import CollectiveEngine, pad_heads
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.lse import Partial
from jaxcp.topology import Topology


def blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """All-to-all works everywhere; only the choice of the merge depends on the platform."""
    del topology, spec
    return None


class Engine(CollectiveEngine):
    """out = merge(unpack(all_to_all(pack(partials by destination))))."""

    def exchange(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """See `CollectiveEngine.exchange`."""
        spec, axis = self.spec, self.topology.axis_name
        received = lax.all_to_all(self._blocks(partial), axis, split_axis=0, concat_axis=0, tiled=True)
        tokens = partial.o.shape[0]
        o, lse = packing.unpack(received, tokens * spec.heads_per_rank, spec.head_dim, spec.dtype)
        merged = lse_lib.merge(Partial(o, lse, partial.base))
        shape = (tokens, spec.heads_per_rank)
        return merged.o.reshape(*shape, spec.head_dim), merged.lse.reshape(shape) if return_lse else None

    def _blocks(self, partial: Partial) -> Array:
        """[cp, packed]: for each destination, its heads' rows and LSEs."""
        spec, tokens = self.spec, partial.o.shape[0]
        partial = pad_heads(partial, spec)
        split = (tokens, spec.cp, spec.heads_per_rank)
        o = partial.o.reshape(*split, spec.head_dim).swapaxes(0, 1).reshape(spec.cp, -1, spec.head_dim)
        lse = partial.lse.reshape(split).swapaxes(0, 1).reshape(spec.cp, -1)
        return packing.pack(o, lse)

    def describe(self) -> dict[str, Any]:
        """Bytes of a call, and which code merges."""
        return super().describe() | {"merge": "xla"}

    def bytes_sent(self, tokens: int) -> int:
        """One packed block to every peer."""
        spec = self.spec
        return (spec.cp - 1) * jnp.dtype(spec.dtype).itemsize * packing.packed_words(
            tokens * spec.heads_per_rank, spec.head_dim, spec.dtype)
