"""The examples of README and docs run as printed, and its figures are those of the records in benchmarks/."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxcp.bench import report

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
EXAMPLE = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]


def run(code: str) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_runs_as_printed():
    assert len(EXAMPLE.splitlines()) <= 24
    assert run(EXAMPLE) == "(4, 16, 64)\n"


def test_example_of_qsa_runs_as_printed():
    text = (ROOT / "docs" / "qsa.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert run(example) == "(2, 64) {'prefill': 2, 'decode': 1}\n"


@pytest.mark.slow
def test_example_runs_on_a_mesh_with_explicit_axes():
    """`jax.make_mesh` makes them by default; arrays then carry their sharding in their type."""
    explicit = re.sub(r"mesh = .*", 'mesh = jax.make_mesh((8,), ("cp",)); jax.set_mesh(mesh)', EXAMPLE)
    explicit = explicit.replace("    out, cache = step(", "    q = jax.reshard(q, heads)\n    out, cache = step(")
    assert explicit.count("reshard") == 1
    assert run(explicit) == "(4, 16, 64)\n"


@pytest.mark.parametrize(("path", "tables"), [("README.md", 3), ("kernels/README.md", 1), ("docs/qsa.md", 1)])
def test_figures_are_those_of_the_records(path, tables):
    """If this fails: python -m jaxcp.bench.report README.md kernels/README.md docs/qsa.md"""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(report.BLOCK.findall(text)) == tables
    assert report.updated(text, ROOT) == text
    assert report.updated(text.replace("| 2 | fused |", "| 3 | fused |"), ROOT) == text


def test_a_record_of_no_known_kind_is_refused():
    with pytest.raises(ValueError, match=r"benchmark = 'speed'; expected one of \['exchange', 'lse_merge', 'prefill_"):
        report.markdown({"benchmark": "speed"})
