"""Processes of one host: that they meet, and that each way of failing is told apart and ends in time."""

import os
import time

import pytest

from jaxcp import launch

WAIT = "import time; print('waiting', flush=True); time.sleep(600)"
MEET = """
import jax, jax.numpy as jnp
from jaxcp import launch
from jaxcp.topology import make_mesh
with launch.joined() as index:
    mesh = make_mesh(4)
    total = jax.jit(jax.shard_map(lambda: jax.lax.psum(1.0, "cp"), mesh=mesh, in_specs=(), out_specs=jax.P()))()
    launch.report({"index": index, "devices": len(jax.local_devices()), "total": float(total)})
"""


def test_a_process_on_its_own_is_the_first():
    with launch.joined() as index:
        assert index == 0
    launch.report("heard by nobody")


def test_processes_meet_and_leave_in_order():
    outcomes = launch.run(["-c", MEET], 2, devices=2, limit_s=120.0)
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert [outcome.summary for outcome in outcomes] == [{"index": i, "devices": 2, "total": 4.0} for i in range(2)]


def test_ranks_that_processes_cannot_share_are_refused_by_each():
    outcomes = launch.run(["-c", MEET.replace("make_mesh(4)", "make_mesh(3)")], 2, devices=2, limit_s=120.0)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert "cp: got 3; expected a multiple of the 2 processes" in outcome.output
        assert "ended with exit code 1" in outcome.failure


def test_a_missing_summary_is_a_failure():
    (outcome,) = launch.run(["-c", "print('done')"], 1, devices=1, limit_s=60.0)
    assert (outcome.exit_code, outcome.summary) == (0, None)
    assert outcome.failure == "process 0 ended without a summary. Its last output:\ndone\n"


def test_what_outlives_its_limit_is_killed():
    start = time.monotonic()
    outcomes = launch.run(
        ["-c", "import time; print('waiting', flush=True); time.sleep(600)"], 2, devices=1, limit_s=3.0
    )
    assert time.monotonic() - start < 30
    assert [outcome.exit_code for outcome in outcomes] == [None, None]
    assert all("hung and was killed. Its last output:\nwaiting" in outcome.failure for outcome in outcomes)


def test_the_others_get_a_grace_once_one_has_failed(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 1)
    program = (
        "import json, os, time\n"
        "if json.loads(os.environ['JAXCP_PROCESS'])['index'] == 0: time.sleep(600)\n"
        "raise SystemExit(3)"
    )
    start = time.monotonic()
    outcomes = launch.run(["-c", program], 2, devices=1, limit_s=300.0)
    assert time.monotonic() - start < 60
    assert [outcome.exit_code for outcome in outcomes] == [None, 3]


@pytest.mark.parametrize("flags", ["", "--xla_dump_to=x --xla_force_host_platform_device_count=3"])
def test_each_process_gets_its_devices_whatever_was_set_before(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    program = "import os\nfrom jaxcp import launch\nlaunch.report(os.environ['XLA_FLAGS'])"
    (outcome,) = launch.run(["-c", program], 1, devices=5, limit_s=60.0)
    kept = [flag for flag in flags.split() if "dump" in flag]
    assert outcome.summary.split() == [*kept, "--xla_force_host_platform_device_count=5"]


def test_virtual_devices_respect_what_is_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    launch.virtual_devices(8)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"
    monkeypatch.setenv("XLA_FLAGS", "")
    launch.virtual_devices(8)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8"
