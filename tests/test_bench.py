"""What the benchmarks compute from measured times; the times themselves need a GPU."""

import io
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxcp import BackendError, JaxcpError, LogBase
from jaxcp.bench import _measure, exchange
from jaxcp.bench._measure import DeviceTime

SHAPE = exchange.Shape(8, 2, 16, 512, "bfloat16", LogBase.TWO)


@pytest.fixture(scope="module")
def right():
    """The merged rows as XLA computes them."""
    program = SHAPE.implementations()["xla"]
    return jax.jit(program.fn)(*program.args)


def times(result, **us: float) -> dict[str, DeviceTime]:
    return {name: DeviceTime(value, (("kernel", 1.0, value),), result) for name, value in us.items()}


TIMES = {"packed": 2.0, "separate": 1.0, "xla": 8.0, "xla_fusable": 4.0, "xla_packed": 16.0}


def test_a_row_of_figures(right):
    row = exchange._row(SHAPE, times(right, **TIMES), rate=1e12)
    assert row["bytes"] == 2 * 16 * (8 * (1024 + 4) + 1024)
    assert row["floor_us"] == pytest.approx(row["bytes"] / 1e6, abs=1e-3)
    assert (row["ratio_to_xla"], row["packed_to_separate"], row["xla_best_us"]) == (0.5, 2.0, 4.0)
    assert row["of_copy_rate"] == pytest.approx(row["bytes"] / 1e6 / 2.0, abs=1e-3)


@pytest.mark.parametrize("name", ["xla_fusable", "xla_packed"])
def test_baselines_compute_the_same(right, name):
    program = SHAPE.implementations()[name]
    exchange._check(SHAPE, name, jax.jit(program.fn)(*program.args))


@pytest.mark.parametrize("damage", [lambda x: x.at[-1, 0].add(0.5), lambda x: x.at[0, 0].set(jnp.nan)])
def test_a_wrong_result_gives_no_figure(right, damage):
    with pytest.raises(JaxcpError, match="packed is wrong"):
        exchange._row(SHAPE, times(damage(right), packed=1.0), rate=1e12)


def test_record_and_table(right, tmp_path):
    row = exchange._row(SHAPE, times(right, **TIMES), rate=1e12)
    recorded = _measure.record({"rows": [row], "copy_rate_tb_s": 4.29, "shortest_kernel_us": 0.8})
    assert {"date", "command", "environment"} <= recorded.keys()
    _measure.write(tmp_path / "sub" / "figures.json", recorded)
    assert json.loads((tmp_path / "sub" / "figures.json").read_text()) == recorded
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(exchange.table(recorded))
    assert "4.29 TB/s" in console.export_text()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"repeat": 0}, "repeat: got 0; expected an integer >= 1"),
    ({"sources": [0]}, "sources: got 0"),
    ({"tokens": [-1]}, "tokens: got -1"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        exchange.run(**arguments)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine on which jax sees no GPU")
def test_without_a_gpu():
    with pytest.raises(BackendError, match="kernels of GPUs only, and jax runs on 'cpu'"):
        exchange.run()


def test_device_time_is_the_sum_of_the_kernels():
    time = _measure._device_time({"b": [1.0, 9.0, 2.0], "a": [4.0] * 6}, 3, None)
    assert time.kernels == (("a", 2.0, 4.0), ("b", 1.0, 2.0))
    assert (time.us, time.launches) == (10.0, 3.0)
    with pytest.raises(BackendError, match="no kernel"):
        _measure._device_time({}, 3, None)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_measures_on_a_gpu():
    recorded = exchange.run(sources=[2], tokens=[1], large=False, repeat=5)
    [row] = recorded["rows"]
    assert 0.5 < row["packed_us"] < 50
    assert np.isfinite(row["ratio_to_xla"])


def test_programs_that_share_an_executable_share_its_kernels_in_order():
    kernels = {"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": list(range(10))}
    assert _measure._part(kernels, [2, 0, 3], 0) == {"a": [1.0, 2.0], "b": [0, 1, 2, 3]}
    assert _measure._part(kernels, [2, 0, 3], 2) == {"a": [3.0, 4.0, 5.0], "b": [4, 5, 6, 7, 8, 9]}
    assert _measure._part(kernels, [0, 4, 0], 1) == kernels
    with pytest.raises(BackendError, match="5 kernels a in a trace of 4 runs"):
        _measure._part(kernels, [2, 2], 0)


def test_carried_arguments_come_from_the_run_before():
    program = _measure.Program(lambda x, y: (x + y, 10 * x), (jnp.ones(1), jnp.ones(1)), carried=1)
    [(_, executable)] = _measure._compiled([program])
    run = _measure.Run(executable, program)
    assert run.repeated(3).tolist() == [30.0]
    assert run.repeated(1).tolist() == [40.0]


def test_one_function_is_compiled_once_per_shape():
    fn = lambda x: x + 1  # noqa: E731
    programs = [_measure.Program(fn, (jnp.ones(n),)) for n in (1, 2, 1)] + [_measure.Program(lambda x: x, (1.0,))]
    names = [name for name, _ in _measure._compiled(programs)]
    assert names == ["measured_0", "measured_1", "measured_0", "measured_2"]


def test_slow_programs_run_less_often():
    program = _measure.Program(lambda x: x, (jnp.ones(1),))
    run = _measure.Run(lambda x: time.sleep(0.02) or x, program)
    assert run.warmed(3, 50, math.inf) == 50
    assert run.warmed(3, 50, 0.001) == 1
    assert 1 < run.warmed(3, 50, 0.2) < 50
