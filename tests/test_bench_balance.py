"""What levelling the ranks' costs gains, on a CPU device: shares of all ranks, one program, the record; no times."""

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxcp import JaxcpError, cli, qsa
from jaxcp.bench import parts, report
from jaxcp.bench.prefill import balance, balance_table, run, share, whole
from jaxcp.bench.prefill.cases import SMALL, SMALL_CASES
from jaxcp.bench.prefill.clocks import Forward
from jaxcp.bench.prefill.options import Options

pytestmark = pytest.mark.xdist_group("bench_balance")  # one worker: one record for all tests of this file

RAGGED = SMALL_CASES["ragged"]
OPTIONS = Options(SMALL, layers=1, dtype="float32", repeat=3)


@functools.cache
def on_one_device():
    return whole.make_whole(RAGGED, SMALL, 1, "float32")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(record, its table, the programs that were timed)."""
    path, console = (
        tmp_path_factory.mktemp("record") / "balance.json",
        Console(width=240, record=True, file=io.StringIO()),
    )
    forwards = []

    def forward(program):
        forwards.append(Forward(program))
        return forwards[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_whole", lambda *_: on_one_device())
        patch.setattr(balance, "Forward", forward)
        record = run.run_balance(
            [RAGGED], options=OPTIONS, cp=[2], output=path, console=console, selected=["own", "shared"]
        )
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    return record, console.export_text(), forwards


def test_a_record_of_all_shares(recorded):
    record, shown, _ = recorded
    [case] = record["cases"]
    assert [(of["selection"], of["cut"]) for of in case["runs"]] == [
        ("own", "even"), ("own", "FLOP"), ("shared", "even"), ("shared", "FLOP")
    ]  # fmt: skip
    for of in case["runs"]:
        assert [rank["rank"] for rank in of["ranks"]] == [0, 1]
        assert sum(rank["rows"] for rank in of["ranks"]) == RAGGED.tokens
        attended = np.minimum(RAGGED.positions + 1, SMALL.budget).sum()
        assert sum(rank["tokens"] for rank in of["ranks"]) == attended
        assert sum(rank["blocks"] for rank in of["ranks"]) == ((RAGGED.positions + 1) // SMALL.ratio).sum()
    even, by_flop = case["runs"][:2]
    assert by_flop["modelled_imbalance"] < even["modelled_imbalance"]
    slowest = [max(rank["wall_ms"] for rank in of["ranks"]) for of in (even, by_flop)]
    assert by_flop["wall"]["max_ms"] == slowest[1]
    assert by_flop["wall"]["gain"] == pytest.approx(slowest[0] / slowest[1], abs=1e-3)
    assert by_flop["wall"]["imbalance"] >= even["wall"]["gain"] == 1.0
    assert "not a measurement: no GPU" in shown


def test_one_program_serves_all_ranks_and_cuts(recorded):
    [forward] = recorded[2]
    assert forward._jitted._cache_size() == 1


def test_cuts_are_those_of_a_plan():
    of, cost = on_one_device(), qsa.Cost.of(SMALL)
    plan = RAGGED.plan(of.cache, 2)
    want, got = RAGGED.plan(of.cache, 2, balance=cost), balance.cut(of, plan, cost)
    assert (got.rows, got.context) == (want.rows, want.context)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(want))
    even = balance.cut(of, plan, None)
    for rank in range(2):
        np.testing.assert_array_equal(RAGGED.split(even).runs(rank), RAGGED.split(plan).runs(rank))
    assert jax.tree.structure(even) == jax.tree.structure(got)


def test_wrong_shares_are_seen(monkeypatch):
    """Peers whose K and V lie with their neighbours."""

    def recorded(whole, plan, rank):
        peers = right(whole, plan, rank)
        return dataclasses.replace(peers, kv=jnp.roll(peers.kv, plan.local_rows, axis=1))

    right = share.recorded
    monkeypatch.setattr(share, "recorded", recorded)
    with pytest.raises(JaxcpError, match="ragged, rank 0 of 2, is not what one device computes"):
        balance.measured(on_one_device(), 2, ["own"], OPTIONS)


def test_a_cost_from_kernel_times():
    ranks = [
        {"tokens": n, "blocks": m, "layer_ms": {"attention": 2e-3 * n, "indexer": 0.5e-3 * m}}
        for n, m in ((900, 1000), (1100, 800))
    ]
    cost = balance.fitted(SMALL, ranks)
    assert cost is not None
    assert (cost.token, cost.block) == pytest.approx((2.0, 0.5))
    assert (cost.budget, cost.ratio) == (SMALL.budget, SMALL.ratio)
    assert balance.fitted(SMALL, [*ranks, {"tokens": 1, "blocks": 1, "wall_ms": 1.0}]) is None


def test_gains():
    even = {"ranks": [{"wall_ms": 2.0, "device_ms": 1.0}, {"wall_ms": 4.0, "device_ms": 2.0}]}
    level = {"ranks": [{"wall_ms": 3.2, "device_ms": 1.6}, {"wall_ms": 3.0}]}
    assert balance.gains(level, even) == {"wall": {"max_ms": 3.2, "mean_ms": 3.1, "imbalance": 1.0323, "gain": 1.25}}, (
        "a clock that a rank lacks is left out"
    )


def test_with_kernel_times_batches_are_cut_by_them(monkeypatch):
    """The table of a GPU; the times are made up, and attention alone has any."""
    times = iter(range(1, 9))
    layer = dict.fromkeys(parts.PARTS, 0.0)

    def clocked(forward, options):
        us = float(next(times))
        return {"wall_ms": us, "device_ms": us, "mixer_ms": us, "layer_ms": layer | {"attention": us}}

    monkeypatch.setattr(balance, "clocked", clocked)
    case = balance.measured(on_one_device(), 2, ["shared"], OPTIONS)
    assert [of["cut"] for of in case["runs"]] == ["even", "FLOP", "measured"]
    assert (case["runs"][2]["cost"]["token"] > 0, case["runs"][2]["cost"]["block"]) == (True, 0)
    assert [of["mixer"]["gain"] for of in case["runs"]] == [1.0, 0.5, 0.3333]
    environment = {"device_kind": "a GPU", "xla_flags": ""}
    record = {"benchmark": "prefill_balance", "date": "2026-12-01", "command": "c", "environment": environment}
    record |= OPTIONS.facts() | {"cases": [case]}
    line = dict(zip(balance_table.HEADING, [*balance_table.lines(record)][2], strict=True))
    assert (line["cut"], line["mixer ms"], line["mixer max / mean"], line["mixer gain"]) == (
        "measured", "6", "1.091", "0.333"
    )  # fmt: skip
    assert "| ragged | 2 |" in report.markdown(record)


def test_a_picture_is_refused(tmp_path):
    done = CliRunner().invoke(cli.app, ["bench", "prefill", "--small", "--balance", "--plot", str(tmp_path / "a.svg")])
    assert done.exit_code == 2
    assert "expected no --balance with it" in " ".join(done.stderr.split())
