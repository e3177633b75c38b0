"""The exchange through XLA's collectives: every backend against the table, and what the object promises besides."""

import itertools
import logging
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import LogBase, Partial
from jaxcp.exchange import packing, resolve
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.topology import Topology, make_mesh

COLLECTIVE = ("allgather", "ag_rs", "a2a")
SPEC = {"heads": 9, "head_dim": 64, "dtype": "float32"}


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def exchange_on(mesh, axis_name="cp", **changes) -> jaxcp.Exchange:
    return jaxcp.Exchange(mesh, axis_name, **{"max_tokens": 8, "backend": "a2a"} | SPEC | changes)


@pytest.mark.parametrize("case", cases.EXCHANGE, ids=str)
@pytest.mark.parametrize("backend", ["a2a", "ag_rs"])
def test_matches_oracle(case, backend):
    cases.check(case, cases.run(case, backend))


@pytest.mark.parametrize("case", cases.SPECIAL, ids=str)
def test_allgather_matches_oracle(case):
    cases.check(case, cases.run(case, "allgather"))


FACTORS = {
    "cp": (1, 2, 3, 4, 8),
    "heads": (1, 9, 16, 128),
    "dim": (64, 128, 512),
    "tokens": (0, 1, 3, 7, 49, 128),
    "base": tuple(LogBase),
    "dtype": ("bfloat16", "float16", "float32"),
    "filling": ("random", "empty_shard", "one_owner", "empty_rows", "not_finite"),
    "unit_axis": (False, True),
}


def test_the_table_covers_every_pair_of_values():
    sizes = ("cp", "heads", "dim", "tokens")
    pairs = lambda values: set(itertools.combinations(values.items(), 2))  # noqa: E731
    found = set().union(*(pairs({name: getattr(case, name) for name in FACTORS}) for case in cases.COVERING))
    small = [
        dict(zip(sizes, size, strict=True))
        for size in itertools.product(*(FACTORS[name] for name in sizes))
        if np.prod(size) <= cases.MAX_ELEMENTS
    ]
    wanted = set().union(*map(pairs, small))
    for a, b in itertools.combinations(FACTORS, 2):
        if b not in sizes:
            wanted |= {((a, x), (b, y)) for x in FACTORS[a] for y in FACTORS[b]}
    assert wanted <= found
    assert len(cases.EXCHANGE) <= 120


# Meshes.


def batch(groups, cp, tokens, heads=9, dim=64, seed=0):
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((groups, cp, tokens, heads, dim), np.float32)
    return o, (4 * rng.standard_normal(o.shape[:-1])).astype(np.float32)


@pytest.mark.parametrize(("backend", "manual"), [
    ("a2a", "all axes manual"), ("a2a", "cp manual"), ("ag_rs", "cp manual"), ("allgather", "all axes manual"),
])  # fmt: skip
@pytest.mark.parametrize("axes", [
    {"data": 2, "cp": 4}, {"cp": 4, "data": 2}, {"data": 2, "cp": 2, "tp": 2}, {"cp": 3, "data": 2},
], ids=lambda axes: "x".join(axes))  # fmt: skip
def test_groups_of_a_larger_mesh_stay_apart(axes, manual, backend):
    mesh, cp = mesh_of(**axes), axes["cp"]
    o, lse = batch(axes["data"], cp, tokens=5)
    exchange = exchange_on(mesh, backend=backend)
    names = {"cp"} if manual == "cp manual" else set(axes)
    spec = P(None, "cp") if manual == "cp manual" else P("data", "cp")

    def step(o, lse):
        return jax.vmap(lambda o, lse: exchange(Partial(o[0], lse[0], LogBase.E))[None])(o, lse)

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names))
    merged = np.asarray(mapped(o, lse))
    for group in range(axes["data"]):
        want, _, scale = cases.oracle(o[group], lse[group], LogBase.E)
        h = exchange.heads_per_rank
        for rank, head in itertools.product(range(cp), range(h)):
            if rank * h + head < 9:
                cases.check_o(merged[group, rank, :, head], want[:, rank * h + head], scale[:, rank * h + head])


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_without_check_vma(backend):
    case = cases.Case(4, 9, 64, 3)
    exchange = exchange_on(make_mesh(4), backend=backend, dtype="bfloat16")
    step = lambda o, lse: exchange(Partial(o[0], lse[0], case.base))[None]  # noqa: E731
    mapped = jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp"), check_vma=False)
    got = jax.jit(mapped)(*case.inputs())
    want, _, scale = case.expected()
    cases.check_o(np.asarray(got), want, scale)


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_float64_is_exact_to_rounding(backend):
    case = cases.Case(4, 9, 64, 3, base=LogBase.E, dtype="float64", filling="not_finite")
    with jax.enable_x64(True):
        got, lse = cases.run(case, backend)
    assert got.dtype == lse.dtype == np.float64
    want, want_lse, scale = case.expected()
    cases.check_o(got, want, scale)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-14, atol=1e-14)


# Slicing, batching, layouts of the input: the same bits whatever the shape of the call.


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_wide_batches_are_sliced_in_order(backend):
    case = cases.Case(4, 9, 64, 49)
    o, lse = case.inputs()
    exchanges = [exchange_on(make_mesh(4), backend=backend, dtype="bfloat16", max_tokens=n) for n in (49, 24)]
    whole, sliced = (cases.call(exchange, o, lse, case.base) for exchange in exchanges)
    for a, b in zip(whole, sliced, strict=True):
        np.testing.assert_array_equal(a, b)


def test_slices_are_as_many_as_needed():
    exchange = exchange_on(make_mesh(4), max_tokens=24)
    o, lse = (jnp.zeros((4, 49, 9, 64)), jnp.zeros((4, 49, 9)))
    step = lambda o, lse: exchange(Partial(o[0], lse[0], LogBase.E))[None]  # noqa: E731
    text = jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp"))).lower(o, lse).as_text()
    assert text.count("stablehlo.all_to_all") == 3


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_vmap_is_one_exchange_with_the_same_bits(backend):
    exchange = exchange_on(make_mesh(4), backend=backend, max_tokens=16)
    o, lse = batch(4, 5, tokens=3)  # rank, batch, tokens

    def flat(o, lse):
        merged, total = exchange(Partial(o.reshape(15, 9, 64), lse.reshape(15, 9), LogBase.TWO), return_lse=True)
        return merged.reshape(1, 5, 3, -1, 64), total.reshape(1, 5, 3, -1)

    def batched(o, lse):
        out = jax.vmap(lambda o, lse: exchange(Partial(o, lse, LogBase.TWO), return_lse=True))(o[0], lse[0])
        return jax.tree.map(lambda x: x[None], out)

    mapped = [jax.shard_map(f, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp")) for f in (flat, batched)]
    programs = [jax.jit(f) for f in mapped]
    texts = [program.lower(o, lse).as_text() for program in programs]
    for op in ("all_to_all", "all_gather", "reduce_scatter"):
        assert len({text.count(f"stablehlo.{op}") for text in texts}) == 1
    for a, b in zip(*(program(o, lse) for program in programs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_vmap_over_one_operand(backend):
    exchange = exchange_on(make_mesh(2), backend=backend, heads=4)
    o, lse = batch(2, 3, tokens=2, heads=4)
    one_lse = lse[:, 0]
    step = lambda o, lse: jax.vmap(lambda o: exchange(Partial(o, lse[0], LogBase.TWO)))(o[0])[None]  # noqa: E731
    got = jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp")))(o, one_lse)
    for b in range(3):
        want, _, scale = cases.oracle(o[:, b], one_lse, LogBase.TWO)
        cases.check_o(np.asarray(got[:, b]).swapaxes(0, 1).reshape(2, 4, 64), want, scale)


@pytest.mark.parametrize("backend", COLLECTIVE)
def test_repeated_calls_give_the_same_bits(backend):
    case = cases.Case(8, 9, 64, 7, filling="not_finite")
    for a, b in zip(cases.run(case, backend), cases.run(case, backend), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a2a_and_allgather_agree_bitwise():
    """Both sum in source order; ag_rs sums in the collective's order and need not."""
    case = cases.Case(8, 16, 64, 7)
    for a, b in zip(cases.run(case, "a2a"), cases.run(case, "allgather"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", COLLECTIVE)
@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_differentiation_is_refused(backend, differentiate):
    """A gradient through packed bits would silently be zero."""
    exchange = exchange_on(make_mesh(2), backend=backend)
    loss = lambda o: exchange(Partial(o, jnp.zeros((1, 9)), LogBase.E)).sum()  # noqa: E731
    step = jax.shard_map(differentiate(loss), mesh=exchange.mesh, in_specs=P(), out_specs=P("cp"), check_vma=False)
    with pytest.raises(NotImplementedError, match="it has no derivative"):
        jax.eval_shape(step, jnp.zeros((1, 9, 64)))


# Packing.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 7), (16, 512)])
def test_packing_keeps_every_bit(rows, dim, dtype):
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(dtype)
    o = rng.integers(0, 256, (1, 3 * rows, dim * dtype.itemsize), np.uint8).view(dtype)
    lse = rng.integers(0, 256, (1, 3 * rows * 4), np.uint8).view(np.float32)
    packed = np.asarray(jax.jit(packing.pack, static_argnums=2)(o, lse, 3))
    assert packed.shape[1] == packing.packed_words(rows, dim, dtype)
    for rank, block in enumerate(packed):  # the documented layout, byte by byte
        mine = slice(rank * rows, (rank + 1) * rows)
        want = o[0, mine].tobytes() + lse[0, mine].tobytes()
        assert block.tobytes() == want + bytes(-len(want) % 16)
    got_o, got_lse = packing.unpack(jnp.asarray(packed), rows, dim, dtype)
    assert np.asarray(got_o).tobytes() == o.tobytes()
    assert np.asarray(got_lse).tobytes() == lse.tobytes()


@pytest.mark.parametrize(("backend", "sent"), [
    ("a2a", 7 * 16 * (512 * 2 + 4)), ("ag_rs", 7 * (4 * 128 + 4 * 16 * 512)), ("allgather", 7 * 128 * (512 * 2 + 4)),
])  # fmt: skip
def test_bytes_sent(backend, sent):
    exchange = jaxcp.Exchange(make_mesh(8), "cp", max_tokens=1, heads=128, head_dim=512, backend=backend)
    assert exchange.describe()["bytes_sent_per_call"] == sent


# Resolution.


def blocked(monkeypatch, **blockers):
    real = resolve.find_blocker
    monkeypatch.setattr(resolve, "find_blocker", lambda name, *args: blockers.get(name, real(name, *args)))


def test_explain_lists_every_backend():
    resolution = jaxcp.explain(make_mesh(8), "cp", **SPEC)
    assert set(resolution.blockers) == set(resolve.BACKENDS)
    assert all(resolution.blockers[name] is None for name in COLLECTIVE)
    text = str(resolution)
    assert all(name in text for name in resolve.BACKENDS)
    assert f"chosen: {resolution.chosen}" in text


def test_auto_on_cpu_takes_a2a_even_if_the_host_twin_works(monkeypatch):
    blocked(monkeypatch, fused=None)
    assert jaxcp.explain(make_mesh(8), "cp", **SPEC).chosen == "a2a"


def gpu_mesh(**axes: int) -> AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh(tuple(axes.values()), tuple(axes), abstract_device=device)


@pytest.mark.parametrize(("blockers", "chosen", "reason"), [
    ({"fused": None}, "fused", "first choice"),
    ({"fused": "no peer access"}, "a2a", "fused: no peer access"),
    ({"fused": "no peer access", "a2a": "broken"}, "ag_rs", "fused: no peer access; a2a: broken"),
])  # fmt: skip
def test_auto_on_gpus_takes_the_best_without_blocker(monkeypatch, blockers, chosen, reason):
    blocked(monkeypatch, **blockers)
    resolution = jaxcp.explain(gpu_mesh(cp=8), "cp", **SPEC)
    assert resolution.chosen == chosen
    assert reason in resolution.reason


def test_auto_logs_its_choice_once(monkeypatch, caplog):
    resolve._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jaxcp"):
        for _ in range(3):
            exchange_on(make_mesh(8), backend="auto")
    [record] = caplog.records
    assert "a2a" in record.getMessage()
    assert "8 ranks" in record.getMessage()


def test_a_blocked_name_raises_and_names_the_blocker(monkeypatch):
    blocked(monkeypatch, fused="rank 3 cannot map rank 5")
    with pytest.raises(jaxcp.BackendError, match=r"fused.*rank 3 cannot map rank 5.*Usable here: .*a2a"):
        exchange_on(make_mesh(8), backend="fused")


def test_a_backend_without_module_is_not_built(monkeypatch):
    monkeypatch.setattr(resolve, "BACKENDS", (*resolve.BACKENDS, "carrier_pigeon"))
    assert jaxcp.explain(make_mesh(2), "cp", **SPEC).blockers["carrier_pigeon"] == "not built"
    with pytest.raises(jaxcp.BackendError, match="not built"):
        exchange_on(make_mesh(2), backend="carrier_pigeon")


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend: got 'nvlink'; expected 'auto' or one of fused, a2a, ag_rs"):
        exchange_on(make_mesh(2), backend="nvlink")


# The object.


def test_describe_is_data():
    facts = exchange_on(mesh_of(data=2, cp=4)).describe()
    assert facts["backend"] == "a2a"
    assert (facts["cp"], facts["groups"], facts["heads_per_rank"], facts["merge"]) == (4, 2, 3, "xla")
    assert facts["reason"] == "asked for by name"


def test_lifecycle():
    exchange = exchange_on(make_mesh(2))
    exchange.check()
    exchange.reset()
    exchange.close()
    exchange.close()
    with pytest.raises(jaxcp.JaxcpError, match="closed"):
        exchange(Partial(jnp.zeros((1, 9, 64)), jnp.zeros((1, 9)), LogBase.E))


# Bad input: a clear error before any device work.


def inside(exchange, o, lse, base=LogBase.E):
    """Traces a call in shard_map without running it."""
    step = lambda: exchange(Partial(o, lse, base)).sum()[None]  # noqa: E731
    jax.eval_shape(jax.shard_map(step, mesh=exchange.mesh, in_specs=(), out_specs=P("cp"), check_vma=False))


@pytest.mark.parametrize(("o", "lse", "error", "message"), [
    ((1, 10, 64), (1, 10), ValueError, r"partial.o.shape: got \(1, 10, 64\); expected \[tokens, heads=9, dim=64\]"),
    ((1, 9, 65), (1, 9), ValueError, "dim=64"),
    ((9, 64), (9,), ValueError, "3 axes"),
    ((1, 1, 9, 64), (1, 1, 9), ValueError, "3 axes"),
    ((2, 9, 64), (1, 9), ValueError, "partial.lse.shape"),
    ((1, 9, 64), (1, 9, 2), ValueError, "partial.lse.shape"),
])  # fmt: skip
def test_bad_shapes(o, lse, error, message):
    with pytest.raises(error, match=message):
        inside(exchange_on(make_mesh(2)), jnp.zeros(o), jnp.zeros(lse))


@pytest.mark.parametrize(("o", "lse", "message"), [
    ("bfloat16", "float32", r"partial.o.dtype: got bfloat16; expected float32, as declared"),
    ("float32", "bfloat16", "partial.lse.dtype"),
])  # fmt: skip
def test_bad_dtypes(o, lse, message):
    with pytest.raises(TypeError, match=message):
        inside(exchange_on(make_mesh(2)), jnp.zeros((1, 9, 64), o), jnp.zeros((1, 9), lse))


def test_outside_shard_map():
    with pytest.raises(ValueError, match=r"inside jax\.shard_map over 'cp'"):
        exchange_on(make_mesh(2))(Partial(jnp.zeros((1, 9, 64)), jnp.zeros((1, 9)), LogBase.E))


def test_in_shard_map_over_another_mesh():
    exchange = exchange_on(make_mesh(2))
    step = lambda: exchange(Partial(jnp.zeros((1, 9, 64)), jnp.zeros((1, 9)), LogBase.E))[None]  # noqa: E731
    with pytest.raises(ValueError, match=r"a mesh of axes {'cp': 4}; expected {'cp': 2}"):
        jax.eval_shape(jax.shard_map(step, mesh=make_mesh(4), in_specs=(), out_specs=P("cp")))


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"heads": 0}, ValueError, "heads: got 0; expected an integer >= 1"),
    ({"head_dim": -64}, ValueError, "head_dim"),
    ({"max_tokens": 0}, ValueError, "max_tokens"),
    ({"max_tokens": True}, ValueError, "max_tokens"),
    ({"dtype": "int8"}, TypeError, "dtype: got 'int8'; expected one of bfloat16"),
    ({"dtype": "no such"}, TypeError, "dtype"),
    ({"axis_name": "tp"}, ValueError, r"axis_name: got 'tp'; expected one of the mesh's axes \('cp',\)"),
    ({"timeout_s": 0.0}, ValueError, "timeout_s"),
    ({"timeout_s": float("inf")}, ValueError, "timeout_s"),
    ({"timeout_s": 3e9}, ValueError, r"timeout_s: got 3000000000.0; expected 0.001 to 1e8 seconds"),
    ({"dtype": None}, TypeError, "dtype: got None"),
])  # fmt: skip
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        exchange_on(make_mesh(2), **changes)


def test_another_mesh_than_the_exchanges_own_is_refused():
    """The axis has the right name and size, but its groups are others: peers would be other devices."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    exchange = exchange_on(jax.sharding.Mesh(devices, ("dp", "cp")))
    o, lse = jnp.zeros((2, exchange.heads, exchange.head_dim), exchange.dtype), jnp.zeros((2, exchange.heads))
    other = jax.sharding.Mesh(devices, ("cp", "dp"))
    step = jax.shard_map(
        lambda o, lse: exchange(Partial(o, lse, LogBase.E)), mesh=other, in_specs=jax.P(), out_specs=jax.P(None, "cp")
    )
    with pytest.raises(
        ValueError, match=r"exchange: got a mesh of axes {'cp': 2, 'dp': 2}; expected {'dp': 2, 'cp': 2}"
    ):
        step(o, lse)


def test_spec_pads_heads():
    topology = Topology.of(make_mesh(4), "cp")
    spec = ExchangeSpec.of(topology, heads=9, head_dim=64, dtype="bfloat16", max_tokens=1)
    assert (spec.heads_per_rank, spec.padded_heads) == (3, 12)
    assert re.fullmatch(r"axis 'cp': 4 ranks on cpu.*, 1 group", str(topology))
