"""`jaxcp bench overlap`: reports of prefill's programs and of texts, for people and programs."""

import json

import jax
import pytest
from typer.testing import CliRunner

from jaxcp.bench import overlap as command
from jaxcp.cli import app
from jaxcp.errors import BackendError

ASYNCHRONOUS = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[2,4]) -> f32[8,4] {
  %x = f32[2,4]{1,0} parameter(0)
  %s = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), dimensions={0}
  %w = f32[2,4]{1,0} multiply(%x, %x)
  %v = f32[2,4]{1,0} multiply(%w, %x)
  %d = f32[8,4]{1,0} all-gather-done(%s)
  ROOT %r = f32[8,4]{1,0} add(%d, %d)
}
"""


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "overlap", *map(str, arguments)])


def test_a_text_for_programs_and_for_people(tmp_path):
    text = tmp_path / "step.hlo"
    text.write_text(ASYNCHRONOUS)
    (gather,) = json.loads(run(text, "--json").stdout)["step.hlo"]
    assert gather["kind"] == "all-gather"
    assert gather["asynchronous"]
    assert gather["behind"] == {"multiply": 2}
    assert "behind 2 multiply" in " ".join(run(text).stdout.split())


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() < 2, reason="needs two CPU devices")
def test_prefill_here():
    (report,) = command.prefill_reports(2, ["overlapped"], 1, small=True).values()
    index, kv = command.facts(report)
    width = {"index": command.SMALL.index_dim, "kv": 2 * command.SMALL.kv_heads * command.SMALL.head_dim}
    assert f",{width['index']}]" in index["shape"]
    assert f",{width['kv']}]" in kv["shape"]
    assert not index["asynchronous"]  # on CPU nothing runs behind a gather
    assert index["times"] == kv["times"] == 1


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"schedules: got \['later'\]; expected some of"):
        command.prefill_reports(2, ["later"], 1, small=True)
    nothing = tmp_path / "empty.hlo"
    nothing.write_text("HloModule step")
    with pytest.raises(ValueError, match="schedule"):
        command.main(text=nothing, cp=None, schedules=None, layers=1, small=False, as_json=False)
    if jax.default_backend() == "cpu":
        with pytest.raises(BackendError, match="--small takes sizes that suit it"):
            command.prefill_reports(None, None, 1, small=False)
