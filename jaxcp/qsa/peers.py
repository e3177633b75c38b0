"""What a rank of context-parallel prefill knows of the others: which one it is, and what all ranks' rows are.

A forward reaches them through these two methods alone. On a mesh they are an axis and its collectives; a benchmark of
one rank's share gives what the others would have sent.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from jax import lax
from jaxtyping import Array, Int

from jaxcp.overlap import SCHEDULES
from jaxcp.overlap.gathers import Gathered


@runtime_checkable
class Peers(Protocol):
    """The ranks that share a prefill, as one of them sees them."""

    def rank(self) -> Int[Array, ""]:
        """Which one it is."""
        ...

    def gather(self, small: Array, large: Array, local: Any, layer: Any) -> Gathered:
        """All ranks' `small` and `large` of a layer, as `jaxcp.overlap.overlapped` gives them."""
        ...


@dataclasses.dataclass(frozen=True)
class OnAxis:
    """Peers along a mesh axis; in shard_map.

    Attributes:
      axis_name: of the mesh.
      schedule: key of `jaxcp.overlap.SCHEDULES`.
    """

    axis_name: str
    schedule: str

    def rank(self) -> Int[Array, ""]:
        """Place on the axis."""
        return lax.axis_index(self.axis_name)

    def gather(self, small: Array, large: Array, local: Any, layer: Any) -> Gathered:
        """Two collectives, when the schedule says."""
        return SCHEDULES[self.schedule](small, large, local, self.axis_name)
