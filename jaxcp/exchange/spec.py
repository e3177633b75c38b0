"""What an exchange moves, and the interface that every backend implements."""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxcp.errors import invalid
from jaxcp.layout import positive_int
from jaxcp.lse import Partial
from jaxcp.topology import Topology

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """Static facts of an exchange.

    Attributes:
      cp: ranks of the group, c.
      heads: query heads of the group, H. Head j is row j mod h of rank j div h.
      head_dim: width of a row, D.
      dtype: of the rows; float64 is for checks and only the collective backends move it.
      max_tokens: rows of one call; wider batches are sliced.
    """

    cp: int
    heads: int
    head_dim: int
    dtype: np.dtype
    max_tokens: int

    @classmethod
    def of(cls, topology: Topology, *, heads: int, head_dim: int, dtype: Any, max_tokens: int) -> "ExchangeSpec":
        """A checked spec for the ranks of `topology`.

        Raises:
          TypeError: unknown dtype.
          ValueError: a count that is not a positive integer.
        """
        return cls(
            topology.size,
            positive_int("heads", heads),
            positive_int("head_dim", head_dim),
            _dtype(dtype),
            positive_int("max_tokens", max_tokens),
        )

    @property
    def heads_per_rank(self) -> int:
        """h = ceil(heads / cp); the last ranks may own rows without a head."""
        return -(-self.heads // self.cp)

    @property
    def padded_heads(self) -> int:
        """Rows per token over all ranks: cp * h >= heads."""
        return self.cp * self.heads_per_rank


class Engine(Protocol):
    """One backend at work for one mesh axis and spec. Built outside jit, collectively, once."""

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float): ...

    def __call__(
        self, partial: Partial, return_lse: bool
    ) -> tuple[Float[Array, "tokens rows dim"], Float[Array, "tokens rows"] | None]:
        """Merged rows of this rank; in shard_map, 1 <= tokens <= max_tokens, `partial` has exactly spec.heads heads."""
        ...

    def check(self) -> None:
        """Raises what went wrong on the device since the last check."""

    def reset(self) -> None:
        """Collective: makes a failed engine usable again."""

    def close(self) -> None:
        """Gives memory back; collective."""

    def describe(self) -> dict[str, Any]:
        """Facts for people and logs."""
        ...


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # numpy takes None for float64
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise invalid("dtype", repr(dtype), f"one of {', '.join(DTYPES)}", "Cast the attention output.", TypeError)
    return found
