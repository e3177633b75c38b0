"""One all-to-all of packed blocks, then a merge that reads the received buffer in place.

On GPUs the merge is the Pallas kernel `jaxcp.kernels.lse_merge`; on CPU, and for the few shapes the kernel does not cut
(see its `blocker`), the jnp merge.
"""

from typing import Any, Literal

from jax import lax
from jaxtyping import Array

from jaxcp import lse as lse_lib
from jaxcp.errors import BackendError, invalid
from jaxcp.exchange import packing
from jaxcp.exchange.collective import CollectiveEngine
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.lse import LogBase, Partial
from jaxcp.topology import Topology

MERGES = ("auto", "pallas", "xla")

COMPILED_FOR = (9, 10)
"""Major compute capabilities that the Pallas kernel is compiled and tested for: Hopper and Blackwell."""


def blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """All-to-all works everywhere; only the choice of the merge depends on the platform."""
    del topology, spec
    return None


class Engine(CollectiveEngine):
    """out = merge(unpack(all_to_all(pack(partials by destination))))."""

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float, *, merge: str = "auto"):
        """`merge` names the code that merges: "pallas", "xla", or "auto"."""
        super().__init__(topology, spec, timeout_s)
        if merge not in MERGES:
            raise invalid("merge", repr(merge), f"one of {', '.join(MERGES)}", "Leave it to 'auto'.")
        self._merge = merge
        if merge == "pallas" and (why := self.pallas_blocker(spec.max_tokens)):
            raise BackendError(f"merge='pallas' cannot be used on {topology}: {why}.")

    def exchange(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """See `CollectiveEngine.exchange`."""
        spec, tokens = self.spec, partial.o.shape[0]
        blocks = packing.pack(partial.o, partial.lse, spec.cp)
        received = lax.all_to_all(blocks, self.topology.axis_name, split_axis=0, concat_axis=0, tiled=True)
        merge = _merge_pallas if self.merge_for(tokens) == "pallas" else _merge_xla
        o, lse = merge(received, tokens * spec.heads_per_rank, spec, partial.base, return_lse)
        shape = (tokens, spec.heads_per_rank)
        return o.reshape(*shape, spec.head_dim), None if lse is None else lse.reshape(shape)

    def merge_for(self, tokens: int) -> Literal["pallas", "xla"]:
        """Which code merges a call of `tokens` tokens."""
        if self._merge == "auto":
            return "xla" if self.pallas_blocker(tokens) else "pallas"
        return "pallas" if self._merge == "pallas" else "xla"

    def pallas_blocker(self, tokens: int) -> str | None:
        """Why the Pallas kernel cannot merge a call of `tokens` tokens, or None."""
        topology, spec = self.topology, self.spec
        if topology.platform != "gpu":
            return f"it is compiled for GPUs, not for {topology.platform}"
        if topology.compute_capability and topology.compute_capability[0] not in COMPILED_FOR:
            return f"it is not compiled for compute capability {topology.compute_capability}"
        # Imported here, because importing Mosaic GPU takes half a second that CPU users need not pay.
        from jaxcp.kernels import lse_merge

        return lse_merge.blocker(spec.cp, tokens * spec.heads_per_rank, spec.head_dim, spec.dtype)

    def describe(self) -> dict[str, Any]:
        """Bytes of a call, and which code merges it."""
        return super().describe() | {"merge": self.merge_for(self.spec.max_tokens)}

    def bytes_sent(self, tokens: int) -> int:
        """One packed block to every peer."""
        spec = self.spec
        words = packing.packed_words(tokens * spec.heads_per_rank, spec.head_dim, spec.dtype)
        return (spec.cp - 1) * words * packing.word(spec.head_dim, spec.dtype).itemsize


def _merge_xla(received: Array, rows: int, spec: ExchangeSpec, base: LogBase, return_lse: bool):
    o, lse = packing.unpack(received, rows, spec.head_dim, spec.dtype)
    merged = lse_lib.merge(Partial(o, lse, base))
    return merged.o, merged.lse if return_lse else None


def _merge_pallas(received: Array, rows: int, spec: ExchangeSpec, base: LogBase, return_lse: bool):
    from jaxcp.kernels import lse_merge

    return lse_merge.merge_packed(
        received, rows=rows, dim=spec.head_dim, dtype=spec.dtype, base=base, return_lse=return_lse
    )
