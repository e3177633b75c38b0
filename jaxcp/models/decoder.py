"""The decode step: known and drafted tokens in, the tokens that greedy decoding wants out."""

import dataclasses
from collections.abc import Callable
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcp import decode
from jaxcp.models import llama, speculation
from jaxcp.models.runtime import Leaf, Runtime, State


@bind(jax.tree_util.register_dataclass, data_fields=["tokens", "counts", "gaps"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What one step produced.

    Attributes:
      tokens: int32 [requests, rows], the first `counts` of each request are new.
      counts: int32 [requests]; 0 for a request at its limit.
      gaps: float32 [requests, rows], by how much each token's logit leads the second best.
    """

    tokens: Leaf
    counts: Leaf
    gaps: Leaf


class Decoder:
    """Greedy decoding steps of a `Runtime` with one exchange.

    Args:
      runtime: weights and cache geometry.
      backend: of the exchange, or "auto".
      speculate: tokens drafted and verified per step, 0 for plain greedy.
    """

    def __init__(self, runtime: Runtime, backend: str = "auto", speculate: int = 0):
        speculation.check_speculate(speculate)
        self.runtime, self.speculate = runtime, speculate
        self.exchange = runtime.exchange(backend, speculate + 1)
        self._compiled: Callable[..., Any] | None = None

    def compile(self, state: State) -> None:
        """Compiles the step for the shapes of `state` (once)."""
        if self._compiled is None:
            self._compiled = self.runtime.compiled(self._step, state, Emitted(P(), P(), P()))

    def __call__(self, state: State) -> tuple[State, Emitted]:
        """One step: every request below its limit grows by 1 to speculate + 1 tokens. `state` is donated."""
        self.compile(state)
        assert self._compiled is not None
        return self._compiled(self.runtime.weights, state)

    def _step(self, weights, state: State) -> tuple[State, Emitted]:
        runtime, rows = self.runtime, self.speculate + 1
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        drafts = jax.vmap(bind(speculation.draft, count=self.speculate))(state.tokens, state.lengths)
        query = jnp.concatenate([last, drafts], axis=1)
        positions = state.lengths[:, None] - 1 + jnp.arange(rows)

        def attend(q, k, v, cache, layer):
            return decode.attention(q, k, v, cache, state.lengths + self.speculate, exchange=self.exchange, layer=layer)

        x, cache = llama.hidden(
            weights, query.reshape(-1), positions.reshape(-1), state.cache, attend, runtime.config, runtime.axis_name
        )
        best, gaps = (x.reshape(-1, rows) for x in llama.greedy(weights, x, runtime.config, runtime.axis_name))
        counts = jnp.minimum(speculation.accepted(best, query), state.limits - state.lengths)
        return self._grown(state, best, counts, cache), Emitted(best, counts, gaps)

    def _grown(self, state: State, best: jax.Array, counts: jax.Array, cache: Any) -> State:
        row = jnp.arange(best.shape[1])
        place = jnp.where(row < counts[:, None], state.lengths[:, None] + row, self.runtime.capacity)
        tokens = jax.vmap(lambda known, at, new: known.at[at].set(new, mode="drop"))(state.tokens, place, best)
        lengths = state.lengths + counts
        return State(tokens, lengths, lengths - 1, state.limits, cache)
