"""The prefill benchmark on CPU devices: its programs, checks, records and how kernels become parts; no times."""

import dataclasses
import functools
import io
import json

import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import prefill_program
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxcp import BackendError, JaxcpError, cli, overlap, qsa
from jaxcp.bench import parts, report
from jaxcp.bench.prefill import checks, clocks, plot, ranks, ranks_plot, ranks_table, run, share, table, whole
from jaxcp.bench.prefill.cases import CASES, SMALL, SMALL_CASES, named
from jaxcp.bench.prefill.options import Options, of_device
from jaxcp.bench.trace import Launch
from jaxcp.overlap.hlo import parsed
from jaxcp.qsa import QSAConfig

pytestmark = pytest.mark.xdist_group("bench_prefill")  # one worker: one record for all tests of this file

RAGGED = SMALL_CASES["ragged"]
OPTIONS = Options(SMALL, layers=1, dtype="float32", repeat=3)


@functools.cache
def mine():
    return share.make_share(whole.make_whole(RAGGED, SMALL, 1, "float32"), 2)


@functools.cache
def forward():
    return clocks.Forward(share.stack(mine(), share.selection(mine(), "own")))


def recording(tmp_path_factory, measure, **arguments):
    """(record, its table, progress) of the ragged case."""
    path, said = tmp_path_factory.mktemp("record") / "sub" / "prefill.json", []
    console = Console(width=240, record=True, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_whole", lambda *_: mine().whole)
        options = dataclasses.replace(OPTIONS, say=said.append)
        record = measure([RAGGED], options=options, cp=[2], output=path, console=console, **arguments)
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    return record, console.export_text(), said


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return recording(tmp_path_factory, run.run_shares, selected=["own", "shared"])


@pytest.fixture(scope="module")
def recorded_ranks(tmp_path_factory):
    return recording(tmp_path_factory, run.run_ranks, ways=["local", "overlapped", "copy engines, nccl"])


def test_a_record_of_a_share(recorded):
    record, shown, said = recorded
    [case] = record["cases"]
    assert (record["measurement"], record["layers"], case["cp"], case["rows"]) == (False, 1, 2, mine().rows)
    assert case["agreement"]["rows"] == mine().rows
    assert case["plan_us"] > 0
    assert [of["selection"] for of in case["runs"]] == ["own", "shared"]
    assert all(0 < of["host_us"] <= 1e3 * of["wall_ms"] and "layer_ms" not in of for of in case["runs"])
    assert "not a measurement: no GPU" in shown
    assert said[0] == "ragged: on one device"


def test_a_share_is_a_rank_of_the_batch():
    """The last rows of one layer are x + y of one device; attention reads the selection it is given."""
    rank, forwards = mine(), []
    for name in ("random", "own"):
        forward().arguments(share.stack(rank, share.selection(rank, name)))
        forwards.append(np.asarray(forward().result)[: rank.rows])
    want = share.own_rows(rank.plan, rank.whole.x + rank.whole.y, rank.rank)[: rank.rows]
    np.testing.assert_allclose(forwards[1], want, atol=1e-5)
    long = rank.positions[: rank.rows] >= SMALL.row_width
    assert (np.abs(forwards[0] - want)[long].max(1) > 1e-3).all()
    np.testing.assert_allclose(forwards[0][~long], want[~long], atol=1e-5)


@pytest.mark.parametrize(("field", "match"), [("kv", "swapped_error|error"), ("index", "gap|swapped_error|error")])
def test_wrong_rows_of_peers_are_seen(field, match):
    right = mine()
    checks.first_layer_agrees(right)
    shifted = jnp.roll(getattr(right.peers, field), right.plan.local_rows, axis=1)
    wrong = dataclasses.replace(right, peers=dataclasses.replace(right.peers, **{field: shifted}))
    with pytest.raises(JaxcpError, match=rf"ragged, rank \d of 2, is not what one device computes: ({match})"):
        checks.first_layer_agrees(wrong)


def test_a_case_that_fails_does_not_cost_the_others(monkeypatch, tmp_path):
    def fails(of, *_):
        if of is RAGGED:
            raise RuntimeError("no memory")
        return dataclasses.replace(mine().whole, case=of)

    monkeypatch.setattr(run, "make_whole", fails)
    monkeypatch.setattr(run.shares, "measured", lambda of, cp, *_: {"case": of.case.name, "cp": cp})
    path = tmp_path / "prefill.json"
    with pytest.raises(JaxcpError, match="ragged could not be measured: no memory"):
        run.run_shares([RAGGED, SMALL_CASES["96"]], options=OPTIONS, cp=[2], output=path)
    assert json.loads(path.read_text())["cases"] == [{"case": "96", "cp": 2}]


def launches(us, operation, name, module="jit_run", stream="Stream #1", traced=""):
    return [Launch("/device:GPU:0", 10.0 * i, t, stream, module, operation, traced, name) for i, t in enumerate(us)]


def test_a_layer_is_the_sum_of_its_parts():
    """Medians per operation, by the part in which it was traced; what the program does not know, by its name."""
    known = {"dot.1": "projections", "select.1": "indexer"}
    device = clocks.device_of(
        [
            *launches([4.0, 6.0, 50.0], "dot.1", "nvjet_a"),
            *launches([1.0] * 6, "select.1", "top_blocks"),
            *launches([2.0] * 3, "other", "attend_hopper<256>"),
            *launches([3.0] * 3, "", "loop_fusion", module="jit_other"),
        ],
        3,
        known,
    )
    assert device.parts == {"projections": 6.0, "indexer": 2.0, "attention": 2.0, "gathers": 0.0, "rest": 3.0}
    assert (device.us, device.programs) == (13.0, 2.0)
    assert device.kernels[0] == ("nvjet_a", 1.0, 6.0)
    figures = of_device(device, 2)
    assert figures["mixer_ms"] == 0.0035
    assert figures["layer_ms"]["projections"] == 0.003


def test_a_profile_that_lacks_kernels_is_not_taken():
    hlo = """HloModule jit_run, is_scheduled=true

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %call.1 = f32[4]{0} custom-call(%p), custom_call_target="select", metadata={op_name="jit(f)/qsa_indexer/ffi_call"}
  %other = f32[4]{0} custom-call(%call.1), custom_call_target="sort", metadata={op_name="jit(f)/sort"}
  ROOT %f = f32[4]{0} fusion(%other), kind=kLoop, calls=%sums
}
"""
    clocks.check_complete(hlo, launches([1.0], "call.1", "top_blocks"))
    with pytest.raises(BackendError, match=r"the profile lacks call\.1 \(1 operations in all\); expected every"):
        clocks.check_complete(hlo, launches([1.0], "f", "fusion"))


def test_parts_of_a_program():
    """Scopes of the layer's own code, in a program compiled here."""
    assert set(parts.of_program(parsed(forward().compiled.as_text())).values()) == set(parts.PARTS)


def test_a_product_that_reads_a_slice_in_place():
    """XLA puts it into a fusion of which it does not say where it was traced."""
    hlo = """HloModule jit_run, is_scheduled=true

%in_place (a: f32[4], b: f32[2,4]) -> f32[4] {
  %b = f32[2,4]{1,0} parameter(1)
  %part = f32[4]{0} slice(%b), slice={[0:1], [0:4]}
  ROOT %product = f32[4]{0} custom-call(%part), metadata={op_name="jit(f)/qsa_projections/dot_general"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %dynamic_slice_fusion = f32[4]{0} fusion(%p), kind=kCustom, calls=%in_place
}
"""
    assert parts.of_program(parsed(hlo))["dynamic_slice_fusion"] == "projections"


def test_parts_by_name():
    named_parts = {
        "ncclDevKernel_AllGather_RING_LL": "gathers", "void jaxcp::qsa::stream_blocks<1>": "indexer",
        "void jaxcp::qsa::attend_hopper<256>": "attention", "nvjet_sm90_tst": "projections", "loop_add_fusion": "rest",
    }  # fmt: skip
    for name, part in named_parts.items():
        assert parts.of_launch(launches([1.0], "", name)[0]) == part
    scoped = launches([1.0], "", "loop_add_fusion", traced="jit(f)/qsa_indexer/add")[0]
    assert parts.of_launch(scoped) == "indexer"


def test_the_table_of_a_gpu(recorded):
    record = json.loads(json.dumps(recorded[0])) | {"measurement": True}
    [case] = record["cases"]
    case |= {"published_ms": 1.791, "goals_ms": {"own": 0.8}, "projections_floor_ms": 0.25}
    figures = dict.fromkeys(parts.PARTS, 0.5) | {"attention": 1.0}
    case["runs"] = [case["runs"][0] | {"device_ms": 24.0, "layer_ms": figures, "mixer_ms": 1.5}]
    [line] = table.lines(record)
    cells = dict(zip(table.HEADING, line, strict=True))
    assert (cells["forward ms"], cells["projections"], cells["attention"]) == ("24", "0.5 (2.00×)", "1")
    assert (cells["mixer"], cells["goal"], cells["published"]) == ("1.5", "0.8", "1.79")
    markdown = report.markdown(record)
    assert "| ragged | 2 |" in markdown
    assert "1 layers in one program: 6 heads of 16" in markdown


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_records_as_pictures(recorded, recorded_ranks, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    for drawn, (record, *_) in ((plot, recorded), (ranks_plot, recorded_ranks)):
        for name in "ab":
            drawn.draw(record, tmp_path / f"{name}{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_record_of_all_ranks(recorded_ranks):
    record, shown, said = recorded_ranks
    [case] = record["cases"]
    ways = {of["way"]: of for of in case["runs"]}
    assert ways.keys() | case["left_out"].keys() == {"local", "overlapped", "copy engines, nccl"}
    assert ways["local"]["exposed_ms"] == 0
    more = ways["overlapped"]["wall_ms"] - ways["local"]["wall_ms"]
    assert ways["overlapped"]["exposed_ms"] == pytest.approx(more, abs=1e-3)
    assert ways["overlapped"]["equal_rows"] >= case["rows"] / 2
    assert f"  {RAGGED.tokens} of {RAGGED.tokens} rows select exactly what one device selects" in said
    assert "not a measurement: no GPU" in shown
    [line] = [line for line in ranks_table.lines(record) if line[2] == "overlapped"]
    assert line[:3] == ["ragged", "2", "overlapped"]
    assert "| ragged | 2 | overlapped |" in report.markdown(record)


def test_wrong_ranks_are_seen(monkeypatch):
    """A gather that hands every rank's rows to its neighbour."""

    def swapped(small, large, local, axis_name):
        small, local, finish = overlap.SCHEDULES["overlapped"](small, large, local, axis_name)
        return small, local, lambda work: (jnp.roll(finish(work)[0], len(large), axis=0), work)

    monkeypatch.setitem(overlap.SCHEDULES, "swapped", swapped)
    with pytest.raises(JaxcpError, match="ragged, rank 0 of 2, is not what one device computes"):
        ranks.first_layers_agree(ranks.make_ranks(mine().whole, 2), "swapped")
    rows = np.ones((4, 2))
    with pytest.raises(JaxcpError, match="ragged, inline: error 1"):
        ranks._equal_rows(mine().whole, "inline", rows * 2, rows)


COMPILED = """
from jaxcp.bench.prefill.recorded import Recorded
from jaxcp.qsa.layers import add, stacked
from jaxcp.qsa.prefill import layer_of

index, kv = (F((LAYERS + 1, plan.rows, features), jnp.bfloat16) for features in (128, 1024))
number, chosen = F((), jnp.int32), F((plan.local_rows, 512), jnp.int32)
peers = Recorded(index, kv, number, number, chosen)

def share(cache, params, x, plan, peers):
    return stacked(layer_of(plan, cache, peers, "auto"), params, x, cache, add, scan=False)

own = F((plan.local_rows, CONFIG.hidden), jnp.bfloat16)
one_device = [SingleDeviceSharding(M.devices.flat[0])] * 5
answer({"share": text(share, 0, one_device, (cache, params, own, plan, peers)), "ranks": ranks()})
"""


@deviceless.requires_plugin
def test_a_share_computes_what_a_rank_computes(tmp_path):
    """Products and kernels of the program for one rank of eight, gathers apart; compiled for a GPU."""
    programs = deviceless.run(prefill_program.SNIPPET + COMPILED, tmp_path, timeout_s=300)
    kernels = "prepare", "store_index", "select", "store_kv", "mix"
    work = " dot(", *(f'target="jaxcp_qsa_{name}"' for name in kernels)
    counts = {name: [hlo.count(each) for each in work] for name, hlo in programs.items()}
    assert counts["share"] == counts["ranks"] == [6, 2, 2, 2, 2, 2]
    for program in programs.values():
        assert set(parts.of_program(parsed(program)).values()) == set(parts.PARTS)
    assert "bf16[3,8192,1024]{2,1,0} copy(" not in programs["share"]


def test_cases():
    assert [case.name for case in named(["32K", "8K"], CASES)] == ["8K", "32K"]
    assert (CASES["8K+56K"].longest, CASES["4x8K"].tokens, CASES["ragged"].longest) == (65536, 32768, 5192)
    with pytest.raises(ValueError, match=r"cases: got \['9K'\]; expected some of \['8K'"):
        named(["9K"], CASES)


def test_the_first_rank_has_least_to_do():
    """A first block sees little: by FLOP another rank is the busiest (docs/prefill.md)."""
    config = QSAConfig.flash_next()
    assert CASES["8K"].busiest(config, qsa.plan([8192], cp=4)) != 0
    assert CASES["8K+56K"].busiest(config, qsa.plan([8192], [57344], cp=8)) in range(8)


@pytest.mark.parametrize(("measure", "arguments", "message"), [
    (run.run_shares, {"cp": [1]}, "cp: got 1; expected two ranks"),
    (run.run_shares, {"selected": ["sorted"]}, r"selected: got \['sorted'\]; expected some of \['own'"),
    (run.run_ranks, {"cp": [0]}, "cp: got 0"),
    (run.run_ranks, {"cp": [2], "ways": ["late"]}, r"ways: got \['late'\]; expected some of \['local', 'overlapped'"),
])  # fmt: skip
def test_bad_arguments(measure, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure([], options=OPTIONS, **({"cp": [2]} | arguments))


@pytest.mark.parametrize("name", ["repeat", "layers"])
def test_bad_options(name):
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        Options(SMALL, **{name: 0})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine on which jax sees no GPU")
def test_the_command_without_a_gpu():
    result = CliRunner().invoke(cli.app, ["bench", "prefill"])
    assert result.exit_code == 2
    assert "jax runs on 'cpu' here. --small shows the benchmark at work" in result.stderr
