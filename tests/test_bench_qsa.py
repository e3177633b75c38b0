"""The QSA benchmark without a GPU: its programs, checks and records on a small layer, with times that are made up."""

import copy
import dataclasses
import functools
import io
import json

import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxcp import BackendError, JaxcpError
from jaxcp.bench import _measure, report
from jaxcp.bench._measure import DeviceTime
from jaxcp.bench.plot import FORMATS
from jaxcp.bench.qsa import checks, figures, floors, peers, plot, row_gather, run, selections, summary, table
from jaxcp.bench.qsa.cases import Case, make_inputs
from jaxcp.qsa import QSAConfig
from jaxcp.qsa.sparse import attend_rows

CONFIG = dataclasses.replace(
    QSAConfig.flash_next(), hidden=32, heads=6, head_dim=16, rotary_dim=8, mrope_section=(2, 1, 1), index_heads=2,
    index_dim=16, budget=32,
)  # fmt: skip
PREFILL, DECODE = Case(64, 256), Case(2, 128, 2)


def made_up(programs, **_):
    """Runs every program once; 1, 2, 3, ... ms."""
    times = []
    for i, program in enumerate(programs):
        result = jax.jit(program.fn, donate_argnums=tuple(range(program.carried)))(*program.args)
        result = result[-1] if program.carried else result
        times.append(DeviceTime(1e3 * (i + 1), (("kernel", 1.0, 1e3 * (i + 1)),), result, 3 << 20))
    return times


def measure(monkeypatch, wanted, **options):
    monkeypatch.setattr(_measure, "device_times", made_up)
    monkeypatch.setattr(_measure, "copy_rate", lambda: 4e12)
    return run.run(wanted, config=CONFIG, dtype="float32", models=("shared",), **options)


@functools.cache
def inputs():
    return make_inputs(PREFILL, CONFIG, "float32")


pytestmark = pytest.mark.xdist_group("bench_qsa")  # one worker: one record for all tests of this file


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "sub" / "qsa.json"
    console = Console(width=220, record=True, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        record = measure(patch, [PREFILL, DECODE], output=path, console=console)
    assert json.loads(path.read_text()) == record
    return record, console.export_text()


def test_a_record_has_every_part(recorded):
    prefill, decode = recorded[0]["cases"]
    parts = [(f["part"], f["name"], f["selection"]) for f in prefill["figures"]]
    assert parts == [
        ("select", "xla", None), ("mixer", "auto", "own"), ("projections", "xla", None), ("layer", "auto", "own"),
        ("select", "lax.top_k", None), ("attend", "xla", "own"),
    ]  # fmt: skip
    assert [f["part"] for f in decode["figures"]] == [part for part, *_ in parts]
    assert {"row gather", "cuDNN dense", "FlashInfer top-k", "attention by cuda"} <= prefill["left_out"].keys()
    assert prefill["union_tokens"]["shared"] < prefill["union_tokens"]["own"] <= 32
    assert decode["union_tokens"] == {}
    figure = prefill["figures"][0]
    assert figure["temporary_bytes"] == 3 << 20
    assert figure["of_floor"]["score products"] == pytest.approx(
        1e3 / floors.scoring(PREFILL, CONFIG)["score products"]
    )
    assert decode["figures"][1]["floors_us"].keys() == {"read once"}


def test_a_record_as_table_and_progress(recorded):
    record, shown = recorded
    assert "64 rows over 256 keys" in shown
    assert "mixer, auto, own: 2.000 ms" in shown
    assert "left out: row gather" in shown
    prefill = [line for line in table.lines(record) if line.case == "64 / 256"]
    assert [line.part for line in prefill] == list(table.PARTS.values())
    assert (prefill[0].ms, prefill[0].name, prefill[0].beside, prefill[0].mib) == ("1", "xla", "lax.top_k 5", "3")


def test_a_record_in_the_readme(recorded):
    """Own figures and peers by case, `-` for what was left out."""
    record = copy.deepcopy(recorded[0])
    [attend] = [f for f in record["cases"][0]["figures"] if f["part"] == "attend"]
    faster = attend | {"name": "cuda", "us": 250.0}
    record["cases"][0]["figures"] += [faster, faster | {"selection": "shared", "us": 125.0}]
    [row] = summary.prefill(record)
    cells = dict(zip(summary.PREFILL, row, strict=True))
    unions = record["cases"][0]["union_tokens"]
    assert cells["rows / keys"] == "64 / 256"
    assert cells["scoring + selection"].startswith("1 (")
    assert cells["attention: own"] == f"0.25 ({unions['own']:.0f})"
    assert cells["shared"] == f"0.125 ({unions['shared']:.0f})"
    assert (cells["lax.top_k"], cells["mixer"], cells["layer"]) == ("5", "2", "4")
    assert cells["row gather"] == cells["FlashInfer"] == cells["drift"] == "-"
    assert cells["MiB"] == "3 / 3 / 3"
    [row] = summary.decode(record)
    cells = dict(zip(summary.DECODE, row, strict=True))
    assert (cells["requests"], cells["layer"], cells["XLA's selection"]) == ("2", "4000", "1000")
    assert cells["mixer"].startswith("2000 (")
    markdown = report.markdown(record | {"environment": record["environment"] | {"xla_flags": "--one=2"}})
    assert "| 64 / 256 | 1 (" in markdown
    assert "6 heads of 16 on 2 KV heads" in markdown
    assert "`XLA_FLAGS=--one=2`" in markdown


def test_the_fastest_stands_in_front(recorded):
    record = copy.deepcopy(recorded[0])
    own = record["cases"][0]["figures"]
    attend = own[-1]
    own.append(attend | {"name": "cuda", "us": 250.0, "of_floor": {"gather per row": 1.5}})
    own.append(attend | {"name": "row gather", "us": 500.0, "peer": True})
    own.append(attend | {"name": "cuDNN dense", "us": 700.0, "peer": True, "selection": None})
    [line] = [line for line in table.lines(record) if line.case == "64 / 256" and line.part == "attention"]
    assert line[3:7] == ("0.25", "cuda", "xla 1, row gather 0.5, cuDNN dense 0.7", "1.50 gather per row")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_record_as_a_picture(recorded, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "new" / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        plot.draw(recorded[0], path)
    assert paths[0].stat().st_size > 1000
    if suffix == ".svg":
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert "scoring + selection" in paths[0].read_text()


def test_a_wrong_result_gives_no_figure(monkeypatch, tmp_path):
    """The other figures are measured and kept; the error comes at the end."""
    right = figures.ATTEND["xla"]
    monkeypatch.setitem(figures.ATTEND, "xla", right._replace(run=damaged(right.run)))
    path = tmp_path / "qsa.json"
    with pytest.raises(JaxcpError, match=r"xla is wrong for 64 rows over 256 keys: error"):
        measure(monkeypatch, [PREFILL], output=path)
    kept = {f["part"] for f in json.loads(path.read_text())["cases"][0]["figures"]}
    assert "attend" not in kept
    assert {"select", "projections"} <= kept


def test_a_case_that_fails_does_not_cost_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "Session", lambda case, options: (_ for _ in ()).throw(RuntimeError("no memory")))
    path = tmp_path / "qsa.json"
    with pytest.raises(JaxcpError, match=r"64 rows over 256 keys could not be measured: no memory.* 2 rows over"):
        measure(monkeypatch, [PREFILL, DECODE], output=path)
    assert json.loads(path.read_text())["cases"] == []


def damaged(attend):
    def wrong(*args):
        partial = attend(*args)
        return dataclasses.replace(partial, o=partial.o.at[-1, 0, 0].add(0.1))

    return wrong


@pytest.mark.parametrize(("damage", "message"), [
    (lambda ids: ids[:, ::-1], "row 0 selects"),
    (lambda ids: ids.at[5, -1].set(-1), "row 5 selects"),
    (lambda ids: ids.at[63, -1].set(64), "row 63 selects"),
    (lambda ids: jnp.broadcast_to(jnp.arange(8), ids.shape), "leaves out a score"),
])  # fmt: skip
def test_a_wrong_selection_is_seen(damage, message):
    right = figures.SELECT["xla"].run(*selecting())
    checks.selection("xla", inputs(), right)
    with pytest.raises(JaxcpError, match=message):
        checks.selection("xla", inputs(), damage(right))


def selecting():
    return inputs().projected.index_q, inputs().cache, inputs().layer, PREFILL.queries(inputs().table), CONFIG


@pytest.mark.parametrize("damage", [lambda o, lse: (o.at[0, 1, 2].set(np.nan), lse), lambda o, lse: (o, lse + 0.01)])
def test_wrong_attention_is_seen(damage):
    blocks = selections.model("shared", PREFILL.positions, CONFIG)
    arguments = (inputs().cache, inputs().layer, PREFILL.queries(inputs().table), CONFIG)
    right = figures.ATTEND["xla"].run(inputs().q, blocks, *arguments)
    checks.attention("xla", inputs(), blocks, (right.o, right.lse))
    with pytest.raises(JaxcpError, match="xla is wrong"):
        checks.attention("xla", inputs(), blocks, damage(right.o, right.lse))


def test_peers_compute_what_they_stand_for():
    """The row gather, interpreted, from the slots and the unpaged K and V it gets; top_k from its scores."""
    blocks = selections.model("random", PREFILL.positions, CONFIG)
    ids = jax.lax.top_k(peers.all_scores(inputs()), 8)[1]
    checks.ranked("lax.top_k", inputs(), ids)
    program = peers.gather(inputs(), (16, 4, 2))(blocks)
    q, k, v, slots, count = program.args
    o = row_gather.attend(q, k, v, slots, count, scale=CONFIG.scale, tuning=(16, 4, 2), interpret=True)
    checks.attention("row gather", inputs(), blocks, (o,))
    dense = jnp.stack([attend_rows(row, k, v, jnp.array(PREFILL.keys), CONFIG.scale)[0] for row in q])
    checks.dense("dense", inputs(), dense[None])
    with pytest.raises(JaxcpError, match="dense is wrong"):
        checks.dense("dense", inputs(), dense[None] + 0.1)


COMPILED = """
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from jaxcp.bench.qsa import row_gather

device = SingleDeviceSharding(mesh(cp=1).devices.flat[0])
shapes = [((64, 24, 256), "bfloat16"), *[((8192, 2, 256), "bfloat16")] * 2, ((64, 2051), "int32"), ((64,), "int32")]
arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=device) for shape, dtype in shapes]
target = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
attend = lambda *a, tuning: row_gather.attend(*a, scale=1 / 16, tuning=tuning)
with use_abstract_mesh(target):
    lowered = [jax.jit(lambda *a, t=t: attend(*a, tuning=t)).lower(*arguments) for t in row_gather.TILES]
answer(["row_gather_kernel" in program.compile().as_text() for program in lowered])
"""


@deviceless.requires_plugin
def test_the_row_gather_compiles_for_a_gpu(tmp_path):
    assert deviceless.run(COMPILED, tmp_path) == [True] * len(row_gather.TILES)


def test_models_share_as_they_say():
    unions = {
        name: selections.union_tokens(selections.model(name, PREFILL.positions, CONFIG), 4)
        for name in selections.MODELS
    }
    assert 32 / 4 <= unions["shared"] < unions["drift"] < unions["loose"] < unions["random"] <= 32


def test_union_of_rows():
    blocks = jnp.array([[0, 1], [1, 2], [0, -1], [-1, -1]] * 2)
    assert selections.union_tokens(blocks, 4) == 3 * 2 / 8 * 4


def test_cases():
    assert Case(8, 16, 2).positions.tolist() == [12, 13, 14, 15] * 2
    assert Case(8, 16, 2).table.tolist() == [[0, 4], [4, 4], [12, 12], [0, 1]]
    assert [case.rows for case in run.cases([2048, 1])] == [1, 2048]
    assert len(run.cases(quick=True)) == 2
    with pytest.raises(ValueError, match=r"rows: got \[7\]; expected some of \[1, 16, 32, 2048"):
        run.cases([7])
    for arguments in ((3, 16, 2), (40, 16, 2)):
        with pytest.raises(ValueError, match="rows: got"):
            Case(*arguments)


def test_floors_of_the_model():
    """Worked by hand from the geometry: 8192 rows of 32768 keys, all beyond the budget."""
    config, case = QSAConfig.flash_next(), run.SHARES[1]
    tokens = 8192 * 2048 + 8192 * 1.5
    assert floors.tokens(case, config).sum() == tokens
    assert floors.attention(case, config, 2) == pytest.approx(
        {"gather per row": tokens * 2048 / 8e6, "products": tokens * 4 * 24 * 256 / 790e6}
    )
    assert floors.projections(case.rows, config)["products"] == pytest.approx(1067, rel=1e-3)
    visible = sum((p + 1) // 4 for p in range(24576, 32768))
    assert floors.scoring(case, config)["score products"] == pytest.approx(visible * 1024 / 790e6)
    step = floors.reads(run.STEPS[1], config, 2, 4e12)
    assert step["mixer"] == pytest.approx(16 * (32768 * 256 + 2048 * 2048) / 4e6)


@pytest.mark.parametrize(("options", "message"), [
    ({"repeat": 0}, "repeat: got 0"),
    ({"models": ["sorted"]}, r"models: got \['sorted'\]; expected some of \['shared'"),
])  # fmt: skip
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        run.run([], **options)


def test_without_a_gpu():
    with pytest.raises(BackendError, match="kernels of GPUs only, and jax runs on 'cpu'"):
        run.run()


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_measures_on_a_gpu():
    record = run.run([run.SHARES[0]], models=("random",), repeat=3)
    [case] = record["cases"]
    assert case["left_out"].keys() <= {"FlashInfer top-k", "selection by flashinfer"}  # an extra
    assert all(f["us"] > 1 for f in case["figures"])
