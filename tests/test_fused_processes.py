"""The fused exchange between processes of one host: set-up and tear-down together, and peers that die or stop.

Two processes: of two CPU devices each, through POSIX shared memory; or of one GPU each, through CUDA IPC.
"""

import os
from pathlib import Path

import pytest
from conftest import PLATFORM
from fused_calls import on_several_gpus

from jaxcp import launch

pytestmark = on_several_gpus
ON_GPUS = PLATFORM == "cuda"
EACH = 1 if ON_GPUS else 2
"""Devices of a process."""

TESTS = str(Path(__file__).parent)

PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {TESTS!r})
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
import cases, jaxcp
from jaxcp import LogBase, Partial, launch, native
from jaxcp.errors import BuildError
from jaxcp.native import compiler
from jaxcp.topology import make_mesh

def exchange_of(**changes):
    facts = dict(max_tokens=4, heads=9, head_dim=64, backend="fused", timeout_s=1.0) | changes
    return jaxcp.Exchange(make_mesh(jax.device_count()), "cp", **facts)

def mapped(exchange):
    step = lambda o, lse: exchange(Partial(o[0], lse[0], LogBase.TWO))[None]
    return jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp")))

def partials(exchange, seed):
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((exchange.cp, 3, 9, exchange.head_dim), np.float32).astype(exchange.dtype)
    lse = (4 * rng.standard_normal(o.shape[:-1])).astype(np.float32)
    sharding = NamedSharding(exchange.mesh, P("cp"))
    put = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return (o, lse), (put(o), put(lse))

def assert_merged(exchange, got, o, lse):
    want, _, scale = cases.oracle(o, lse, LogBase.TWO)
    for shard in got.addressable_shards:
        rank, h = shard.index[0].start, exchange.heads_per_rank
        for i in range(h):
            if (head := rank * h + i) < 9:
                cases.check_o(np.asarray(shard.data)[0, :, i], want[:, head], scale[:, head])

def error(action):
    try:
        action()
    except Exception as failure:
        return f"{{type(failure).__name__}}: {{failure}}"
"""

TOGETHER = (
    PROGRAM
    + """
with launch.joined() as index:
    found = {}
    one, two = exchange_of(), exchange_of(head_dim=128)
    found["transport"] = one.describe()["transport"]
    programs = {id(x): mapped(x) for x in (one, two)}
    for seed in range(6):
        exchange = (one, two)[seed % 2]
        host, device = partials(exchange, seed)
        assert_merged(exchange, programs[id(exchange)](*device), *host)
        exchange.check()
    found["names"] = sum(name.startswith(f"jaxcp-{os.getpid()}-") for name in os.listdir("/dev/shm"))
    one.close()
    two.reset()
    host, device = partials(two, 7)
    assert_merged(two, programs[id(two)](*device), *host)

    found["disagree"] = error(lambda: exchange_of(max_tokens=4 + index))
    library = two._engine.workspace.library
    create = library.create
    def failing(config):
        if index == 1:
            raise MemoryError("none left")
        create(config)
    library.create = failing
    found["one failed"] = error(exchange_of)
    library.create = create
    def missing(*arguments, **options):
        raise BuildError("no compiler here")
    for place, name in ((compiler, COMPILER), (native, "load_exchange")):
        there = getattr(place, name)
        if index == 1:
            setattr(place, name, missing)
        found["no " + name] = error(exchange_of)
        setattr(place, name, there)
    after = exchange_of()  # numbers still agree
    host, device = partials(after, 8)
    assert_merged(after, mapped(after)(*device), *host)
    found["mapped"] = Path("/proc/self/maps").read_text().count("/dev/shm/jaxcp-")
    for exchange in (two, after):
        exchange.close()
    found["still mapped"] = Path("/proc/self/maps").read_text().count("/dev/shm/jaxcp-")
    launch.report(found)
"""
)


def test_set_up_calls_and_tear_down():
    compiler = "nvcc" if ON_GPUS else "cxx"
    program = TOGETHER.replace("COMPILER", repr(compiler))
    outcomes = launch.run(["-c", program], 2, devices=EACH, limit_s=180.0)
    assert [outcome.failure for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        found = outcome.summary
        assert found["transport"] == ("CUDA IPC" if ON_GPUS else "shared memory")
        assert found["names"] == 0
        assert "differ between processes: max_tokens is 4 in process 0 and 5 in process 1" in found["disagree"]
        assert "allocating the workspace failed in process 1: MemoryError: none left" in found["one failed"]
        assert (
            "choosing a backend failed in process 1: BackendError: backend='fused' cannot be used"
            in found[f"no {compiler}"]
        )
        assert "building the library failed in process 1: BuildError: no compiler here" in found["no load_exchange"]
        blocks = EACH + EACH * EACH  # own ones, and all of the other process for each of them
        assert found["mapped"] == (0 if ON_GPUS else 2 * blocks)  # two exchanges; POSIX shared memory alone shows there
        assert found["still mapped"] == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("jaxcp-")]


CLOSING = (
    PROGRAM
    + """
with launch.joined():
    from jax import lax
    import jax.numpy as jnp
    def late(lse):
        time.sleep(0.3)
        return lse
    def step(o, lse):  # rank 0 never comes, rank 1 late; 64 tokens: more than is sent before the first wait
        lse = lax.cond(lax.axis_index("cp") == 1, lambda: jax.pure_callback(late, lse, lse), lambda: lse)
        missing = jnp.zeros((64, exchange.heads_per_rank, 64), o.dtype)
        merge = lambda: exchange(Partial(o[0], lse[0], LogBase.TWO))
        return lax.cond(lax.axis_index("cp") == 0, lambda: missing, merge)[None]
    o, lse = jnp.ones((4, 64, 9, 64), jnp.bfloat16), jnp.ones((4, 64, 9))
    for pause in (0.1, 0.4):  # closed before and after the late rank comes
        exchange = exchange_of(max_tokens=64, timeout_s=0.1)  # ten times as long in a first call
        program = jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=P("cp"), check_vma=False))
        out = program.lower(o, lse).compile()(o, lse)
        time.sleep(pause)
        exchange.close()
        error(out.block_until_ready)  # NaN, or the late rank's refusal
    launch.report({"done": True})
"""
)


@pytest.mark.skipif(ON_GPUS, reason="calls run on threads in the host twin only")
def test_closing_under_running_calls():
    """Calls of the twin run on threads of their own and write into peers' blocks, which must outlive them."""
    (outcome,) = launch.run(["-c", CLOSING], 1, devices=4, limit_s=120.0)
    assert outcome.failure is None, outcome.output
    assert outcome.summary["done"]


LOSING = (
    PROGRAM
    + """
with launch.joined() as index:
    exchange = exchange_of()
    merge, (host, device) = mapped(exchange), partials(exchange, 0)
    assert_merged(exchange, merge(*device), *host)
    pids = multihost_utils.process_allgather(np.array(os.getpid())).ravel()
    ready = Path(READY)
    if index == 1:
        while not ready.exists():  # until process 0 has all that it needs from this one
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGNAL)
    ready.touch()
    start = time.monotonic()
    out = merge(*device)
    nan = all(np.isnan(np.asarray(shard.data).astype(np.float32)).all() for shard in out.addressable_shards)
    waited = time.monotonic() - start
    first = error(exchange.check)
    start = time.monotonic()
    again = error(lambda: merge(*device).block_until_ready())
    fast = time.monotonic() - start
    exchange.close()
    launch.report({"nan": nan, "waited": waited, "first": first, "again": again, "fast": fast})
    if "SIGNAL" == "SIGSTOP":
        os.kill(int(pids[1]), signal.SIGKILL)
    raise SystemExit(7)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_losing_a_peer(signal, tmp_path):
    program = LOSING.replace("SIGNAL", signal).replace("READY", repr(str(tmp_path / "ready")))
    outcomes = launch.run(["-c", program], 2, devices=EACH, limit_s=120.0)
    survivor = outcomes[0]
    assert survivor.exit_code == 7, survivor.output
    assert outcomes[1].exit_code == -9
    found = survivor.summary
    assert found["nan"]
    assert 1.0 <= found["waited"] < 4.0
    assert "PeerTimeoutError" in found["first"]
    assert any(f"for rank {rank} in call 1" in found["first"] for rank in range(EACH, 2 * EACH))
    assert "PeerTimeoutError" in found["again"]
    assert found["fast"] < 1.0
