"""One rank's share of a context-parallel forward on one device: its peers' rows are there already."""

import dataclasses
import statistics
import time
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcp import qsa
from jaxcp.bench._measure import Program
from jaxcp.bench.prefill.recorded import Recorded
from jaxcp.bench.prefill.whole import Whole
from jaxcp.bench.qsa import selections
from jaxcp.qsa.layers import add, stacked
from jaxcp.qsa.prefill import layer_of

OWN = "own"
"""What the first layer selects; the others are models."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A rank of a case.

    Attributes:
      whole: the case.
      plan: for all ranks.
      rank: which one.
      x: [local rows, hidden], into its first layer.
      peers: what all ranks send.
    """

    whole: Whole
    plan: qsa.Plan
    rank: int
    x: Array
    peers: Recorded

    @property
    def rows(self) -> int:
        """Of the rank, padding left out."""
        return int((self.tokens >= 0).sum())

    @property
    def tokens(self) -> np.ndarray:
        """Packed token of each row, -1 in padding: int [local rows]."""
        return np.asarray(self.whole.case.split(self.plan).tokens(self.rank, self.plan.local_rows))

    @property
    def positions(self) -> np.ndarray:
        """Of each row in its request, -1 in padding: int [local rows]."""
        return np.where(self.tokens >= 0, self.whole.case.positions[self.tokens], -1)


def make_share(whole: Whole, cp: int) -> Share:
    """The share of the rank, of `cp`, that has most to do."""
    plan = whole.case.plan(whole.cache, cp)
    rank = whole.case.busiest(whole.config, plan)
    return Share(whole, plan, rank, own_rows(plan, whole.x, rank), recorded(whole, plan, rank))


def make_shares(whole: Whole, plan: qsa.Plan) -> list[Share]:
    """The shares of all ranks of a plan; what all ranks send is there once."""
    peers = recorded(whole, plan, 0)
    return [Share(whole, plan, rank, own_rows(plan, whole.x, rank), peers.at(rank)) for rank in range(plan.cp)]


def own_rows(plan: qsa.Plan, x: Array, rank: int) -> Array:
    """The rank's rows of packed tokens [tokens, ...]: [local rows, ...]."""
    return plan.shard(x)[rank * plan.local_rows :][: plan.local_rows]


def recorded(whole: Whole, plan: qsa.Plan, rank: int) -> Recorded:
    """What all ranks send in every layer."""
    index, kv = (jax.vmap(plan.shard)(jnp.concatenate([rows, rows[:1]])) for rows in (whole.index, whole.kv))
    return Recorded(index, kv, *(jax.device_put(np.int32(n)) for n in (rank, 0)))


def stack(share: Share, selection: Array, implementation: str = "auto") -> Program:
    """All layers over the rank's rows; attention reads `selection`, whatever is selected."""

    def run(cache, params, x, plan, peers):
        x, cache = stacked(layer_of(plan, cache, peers, implementation), params, x, cache, add, scan=False)
        return cache, x

    peers = dataclasses.replace(share.peers, selection=selection)
    cache = jax.tree.map(jnp.copy, share.whole.cache)
    return Program(run, (cache, share.whole.params, share.x, share.plan, peers), carried=1)


def first_layer(share: Share, implementation: str = "auto") -> tuple[Array, Array, qsa.Cache]:
    """(y, selection, cache) of the rank's rows in the first layer, as a forward computes them."""
    cache = jax.tree.map(jnp.copy, share.whole.cache)
    return _first_layer(share.whole.params, share.x, cache, share.plan, share.peers, implementation=implementation)


@bind(jax.jit, static_argnames="implementation", donate_argnames="cache")
def _first_layer(params, x, cache, plan, peers, *, implementation):
    params = jax.tree.map(lambda a: a[0], params)
    y, cache, blocks = layer_of(plan, cache, peers, implementation)(params, x, cache, jnp.int32(0))
    return y, blocks, cache


def selection(share: Share, name: str) -> Array:
    """What the rank's rows attend to: what the first layer selects (`OWN`), or a model of it."""
    if name != OWN:
        return selections.model(name, share.positions, share.whole.config)
    return dealt(share, share.whole.blocks)


def dealt(share: Share, blocks: Array) -> Array:
    """The rank's part of a selection of all tokens [tokens, k]."""
    return jnp.where(jnp.asarray(share.tokens >= 0)[:, None], own_rows(share.plan, blocks, share.rank), -1)


def plan_us(whole: Whole, cp: int, repeat: int = 21, **options) -> float:
    """Time of the host for a plan, µs, median; its arrays' way to the device included."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(whole.case.plan(whole.cache, cp, **options).table)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
