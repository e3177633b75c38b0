"""What the backends made of XLA's own collectives share: they own no memory and have nothing to check."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcp import lse as lse_lib
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.lse import Partial
from jaxcp.topology import Topology


def pad_heads(partial: Partial, spec: ExchangeSpec) -> Partial:
    """`partial` with neutral rows (0, -inf) after the last head, so that every rank gets the same number of rows."""
    missing = spec.padded_heads - partial.o.shape[-2]
    if not missing:
        return partial
    o = jnp.pad(partial.o, [(0, 0)] * (partial.o.ndim - 2) + [(0, missing), (0, 0)])
    lse = jnp.pad(partial.lse, [(0, 0)] * (partial.lse.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
    return Partial(o, lse, partial.base)


def own_lse(merged: Float[Array, "tokens heads"], spec: ExchangeSpec, rank: Array) -> Float[Array, "tokens rows"]:
    """Columns of this rank's heads, -inf for rows without a head."""
    missing = spec.padded_heads - merged.shape[-1]
    padded = jnp.pad(merged, [(0, 0), (0, missing)], constant_values=-jnp.inf)
    return lax.dynamic_slice_in_dim(padded, rank * spec.heads_per_rank, spec.heads_per_rank, axis=1)


def merge_alone(partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
    """The exchange of one rank. One source still merges: an empty row's payload must become 0."""
    merged = lse_lib.merge(Partial(partial.o[None], partial.lse[None], partial.base))
    return merged.o, merged.lse if return_lse else None


class CollectiveEngine:
    """Base of `allgather`, `ag_rs` and `a2a`."""

    name: str

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float):
        del timeout_s  # XLA's collectives take none; whether they end without a peer is its runtime's affair (NCCL: no)
        self.topology, self.spec = topology, spec

    def __call__(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        if self.spec.cp == 1:
            return merge_alone(partial, return_lse)
        return self.exchange(partial, return_lse)

    def exchange(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """The exchange among two or more ranks."""
        raise NotImplementedError

    def check(self) -> None:
        """Nothing to check: a failed collective is an error of the program that made it."""

    def reset(self) -> None:
        """Nothing to revive."""

    def close(self) -> None:
        """Nothing to give back."""

    def describe(self) -> dict[str, Any]:
        """Bytes that one rank sends to its peers in a call of `max_tokens` tokens."""
        return {"bytes_sent_per_call": self.bytes_sent(self.spec.max_tokens)}

    def bytes_sent(self, tokens: int) -> int:
        """Bytes that one rank sends to its peers for `tokens` tokens."""
        raise NotImplementedError
