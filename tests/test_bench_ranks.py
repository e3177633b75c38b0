"""`jaxcp bench exchange --cp N` on CPU devices: what is run, checked and recorded; kernel times need GPUs."""

import functools
import io
import json
import pathlib

import numpy as np
import pytest
from fused_calls import RANKS, needs_peers
from rich.console import Console
from typer.testing import CliRunner

from jaxcp import JaxcpError, cli
from jaxcp.bench import _measure, pictures, ranks, report
from jaxcp.exchange.api import Exchange
from jaxcp.topology import make_mesh

pytestmark = needs_peers


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
    monkeypatch.setattr(ranks, "LAYERS", 4)
    monkeypatch.setattr(ranks, "FEWER_LAYERS", 2)


def exchange_of(backend):
    return Exchange(make_mesh(2), "cp", max_tokens=4, heads=4, head_dim=64, dtype="bfloat16", backend=backend)


@pytest.mark.parametrize(
    ("backend", "instruction"),
    [("fused", 'custom_call_target="jaxcp_fused"'), ("a2a", " all-to-all("), ("ag_rs", " reduce-scatter(")],
)
def test_every_layer_is_an_exchange_of_its_own(backend, instruction):
    exchange = exchange_of(backend)
    program = ranks.layers(exchange, 4).lower(*ranks.partials(exchange, 2)).compile()
    assert program.as_text().count(instruction) == 4


def test_figures_of_all_backends(tmp_path):
    console, progress = (Console(width=200, file=io.StringIO(), record=True) for _ in range(2))
    consoles = {"console": console, "progress": progress}
    recorded = ranks.run(
        2, tokens=(1, 3), heads_per_rank=2, dim=64, repeat=2, output=tmp_path / "exchange.json", **consoles
    )
    assert json.loads((tmp_path / "exchange.json").read_text()) == recorded
    assert [(row["backend"], row["tokens"]) for row in recorded["rows"]] == [
        (backend, tokens) for backend in ("fused", "a2a", "ag_rs") for tokens in (1, 3)
    ]
    said = progress.export_text()
    assert "flashinfer: not measured, " in said
    assert "ag_rs, 3 tokens: kernel / cadence / eager - / " in said
    shown = console.export_text()
    assert "exchange over 2 ranks" in shown
    assert "not measured" not in shown
    assert all(row["eager_us"] > 0 for row in recorded["rows"])
    assert "| ag_rs |" in report.markdown(recorded)


def test_what_was_measured_survives_the_end(tmp_path, monkeypatch):
    """A run that is stopped leaves the rows before, and the file is whole at any moment."""
    file, times = tmp_path / "exchange.json", {"kernel_us": None, "cadence_us": 1.0, "eager_us": 2.0}
    found = []

    def measured(exchange, tokens, repeat):
        found.append(len(json.loads(file.read_text())["rows"]) if file.exists() else 0)
        if len(found) == 4:
            raise KeyboardInterrupt
        return times

    monkeypatch.setattr(ranks, "_measured", measured)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(2, tokens=(1, 2), heads_per_rank=2, dim=64, output=file)
    assert found == [0, 1, 2, 3]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["backend"], row["tokens"]) for row in rows] == [("fused", 1), ("fused", 2), ("a2a", 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["exchange.json"]


def test_a_record_is_replaced_as_a_whole(tmp_path, monkeypatch):
    _measure.write(tmp_path / "a.json", {"rows": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda *_, **__: "half")
        patch.setattr(pathlib.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _measure.write(tmp_path / "a.json", {"rows": [1, 2]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"rows": [1]}
    _measure.write(tmp_path / "a.json", {"rows": [1, 2]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"rows": [1, 2]}


def jaxcp(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "exchange", *map(str, arguments)])


def test_the_command_draws_what_it_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ranks, "run", functools.partial(ranks.run, heads_per_rank=2, dim=64))
    files = tmp_path / "a.json", tmp_path / "a.svg", tmp_path / "b.svg"
    result = jaxcp("--cp", 2, "--tokens", 1, "--repeat", 1, "--output", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.output
    assert "a2a, 1 tokens: " in result.stderr
    assert "exchange over 2 ranks" in result.stdout
    assert "tokens: " not in result.stdout
    pictures.draw(files[0], files[2])
    assert files[1].read_bytes() == files[2].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--cp", 2, "--plot", "a.txt"), "plot: got '.txt'"), (("--cp", 1, "--plot", "a.svg"), "plot: got a.svg")],
)
def test_the_command_measures_nothing_that_it_could_not_draw(arguments, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(ranks, "run", None)
    result = jaxcp(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_layer_is_the_sum_of_its_kernels():
    found = ranks._of_a_layer([("exchange_kernel<8>", [3.0] * 8), ("copy", [1.0] * 4)], layers_run=4)
    assert (found["us"], found["own_us"]) == (7.0, 6.0)
    assert found["kernels"] == ["1 x copy: 1.000 us", "2 x exchange_kernel<8>: 3.000 us"]


def test_a_wrong_result_gives_no_figure():
    exchange = exchange_of("a2a")
    merged = ranks.layers(exchange, 1)(*ranks.partials(exchange, 2))
    ranks._check(exchange, merged, 2)
    with pytest.raises(JaxcpError, match="a2a is wrong on rank 1 with 2 tokens"):
        ranks._check(exchange, merged.at[1, 0, 0, 0].add(np.float32(0.5).astype(merged.dtype)), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"cp": 0}, "cp: got 0"), ({"cp": 99}, "cp: got 99"), ({"cp": RANKS, "tokens": [0]}, "tokens: got 0")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ranks.run(**arguments)
