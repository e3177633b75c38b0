"""Pictures of records: what is drawn, from which files, and what is refused."""

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from jaxcp import BackendError, cli
from jaxcp.bench import pictures, plot, ranks, ranks_plot, report


def row(backend, tokens, kernel_us, cadence_us, floor_us=0.5):
    times = {"kernel_us": kernel_us, "cadence_us": cadence_us, "eager_us": 9.0, "floor_us": floor_us}
    return {"backend": backend, "cp": 2, "tokens": tokens} | times


RECORD = {
    "benchmark": "exchange", "cp": 2, "heads": 32, "dim": 512, "dtype": "bfloat16", "layers": 60,
    "date": "2026-11-30T12:00:00", "command": "jaxcp bench exchange --cp 2", "environment": {"device_kind": "H200"},
    "rows": [row("fused", 8, 3.0, 4.0), row("fused", 1, 2.0, 3.0), row("a2a", 8, 6.0, 7.0, 0.5)],
}  # fmt: skip
"""Stopped before the a2a of one token."""


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "exchange.json"
    path.write_text(json.dumps(RECORD))
    return path


def drawn(*arguments):
    return CliRunner().invoke(cli.app, ["plot", "record", *map(str, arguments)])


def test_lines_of_an_exchange():
    floor = {ranks_plot.FLOOR: [(1, 0.5), (8, 0.5)]}
    assert ranks_plot.series(RECORD, "kernel_us") == {"fused": [(1, 2.0), (8, 3.0)], "a2a": [(8, 6.0)]} | floor
    assert ranks_plot.series(RECORD, "cadence_us")["a2a"] == [(8, 7.0)]
    on_cpu = RECORD | {"rows": [row("a2a", 1, None, 7.0, None)]}
    assert ranks_plot.series(on_cpu, "kernel_us") == {}
    assert ranks_plot.series(on_cpu, "cadence_us") == {"a2a": [(1, 7.0)]}


def test_an_exchange_is_drawn_on_logarithmic_axes(needs_matplotlib, file, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    paths = [file.parent / "new" / f"{name}.svg" for name in "ab"]
    for path in paths:
        assert drawn(file, path).exit_code == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    for axis, clock in zip(figures[0].axes, ranks_plot.CLOCKS, strict=True):
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
        lines = {line.get_label(): list(map(tuple, line.get_xydata())) for line in axis.lines}
        assert lines == ranks_plot.series(RECORD, clock)
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["fused", "a2a", ranks_plot.FLOOR]


def test_every_backend_has_a_look(needs_matplotlib, tmp_path):
    rows = [row(backend, tokens, None, 2.0) for backend in ranks.BACKENDS for tokens in (1, 2)]
    ranks_plot.draw(RECORD | {"rows": rows}, tmp_path / "a.svg")
    assert "kernels of a layer, slowest rank (not measured)" in (tmp_path / "a.svg").read_text()


def test_the_table_of_a_record_that_was_stopped():
    assert "| a2a |  | 6.0 / 7.0 / 9.0 |" in report.markdown(RECORD)


BAD = {
    "format": ("a.txt", RECORD, "plot: got '.txt'; expected a file named .svg or .png or .pdf"),
    "kind": ("a.svg", {"benchmark": "lse_merge"}, "benchmark = 'lse_merge'; expected one of ['exchange', 'prefill_"),
    "no record": ("a.svg", [1], "benchmark = None; expected one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_drawn(case, file, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    name, record, message = BAD[case]
    file.write_text(json.dumps(record))
    result = drawn(file, file.with_name(name))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not file.with_name(name).exists()


def test_what_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "half.json").write_text('{"benchmark": "exch')
    with pytest.raises(ValueError, match=r"half.json; expected a JSON file of a benchmark"):
        pictures.draw(tmp_path / "half.json", tmp_path / "a.svg")
    assert drawn(tmp_path / "none.json", tmp_path / "a.svg").exit_code == 2


def test_matplotlib_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'jaxcp\[bench\]'"):
        plot.check("a.svg")
