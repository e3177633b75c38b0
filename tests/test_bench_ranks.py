"""`jaxcp bench exchange --cp N` on CPU devices: what is run, checked and recorded; kernel times need GPUs."""

import json

import numpy as np
import pytest
from fused_calls import RANKS, needs_peers
from rich.console import Console

from jaxcp import JaxcpError
from jaxcp.bench import ranks, report
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
    console = Console(width=200, record=True)
    recorded = ranks.run(
        2, tokens=(1, 3), heads_per_rank=2, dim=64, repeat=2, output=tmp_path / "exchange.json", console=console
    )
    assert json.loads((tmp_path / "exchange.json").read_text()) == recorded
    assert [(row["backend"], row["tokens"]) for row in recorded["rows"]] == [
        (backend, tokens) for backend in ("fused", "a2a", "ag_rs") for tokens in (1, 3)
    ]
    assert "flashinfer: not measured, " in console.export_text(clear=False)
    assert "exchange over 2 ranks" in console.export_text()
    assert all(row["eager_us"] > 0 for row in recorded["rows"])
    assert "| ag_rs |" in report.markdown(recorded)


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
