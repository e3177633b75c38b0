"""Context-parallel prefill on virtual devices, for tests: the like of `qsa_runs.Session`, over the ranks of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from qsa_runs import Session, ids

from jaxcp import overlap, qsa


def mesh_of(cp: int, after: dict | None = None, **before) -> Mesh:
    """A mesh of `cp` devices along "cp", with further axes before or after it."""
    axes = before | {"cp": cp} | (after or {})
    shape = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(axes))


@functools.cache
def program(mesh: Mesh, **options):
    """jit(shard_map(prefill)): (params, x, cache, plan, layer) -> (y, cache, selection)."""

    def step(params, x, cache, plan, layer):
        return qsa.prefill(params, x, cache, plan, axis_name="cp", layer=layer, return_selection=True, **options)

    specs = (P(), P("cp"), P(), P(), P())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("cp"), P(), P("cp"))), donate_argnums=2)


def replicated(tree, mesh: Mesh):
    """Every array of `tree` on all devices of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


class Ranks(Session):
    """A `Session` whose prefills run over the ranks of a mesh; decode steps run replicated, as after any prefill."""

    def __init__(
        self,
        config,
        tensors,
        dtype="float32",
        *,
        cp,
        layout="zigzag",
        index_keys="raw",
        balance=None,
        mesh=None,
        **options,
    ):
        super().__init__(config, tensors, dtype, **options)
        self.mesh = mesh_of(cp) if mesh is None else mesh
        self.params, self.cache = replicated((self.params, self.cache), self.mesh)
        self.options = {"cp": cp, "layout": layout, "index_keys": index_keys, "balance": balance, "mesh": self.mesh}

    def plan(self, parts: dict, rope=None):
        """The plan of a feed."""
        requests = list(parts)
        rope = None if rope is None else np.concatenate([rope[r] for r in requests], 1)
        return qsa.plan(
            [len(parts[r]) for r in requests], self.lengths[requests], requests=requests, rope_positions=rope,
            cache=self.cache, min_rows=self.rows, min_context=self.cache.capacity, **self.options,
        )  # fmt: skip

    def feed(self, parts: dict, rope=None, layer=0, **options):
        """Prefill of `parts`, request -> [tokens, hidden]; returns request -> (y, selections)."""
        plan, x = self.plan(parts, rope), np.concatenate(list(parts.values()))
        rows = jax.device_put(plan.shard(x.astype(self.params.dtype)), NamedSharding(self.mesh, P("cp")))
        run = program(self.mesh, **options)
        y, self.cache, blocks = run(self.params, rows, self.cache, plan, np.int32(layer))
        lengths = [len(part) for part in parts.values()]
        self.lengths[list(parts)] += lengths
        self.sent_back(plan, y, lengths)
        cuts = np.cumsum([0, *lengths])
        y, blocks = np.asarray(plan.unshard(y), np.float64), ids(np.asarray(plan.unshard(blocks))[: cuts[-1]])
        return {r: (y[a:b], blocks[a:b]) for r, a, b in zip(parts, cuts[:-1], cuts[1:], strict=True)}

    def sent_back(self, plan, y, lengths):
        """Asserts that padding rows are 0 on every rank."""
        if plan.layout is None:
            assert not np.asarray(y, np.float32)[sum(lengths) :].any()
            return
        counts = np.asarray(plan.split().counts())
        for rank, rows in enumerate(np.asarray(y, np.float32).reshape(plan.cp, plan.local_rows, -1)):
            assert not rows[counts[rank] :].any()


def held(cache: qsa.Cache) -> dict:
    """What a cache holds of its requests, as bytes to compare: pages of the table and rings, without the dumps."""
    pages = np.unique(np.asarray(cache.page_table))
    pages = pages[pages > 0]
    out = {name: np.asarray(getattr(cache, name))[:, pages] for name in ("k", "v", "index")}
    out |= {name: np.asarray(getattr(cache, name))[:, 1:] for name in ("ring_keys", "ring_positions")}
    return out | {"faults": np.asarray(cache.faults)}


def same_bits(a: dict, b: dict):
    """Asserts equal arrays, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), f"{name} differs"


def same_on_every_device(cache: qsa.Cache):
    """Asserts that the copies of the cache, which the program takes for one array, are."""
    copies = [jax.tree.map(lambda a, i=i: a.addressable_shards[i].data, cache) for i in range(len(cache.k.devices()))]
    for copy in copies[1:]:
        same_bits(held(copies[0]), held(copy))


def swapped(small, large, local, axis_name):
    """Every rank takes its neighbour's rows of K and V for its own, as a gather with shards in the wrong places."""
    small, local, finish = overlap.SCHEDULES["overlapped"](small, large, local, axis_name)
    return small, local, lambda work: (jnp.roll(finish(work)[0], len(large), axis=0), work)


def stale(small, large, local, axis_name):
    """The rows of each next rank have not arrived when attention reads them."""
    small, local, finish = overlap.SCHEDULES["overlapped"](small, large, local, axis_name)

    def late(work):
        rows = finish(work)[0]
        return rows.at[: len(large)].set(0), work

    return small, local, late
