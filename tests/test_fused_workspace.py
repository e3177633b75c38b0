"""The fused exchange's memory from set-up to tear-down, and what it refuses."""

import gc
import itertools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PLATFORM
from fused_calls import (
    RANKS,
    exchange_of,
    merging,
    needs_peers,
    on_several_gpus,
    partials,
)

from jaxcp import native
from jaxcp.errors import BackendError, BuildError, JaxcpError
from jaxcp.exchange import flashinfer, fused, workspace
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.native import compiler
from jaxcp.native.workspace_library import Config, WorkspaceLibrary
from jaxcp.topology import Topology

pytestmark = on_several_gpus


def spec_of(**facts) -> ExchangeSpec:
    usual = {"cp": 8, "heads": 128, "head_dim": 512, "dtype": np.dtype(jnp.bfloat16), "max_tokens": 32}
    return ExchangeSpec(**usual | facts)


@pytest.mark.parametrize(
    ("facts", "lse", "data"),
    [
        ({}, 2 * 7 * 512 * 4, 2 * 7 * 512 * 1024),  # 7 368 832 bytes with the 128 of the control line
        ({"dtype": np.dtype(np.float32)}, 2 * 7 * 512 * 4, 2 * 7 * 512 * 2048),
        ({"cp": 4, "heads": 8, "head_dim": 128, "max_tokens": 8}, 384, 24576),
        ({"cp": 2, "heads": 2, "head_dim": 8, "max_tokens": 1}, 128, 32),  # 8 bytes of LSE fill a line
        ({"cp": 8, "heads": 9, "head_dim": 64, "max_tokens": 3}, 384, 2 * 7 * 6 * 128),  # 6 rows: ceil(9 / 8) heads
    ],
)
def test_bytes_of_a_workspace(facts, lse, data):
    assert workspace.sizes(spec_of(**facts)) == {"control": 128, "lse": lse, "data": data, "total": 128 + lse + data}


@needs_peers
def test_describe_and_the_log_line(caplog):
    caplog.set_level("INFO", "jaxcp")
    exchange = exchange_of(max_tokens=8, heads=3 * RANKS, head_dim=128)
    facts = exchange.describe()
    assert facts["workspace_bytes"] == workspace.sizes(exchange.spec)["total"]
    assert facts["capacity_rows"] == 24
    assert facts["transport"] == ("peer access" if PLATFORM == "cuda" else "threads")
    assert facts["bytes_sent_per_call"] == (RANKS - 1) * 24 * (256 + 4)
    ready = [record.message for record in caplog.records if "exchange ready" in record.message]
    assert len(ready) == 1
    assert f"24 rows (8 tokens x 3 heads), {RANKS} x 0." in ready[0]


@needs_peers
def test_closing():
    exchange = exchange_of()
    merge, inputs = merging(exchange), partials(exchange, 2)
    merge(*inputs).block_until_ready()
    exchange.close()
    exchange.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="is closed, or was never made"):
        merge(*inputs).block_until_ready()
    with pytest.raises(JaxcpError, match="closed"):
        merging(exchange)(*inputs)
    with pytest.raises(JaxcpError, match="closed"):
        exchange.reset()


@needs_peers
def test_garbage_collection_frees_and_numbers_are_not_used_again():
    first = exchange_of()
    merge, inputs = merging(first), partials(first, 2)
    merge(*inputs).block_until_ready()
    block = first._engine.workspace
    library, config, number = block.library, block.configs[0], block.number
    merge = None
    del first, block
    gc.collect()
    with pytest.raises(JaxcpError, match="has no workspace"):
        library.launches(config)
    assert exchange_of()._engine.workspace.number > number


@needs_peers
def test_garbage_collection_frees_all_ranks_step_by_step(monkeypatch):
    gc.collect()  # exchanges that earlier tests left
    exchange = exchange_of()
    library, taken = exchange._engine.workspace.library, []
    for step in ("synchronize", "detach", "destroy"):
        take = getattr(library, step)
        monkeypatch.setattr(library, step, lambda config, step=step, take=take: (taken.append(step), take(config)))
    del exchange
    gc.collect()
    assert taken == ["synchronize"] * RANKS + ["detach"] * RANKS + ["destroy"] * RANKS


@needs_peers
def test_calls_are_numbered_per_exchange():
    """Processes that traced other things besides must get the same program."""
    first, other, second = exchange_of(), exchange_of(), exchange_of()
    inputs = partials(first, 2)
    sites = [
        re.findall(r"site = (\d+)", merging(exchange).lower(*inputs).as_text())
        for exchange in (first, other, other, second)
    ]
    assert sites[0] == sites[3]
    assert len(sites[0]) == 1
    assert sites[1] != sites[2]


@needs_peers
def test_one_rank_that_cannot_allocate_fails_the_set_up(monkeypatch):
    exchange = exchange_of()
    library = exchange._engine.workspace.library
    made, create = [], library.create

    def failing(config):
        if config.rank == 1:
            raise JaxcpError("out of memory")
        made.append(config)
        create(config)

    monkeypatch.setattr(library, "create", failing)
    with pytest.raises(
        BackendError,
        match=r"allocating the workspace failed in process 0: JaxcpError: out of "
        "memory.*a2a",
    ):
        exchange_of()
    with pytest.raises(JaxcpError, match="has no workspace"):
        library.launches(made[0])


# Refusals.


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"dtype": np.dtype(np.float64)}, "dtype float64 is not one of bfloat16, float16, float32"),
        ({"head_dim": 7}, "head_dim = 7 x bfloat16 are not whole 16-byte units"),
        ({"head_dim": 6, "dtype": np.dtype(np.float32)}, "head_dim = 6 x float32 are not whole 16-byte units"),
        ({"cp": 65}, "65 ranks exceed its 64"),
        ({"max_tokens": 1 << 20}, "16777216 rows exceed its 16777215"),
        ({"max_tokens": 600_000, "head_dim": 8}, "9600000 rows for each of 7 peers exceed the 67108863 rows"),
        ({"max_tokens": 1 << 18}, "4194304 rows of 1024 bytes exceed its 4294967295 bytes per source"),
    ],
)
def test_shapes_it_cannot_serve(facts, why):
    topology = Topology("cp", facts.get("cp", 8), (), "gpu", "NVIDIA H200", None, (("cp", 8),))
    assert why in fused.blocker(topology, spec_of(**facts))


def test_flashinfer_stays_with_16_bits():
    topology = Topology("cp", 8, (), "gpu", "NVIDIA H200", None, (("cp", 8),))
    why = flashinfer.blocker(topology, spec_of(dtype=np.dtype(np.float32)))
    assert why == "dtype float32 is not one of bfloat16, float16"


class FakeDevice:
    """A GPU of this process as far as a blocker looks."""

    process_index, client = 0, types.SimpleNamespace(process_index=lambda: 0)

    def __init__(self, slice_index):
        self.slice_index = slice_index

    def default_memory(self):
        return "device"


@pytest.mark.parametrize(
    ("platform", "capability", "slices", "why"),
    [
        ("tpu", None, (0, 0), "not platform tpu"),
        ("gpu", (8, 0), (0, 0), "compute capability 9.0 or newer, not 8.0"),
        ("gpu", (9, 0), (0, 1), "devices are in 2 NVLink domains"),
        ("gpu", (9, 0), (0, 0), None),
    ],
)
def test_places_it_cannot_serve(platform, capability, slices, why, monkeypatch):
    group = tuple(FakeDevice(index) for index in slices)
    topology = Topology("cp", 2, (group,), platform, "", capability, (("cp", 2),))
    monkeypatch.setattr(compiler, "nvcc", lambda: None)
    found = fused.blocker(topology, spec_of(cp=2))
    assert found is None if why is None else why in found


def meeting(monkeypatch, hosts):
    """Lets the processes of a job of `len(hosts)` answer as this one does, but from those hosts."""
    monkeypatch.setattr(jax, "process_count", lambda: len(hosts))

    def together(step, work):
        answers = [dict(work()) for _ in hosts]
        for answer, host in zip(answers, hosts, strict=True):
            answer["host"] = host
        return answers

    monkeypatch.setattr(workspace.agree, "together", together)


class Unloaded(WorkspaceLibrary):
    """Takes its processes' answers to `domain_blocker` from a list; keeps (rank, peer, how) of what it maps."""

    def __init__(self, blockers):
        self.protocol_version, self.path = 1, Path("libjaxcp.so")
        self.blockers, self.mapped = iter(blockers), []

    def domain_blocker(self, device):
        return next(self.blockers)

    def handle(self, config):
        return bytes([config.rank])

    def attach(self, config, peer):
        self.mapped.append((config.rank, peer.rank, "directly"))

    def attach_handle(self, config, rank, handle):
        assert handle == bytes([rank])
        self.mapped.append((config.rank, rank, "by handle"))

    def _call(self, name, *arguments):
        """Nothing: there are no blocks."""


class Remote(FakeDevice):
    """A GPU of process `process_index`."""

    platform, id, local_hardware_id = "gpu", 0, 0

    def __init__(self, process_index):
        super().__init__(0)
        self.process_index = process_index


def set_up(groups, blockers=()):
    """A workspace of this process, 0, for GPUs of these processes, group by group."""
    axes = (("data", len(groups)), ("cp", len(groups[0])))
    devices = tuple(tuple(map(Remote, group)) for group in groups)
    topology = Topology("cp", len(groups[0]), devices, "gpu", "", (9, 0), axes)
    return workspace.Workspace(topology, spec_of(cp=topology.size), lambda: Unloaded(blockers), 1.0, name="fused")


@pytest.mark.parametrize(
    ("groups", "hosts", "transport", "reach", "mapped"),
    [
        (((0, 0), (1, 1)), "ab", "peer access", 0, ["directly", "directly"]),  # data over hosts, the axis inside
        (((0, 1), (0, 1)), "aa", "CUDA IPC", 1, ["by handle", "by handle"]),
        (((0, 0, 1),), "aa", "CUDA IPC", 1, ["directly", "by handle"] * 2),
        (((0, 1), (0, 1)), "ab", "fabric handles", 2, ["by handle", "by handle"]),
        (((0, 0, 1),), "ab", "fabric handles", 2, ["by handle"] * 4),  # peer access does not open such memory
        (((0, 0), (1, 2)), "abc", "fabric handles", 2, ["by handle"] * 2),  # one group needs them, so all have them
    ],
)
def test_the_farthest_peers_decide_how_memory_is_shared(groups, hosts, transport, reach, mapped, monkeypatch):
    meeting(monkeypatch, hosts)
    monkeypatch.setattr(workspace.Workspace, "_connect", lambda self: None)
    monkeypatch.setattr(workspace.Workspace, "_log_ready", lambda self, topology: None)
    built = set_up(groups, itertools.repeat(None))
    assert built.transport == transport
    assert {config.reach for config in built.configs} == {reach}
    assert set(built._handles()) == ({f"{group}:{rank}" for group, rank, _ in built._ranks} if reach else set())
    built._attach({f"{g}:{rank}": f"{rank:02x}" for g, group in enumerate(groups) for rank in range(len(group))})
    assert [how for _, _, how in built.library.mapped] == mapped


def test_hosts_without_fabric_handles(monkeypatch):
    """One process that cannot is enough, and the message is its own."""
    meeting(monkeypatch, "ab")
    why = "GPU 0: cuMemCreate: CUDA_ERROR_NOT_PERMITTED"
    with pytest.raises(NotImplementedError, match=rf"process 1 cannot use them: {why}\. Use backend='a2a'"):
        set_up(((0, 1),), [None, why])


def test_the_twin_stays_inside_a_host():
    library = native.load_exchange("cpu")
    assert "one host only" in library.domain_blocker(0)
    config = Config(exchange=-7, cp=2, heads=2, head_dim=8, max_tokens=1, reach=2)
    with pytest.raises(JaxcpError, match="one host only"):
        library.create(config)


def test_a_mesh_that_leaves_out_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    topology = Topology("cp", 2, ((Remote(0), Remote(2)),), "gpu", "", (9, 0), (("cp", 2),))
    assert "leaves out processes [1] of the job" in fused.blocker(topology, spec_of(cp=2))
    with pytest.raises(NotImplementedError, match=r"leaves out processes \[1\]"):
        set_up(((0, 2),))


@pytest.mark.parametrize(("platform", "name"), [("gpu", "nvcc"), ("cpu", "cxx")])
def test_a_machine_that_cannot_build_it(platform, name, monkeypatch):
    def missing():
        raise BuildError(f"{name}: got none")

    monkeypatch.setattr(compiler, name, missing)
    topology = Topology(
        "cp", 2, ((FakeDevice(0), FakeDevice(0)),), platform, "", (9, 0) if platform == "gpu" else None, (("cp", 2),)
    )
    assert fused.blocker(topology, spec_of(cp=2)) == f"its library cannot be built: {name}: got none"


def test_a_name_with_a_blocker_is_an_error():
    with pytest.raises(BackendError, match="float64 is not one of bfloat16"):
        exchange_of(dtype="float64")
    with pytest.raises(BackendError, match=r"flashinfer.*(platform cpu|float32)"):
        exchange_of(backend="flashinfer", dtype="float32" if PLATFORM == "cuda" else "bfloat16")


@needs_peers
def test_a_program_of_another_exchange_is_refused():
    one, two = exchange_of(), exchange_of(head_dim=128)
    program = merging(two)
    monkey = one._engine.workspace.number
    two._engine.workspace.number, kept = monkey, two._engine.workspace.number
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="was the program made for another one"):
            program(*partials(two, 2)).block_until_ready()
    finally:
        two._engine.workspace.number = kept
