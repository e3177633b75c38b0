"""Early gathers on virtual devices, and reports: of HLO written out, and of programs compiled here."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import overlap
from jaxcp.errors import BackendError
from jaxcp.overlap import copy_engines

HLO = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[8]{0}}

%body.1 (arg.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.1 = (s32[], f32[4]{0}) parameter(0)
  %x.1 = f32[4]{0} get-tuple-element(%arg.1), index=1
  %ag-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x.1), dimensions={0}, frontend_attributes={combiner_key="kv"}
  %top = f32[4]{0} custom-call(%x.1), custom_call_target="select", metadata={op_name="jit(f)/ffi_call"}
  %sum.1 = f32[4]{0} fusion(%top), kind=kLoop, calls=%sums, metadata={op_name="jit(f)/while/body/reduce_sum"}
  %sum.2 = f32[4]{0} fusion(%sum.1), kind=kLoop, calls=%sums, metadata={op_name="jit(f)/while/body/reduce_sum"}
  %ag-done = f32[8]{0} all-gather-done(%ag-start)
  %view = f32[2,4]{1,0} bitcast(%ag-done)
  %use = f32[4]{0} fusion(%view, %sum.2), kind=kLoop, calls=%sums, metadata={op_name="jit(f)/scatter"}
  ROOT %out.1 = (s32[], f32[4]{0}) tuple(%i, %use)
}

ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %sync = f32[8]{0} all-gather(%p), dimensions={0}
  %pair-start = ((f32[4]{0}, f32[4]{0}), (f32[8]{0}, f32[8]{0})) all-gather-start(%p, %p), dimensions={0}
  %pair-done = (f32[8]{0}, f32[8]{0}) all-gather-done(%pair-start)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %r = f32[8]{0} fusion(%sync), kind=kLoop, calls=%last
}
"""


def test_report_of_a_schedule():
    inside, sync, pair = overlap.report(HLO).collectives
    assert (inside.kind, inside.shape, inside.key, inside.times) == ("all-gather", "f32[8]", "kv", 12)
    assert inside.asynchronous
    assert [o.what for o in inside.behind] == ["select", "reduce_sum", "reduce_sum"]
    assert [o.name for o in inside.consumers] == ["use"]
    assert inside.following == inside.consumers[0]
    assert (sync.asynchronous, sync.behind, sync.times, sync.key) == (False, (), 1, None)
    assert [o.name for o in sync.consumers] == ["r"]
    assert not pair.asynchronous, "a start with nothing behind it is waited for"
    assert pair.shape == "(f32[8], f32[8])"
    assert str(overlap.report(HLO)).splitlines() == [
        "12 x all-gather f32[8]: behind select, reduce_sum x 2",
        "all-gather f32[8]: waited for",
        "all-gather (f32[8], f32[8]): waited for",
    ]


def test_readers_of_an_element_of_a_tuple():
    """What jax 0.11 leaves of an optimization barrier."""
    hlo = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %other = f32[4]{0} fusion(%p), kind=kLoop, calls=%a
  %gathered = f32[8]{0} all-gather(%p), dimensions={0}
  %both = (f32[4]{0}, f32[8]{0}) tuple(%other, %gathered)
  %again = (f32[4]{0}, f32[8]{0}) opt-barrier(%both)
  %first = f32[4]{0} get-tuple-element(%again), index=0
  %second = f32[8]{0} get-tuple-element(%again), index=1
  %apart = f32[4]{0} fusion(%first), kind=kLoop, calls=%b
  ROOT %reader = f32[8]{0} fusion(%second, %apart), kind=kLoop, calls=%c
}
"""
    [gather] = overlap.report(hlo).collectives
    assert [o.name for o in gather.consumers] == ["reader"]


def test_a_loop_of_unknown_length():
    unknown = HLO.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    assert overlap.report(unknown).collectives[0].times is None
    assert str(overlap.report(unknown)).startswith("? x all-gather")


def test_report_refuses_what_has_no_schedule():
    with pytest.raises(ValueError, match="without a schedule"):
        overlap.report("HloModule jit_f\n")
    with pytest.raises(TypeError, match="compiled: got function"):
        overlap.report(lambda: 0)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("cp",))


def test_report_of_a_program_compiled_here(mesh):
    def step(x):
        after, rows = overlap.start_early(x, "cp", after=x * 2)
        return rows.sum(0) + after

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))
    report = overlap.report(mapped.lower(jnp.zeros((8, 3))).compile())
    assert [(c.kind, c.shape) for c in report.collectives] == [("all-gather", "f32[8,3]")]
    assert report.collectives[0].times == 1
    assert str(overlap.report(jax.jit(jnp.sin).lower(1.0).compile())) == "no collective"


@pytest.mark.parametrize("name", overlap.SCHEDULES)
def test_every_schedule_gathers_both(mesh, name):
    small, large, local = (jnp.asarray(np.random.default_rng(i).normal(size=(8, i + 1))) for i in range(3))

    def step(small, large, local):
        index, (kept,), finish = overlap.SCHEDULES[name](small, large, (local,), "cp")
        rows, work = finish(kept * index.sum())
        return index, rows, work

    rows = P("cp")
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(rows, rows, rows), out_specs=(P(), P(), rows)))
    index, gathered, work = run(small, large, local)
    np.testing.assert_array_equal(index, small)
    np.testing.assert_array_equal(gathered, large)
    np.testing.assert_allclose(work, local * small.sum(), rtol=1e-5)


def test_after_is_any_tree(mesh):
    def step(x):
        after, rows = overlap.start_early(x, "cp", after={"a": x + 1, "b": [lax.axis_index("cp")[None]]})
        return after, rows

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("cp"), out_specs=(P("cp"), P())))
    after, rows = run(jnp.arange(8.0))
    assert after["b"][0].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(rows, np.arange(8))


def test_overlap_is_a_public_name():
    assert jaxcp.overlap is overlap


def versions(monkeypatch, nccl):
    """An installation with this NCCL wheel, or with none at all."""

    def version(wheel):
        if nccl is None or wheel != "nvidia-nccl-cu13":
            raise importlib.metadata.PackageNotFoundError(wheel)
        return nccl

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(copy_engines.importlib.metadata, "version", version)
    monkeypatch.setattr(copy_engines.ctypes, "CDLL", missing)


@pytest.mark.parametrize("way", copy_engines.WAYS)
def test_options_of_gathers_by_copy_engines(way, monkeypatch):
    versions(monkeypatch, "2.28.3")
    options = overlap.sm_free(way)
    assert options == copy_engines.WAYS[way]
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)


@pytest.mark.parametrize(("nccl", "match"), [("2.27.7", r"NCCL is 2\.27\.7; expected >= 2\.28"), (None, "not found")])
def test_an_old_nccl_is_named(nccl, match, monkeypatch):
    versions(monkeypatch, nccl)
    with pytest.raises(BackendError, match=match):
        overlap.sm_free()


def test_an_option_that_xla_lacks_is_named(monkeypatch):
    versions(monkeypatch, "2.30.1")
    monkeypatch.setitem(copy_engines.WAYS, "nccl", {"xla_gpu_no_such_option": True})
    with pytest.raises(BackendError, match="no option xla_gpu_no_such_option"):
        overlap.sm_free()


def test_another_way_is_refused():
    with pytest.raises(ValueError, match=r"way: got 'smoke'; expected one of \['nccl', 'one_sided'\]"):
        overlap.sm_free("smoke")
