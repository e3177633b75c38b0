"""All ranks of a context-parallel forward on as many devices: schedules of the gathers, and what each exposes."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxcp import overlap, qsa
from jaxcp.bench._measure import Program
from jaxcp.bench.prefill import checks, share
from jaxcp.bench.prefill.clocks import Forward
from jaxcp.bench.prefill.options import Options, clocked
from jaxcp.bench.prefill.published import beside
from jaxcp.bench.prefill.recorded import Recorded
from jaxcp.bench.prefill.whole import Whole
from jaxcp.errors import BackendError, JaxcpError
from jaxcp.overlap import copy_engines
from jaxcp.qsa.layers import add, stacked
from jaxcp.qsa.prefill import layer_of
from jaxcp.topology import make_mesh

LOCAL = "local"
"""The run whose gathers are replaced by what is there already: what is longer than it is exposed."""

COPY_ENGINES = {f"copy engines, {way}": way for way in copy_engines.WAYS}
WAYS = (LOCAL, *overlap.SCHEDULES, *COPY_ENGINES)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A case on all ranks, arrays in their places.

    Attributes:
      whole: the case, on one device.
      plan: for the ranks of the mesh.
      mesh: of one axis, "cp".
      x: [rows, hidden], sharded.
      params, peers: replicated.
    """

    whole: Whole
    plan: qsa.Plan
    mesh: Mesh
    x: Array
    params: qsa.Params
    peers: Recorded

    @property
    def cache(self) -> qsa.Cache:
        """A copy of the cache of prefixes on every device."""
        return jax.device_put(jax.tree.map(jnp.copy, self.whole.cache), NamedSharding(self.mesh, P()))


def make_ranks(whole: Whole, cp: int) -> Ranks:
    """The case dealt out to the first `cp` devices."""
    mesh = make_mesh(cp)
    plan = whole.case.plan(whole.cache, cp, mesh=mesh)
    everywhere, dealt = NamedSharding(mesh, P()), NamedSharding(mesh, P("cp"))
    here = whole.case.plan(whole.cache, cp)
    params, peers = jax.device_put((whole.params, share.recorded(whole, here, 0)), everywhere)
    return Ranks(whole, plan, mesh, jax.device_put(here.shard(whole.x), dealt), params, peers)


def measured(whole: Whole, cp: int, ways: Sequence[str], options: Options) -> dict[str, Any]:
    """Figures of every way; the first layer of all ranks is checked before, and every way against the first."""
    ranks = make_ranks(whole, cp)
    agreements = first_layers_agree(ranks)
    exact = sum(a.rows - a.other_rows for a in agreements)
    options.say(f"  {exact} of {whole.case.tokens} rows select exactly what one device selects")
    runs, left_out, first = [], {}, None
    for way in ways:
        try:
            forward = Forward(program(ranks, way), **_jit_options(way))
        except (BackendError, jax.errors.JaxRuntimeError) as error:  # what this machine cannot do costs only itself
            left_out[way] = str(error).strip().split("\n")[0]
            options.say(f"  {way}: left out, {left_out[way]}")
            continue
        rows = np.asarray(forward.result.astype(jnp.float32))
        first = rows if first is None else first
        runs.append({"way": way, "equal_rows": _equal_rows(whole, way, rows, first)} | clocked(forward, options))
        runs[-1]["temporary_bytes"] = forward.temporary_bytes
        options.say(f"  {way}: {runs[-1]['wall_ms']:.3f} ms a forward")
    local = next((run["wall_ms"] for run in runs if run["way"] == LOCAL), None)
    for run in runs:
        run["exposed_ms"] = None if local is None else round((run["wall_ms"] - local) / options.layers, 4)
    return {
        "case": whole.case.name, "lengths": whole.case.lengths, "prefix": whole.case.prefix, "cp": cp,
        "layers": options.layers, "rows": ranks.plan.rows, "runs": runs, "left_out": left_out,
        "plan_us": round(share.plan_us(whole, cp, mesh=ranks.mesh), 1),
    } | beside(cp, whole.case.name)  # fmt: skip


def program(ranks: Ranks, way: str) -> Program:
    """All layers on all ranks."""
    specs, mapped = (P(), P(), P("cp"), P()), bind(jax.shard_map, mesh=ranks.mesh, out_specs=(P(), P("cp")))
    arguments = ranks.cache, ranks.params, ranks.x, ranks.plan
    if way == LOCAL:  # the same rows on every rank, looked up by what each of them computed
        local = mapped(_local, in_specs=(*specs, P()), check_vma=False)
        return Program(local, (*arguments, ranks.peers), carried=1)
    schedule = "overlapped" if way in COPY_ENGINES else way
    return Program(mapped(bind(_gathering, schedule), in_specs=specs), arguments, carried=1)


def _gathering(schedule: str, cache, params, x, plan):
    x, cache = qsa.prefill_layers(params, x, cache, plan, axis_name="cp", schedule=schedule)
    return cache, x


def _local(cache, params, x, plan, peers):
    peers = dataclasses.replace(peers, place=lax.axis_index("cp"))
    x, cache = stacked(layer_of(plan, cache, peers, "auto"), params, x, cache, add, scan=False)
    return cache, x


def _jit_options(way: str) -> dict[str, Any]:
    return {"compiler_options": overlap.sm_free(COPY_ENGINES[way])} if way in COPY_ENGINES else {}


def first_layers_agree(ranks: Ranks, schedule: str = "overlapped") -> list[checks.Agreement]:
    """Compares every rank's first layer with that of one device.

    Raises:
      JaxcpError: a rank's is wrong.
    """
    step: Callable = bind(_first_layer, schedule)
    specs, out = (P(), P(), P("cp"), P()), (P("cp"), P("cp"), P())
    run = jax.jit(jax.shard_map(step, mesh=ranks.mesh, in_specs=specs, out_specs=out), donate_argnums=0)
    y, blocks, cache = run(ranks.cache, ranks.params, ranks.x, ranks.plan)
    here = jax.devices()[0]
    y, blocks, cache = jax.device_put((y, blocks, cache), here)
    plan, found = ranks.whole.case.plan(ranks.whole.cache, ranks.plan.cp), []
    for rank in range(plan.cp):
        x = share.own_rows(plan, ranks.whole.x, rank)
        mine = share.Share(ranks.whole, plan, rank, x, ranks.peers)
        rows = slice(rank * plan.local_rows, (rank + 1) * plan.local_rows)
        found.append(checks.agreement(mine, y[rows], blocks[rows], cache))
    return found


def _first_layer(schedule: str, cache, params, x, plan):
    params = jax.tree.map(lambda a: a[0], params)
    options = {"schedule": schedule, "return_selection": True}
    result = qsa.prefill(params, x, cache, plan, axis_name="cp", **options)
    y, cache, blocks = result  # pyright: ignore[reportAssignmentType]
    return y, blocks, cache


def _equal_rows(whole: Whole, way: str, rows: np.ndarray, first: np.ndarray) -> int:
    """Rows that are the first way's bit for bit; raises if others are far from them."""
    error = np.abs(rows - first).max() / np.abs(first).max()
    if not error <= checks.SWAPPED_TOLERANCE:
        bound = checks.SWAPPED_TOLERANCE
        raise JaxcpError(f"bench prefill: {whole.case.name}, {way}: error {error:.3g}; expected <= {bound:.3g}.")
    return int((rows == first).all(1).sum())
