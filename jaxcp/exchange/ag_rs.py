"""All-gather the LSEs, rescale the own partial, reduce-scatter the rows over the heads.

    o = reduce_scatter_heads(o_r b^(l_r - m) / s)          m, s from the gathered LSEs

The sum runs in the collective's order, so results are not bit-equal to the other backends'; rows travel in the
accumulation dtype (float32 for 16-bit rows), twice the bytes of `a2a`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcp import lse as lse_lib
from jaxcp.exchange.collective import CollectiveEngine, own_lse, pad_heads
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.lse import Partial
from jaxcp.topology import Topology


def blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """All-gather and reduce-scatter work everywhere."""
    del topology, spec
    return None


class Engine(CollectiveEngine):
    """One all-gather of [tokens, heads] and one reduce-scatter of [c, tokens, h, dim]."""

    def exchange(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """See `CollectiveEngine.exchange`."""
        spec, axis = self.spec, self.topology.axis_name
        rank = lax.axis_index(axis)
        w, merged = lse_lib.weights(lax.all_gather(partial.lse, axis), partial.base)
        own_weight = lax.dynamic_index_in_dim(w, rank, keepdims=False)
        scaled = lse_lib.select(own_weight, partial.o)
        rows = pad_heads(Partial(scaled, partial.lse, partial.base), spec).o
        rows = rows.reshape(rows.shape[0], spec.cp, spec.heads_per_rank, spec.head_dim)
        # Destination first: the scattered axis is then contiguous, and the transpose fuses with the scaling.
        summed = lax.psum_scatter(rows.swapaxes(0, 1), axis, scatter_dimension=0, tiled=False)
        return summed.astype(partial.o.dtype), own_lse(merged, spec, rank) if return_lse else None

    def bytes_sent(self, tokens: int) -> int:
        """LSEs to everyone, rows in the accumulation dtype to their owners."""
        spec = self.spec
        word = jnp.dtype(lse_lib.accumulation_dtype(spec.dtype)).itemsize
        return (spec.cp - 1) * tokens * word * (spec.heads + spec.heads_per_rank * spec.head_dim)
