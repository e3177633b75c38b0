"""The fused exchange: the table of cases, and what its workspace, order and bounded waits promise.

On CPU the host twin runs behind the same handler interface, protocol and workspace code; JAXCP_TEST_PLATFORM=cuda runs
the same tests on as many GPUs as there are.
"""

import gc
import itertools
import re
import time

import cases
import exchange_hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PLATFORM
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import LogBase, Partial
from jaxcp.errors import BackendError, JaxcpError, PeerTimeoutError
from jaxcp.exchange import fused, watcher, workspace
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.topology import Topology, make_mesh

DEVICES = jax.device_count()
RANKS = max(n for n in (1, 2, 4, 8) if n <= DEVICES)
pytestmark = [pytest.mark.multigpu] * (PLATFORM == "cuda")
needs_peers = pytest.mark.skipif(RANKS < 2, reason="needs two devices")

CASES = [case for case in cases.EXCHANGE if case.dtype in ("bfloat16", "float16") and case.cp <= DEVICES]
TWO = LogBase.TWO


def exchange_of(cp=RANKS, axis="cp", mesh=None, **changes) -> jaxcp.Exchange:
    facts = {"max_tokens": 8, "heads": 2 * cp, "head_dim": 64, "dtype": "bfloat16", "backend": "fused"} | changes
    return jaxcp.Exchange(mesh or make_mesh(cp, axis), axis, **facts)


def partials(exchange, tokens, seed=0):
    rng = np.random.default_rng([seed, tokens])
    o = rng.standard_normal((exchange.cp, tokens, exchange.heads, exchange.head_dim), np.float32)
    return o.astype(exchange.dtype), (4 * rng.standard_normal(o.shape[:-1])).astype(np.float32)


def mapped(exchange, step, **options):
    return jax.jit(
        jax.shard_map(
            step, mesh=exchange.mesh, in_specs=P(exchange.axis_name), out_specs=P(exchange.axis_name), **options
        )
    )


def merging(exchange, base=TWO):
    """o, lse of all ranks -> merged rows of all ranks, one call."""
    return mapped(exchange, lambda o, lse: exchange(Partial(o[0], lse[0], base))[None])


def assert_merged(exchange, got, o, lse, base=TWO):
    want, _, scale = cases.oracle(o, lse, base)
    h = exchange.heads_per_rank
    for rank, i in itertools.product(range(exchange.cp), range(h)):
        if (head := rank * h + i) < exchange.heads:
            cases.check_o(np.asarray(got)[rank, :, i], want[:, head], scale[:, head])


def call_numbers(exchange):
    block = exchange._engine.workspace
    return [block.library.call_number(config) for config in block.configs]


def set_call_numbers(exchange, number):
    block = exchange._engine.workspace
    for config in block.configs:
        block.library.set_call_number(config, number)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case):
    cases.check(case, cases.run(case, "fused"))


# One workspace, many calls.


@needs_peers
def test_varying_row_counts_on_one_workspace():
    exchange = exchange_of(max_tokens=8)
    merge = merging(exchange)
    for step, tokens in enumerate((7, 1, 8, 3, 1, 8, 2)):
        o, lse = partials(exchange, tokens, seed=step)
        assert_merged(exchange, merge(o, lse), o, lse)
    assert call_numbers(exchange) == [7] * exchange.cp


@needs_peers
def test_wide_batches_run_as_several_calls():
    exchange = exchange_of(max_tokens=3)
    o, lse = partials(exchange, 7)
    assert_merged(exchange, merging(exchange)(o, lse), o, lse)
    assert call_numbers(exchange) == [3] * exchange.cp


@needs_peers
def test_no_rows_launch_nothing():
    exchange = exchange_of()
    out = merging(exchange)(*partials(exchange, 0))
    assert out.shape == (exchange.cp, 0, exchange.heads_per_rank, 64)
    assert call_numbers(exchange) == [0] * exchange.cp


@needs_peers
def test_the_call_number_wraps():
    exchange = exchange_of(max_tokens=8)
    merge = merging(exchange)
    set_call_numbers(exchange, 2**32 - 3)
    for step, tokens in enumerate((8, 1, 5, 8, 2, 8)):
        o, lse = partials(exchange, tokens, seed=step)
        assert_merged(exchange, merge(o, lse), o, lse)
    assert call_numbers(exchange) == [3] * exchange.cp


@needs_peers
def test_a_repeated_call_number_takes_no_stale_word():
    exchange = exchange_of()
    merge = merging(exchange)
    for step in range(4):
        set_call_numbers(exchange, 6)
        o, lse = partials(exchange, 5, seed=step)
        assert_merged(exchange, merge(o, lse), o, lse)


@needs_peers
def test_same_inputs_give_the_same_bits():
    exchange = exchange_of(head_dim=512, dtype="float16")
    merge, inputs = merging(exchange), partials(exchange, 5)
    first = np.asarray(merge(*inputs))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(merge(*inputs)).view(np.uint16), first.view(np.uint16))


@needs_peers
def test_fifty_runs_of_sixteen_calls_of_changing_size():
    exchange = exchange_of(max_tokens=4)
    sizes = [1 + i % 4 for i in range(16)]

    def step(o, lse):
        return tuple(exchange(Partial(o[0, :n] * (1 + i), lse[0, :n], TWO))[None] for i, n in enumerate(sizes))

    program = mapped(exchange, step)
    for run in range(50):
        o, lse = partials(exchange, 4, seed=run)
        results = program(o, lse)
        if run in (0, 1, 49):
            for i, n in enumerate(sizes):
                scaled = (o[:, :n] * np.asarray(1 + i, o.dtype)).astype(o.dtype)
                assert_merged(exchange, results[i], scaled, lse[:, :n])
    assert call_numbers(exchange) == [50 * 16] * exchange.cp


# Around it.


@needs_peers
def test_collectives_of_the_same_program_stay_exact():
    exchange = exchange_of()

    def step(o, lse, x):
        before = lax.psum(x, "cp")
        merged = exchange(Partial(o[0], lse[0], TWO))
        between = lax.psum(before + merged.astype(jnp.int32).sum() * 0, "cp")
        again = exchange(Partial(o[0] * 2, lse[0], TWO))
        after = lax.all_gather(between + again.astype(jnp.int32).sum() * 0, "cp")
        return merged[None], again[None], before[None], between[None], after[None]

    o, lse = partials(exchange, 5)
    x = np.arange(exchange.cp * 3, dtype=np.int32).reshape(exchange.cp, 3) + 1000
    for _ in range(3):
        merged, again, before, between, after = mapped(exchange, step)(o, lse, x)
        assert_merged(exchange, merged, o, lse)
        assert_merged(exchange, again, o * 2, lse)
        np.testing.assert_array_equal(before[0, 0], x.sum(0))
        np.testing.assert_array_equal(between[0, 0], x.sum(0) * exchange.cp)
        assert (np.asarray(after) == np.asarray(between)[0]).all()


@needs_peers
def test_two_exchanges_in_one_program_and_in_turns():
    one, two = exchange_of(), exchange_of(head_dim=128, heads=RANKS, dtype="float16")

    def both(o, lse, p, lsf):
        # independent of each other: without the token chain their order differs between devices
        return one(Partial(o[0], lse[0], TWO))[None], two(Partial(p[0], lsf[0], LogBase.E))[None]

    together, alone = mapped(one, both), (merging(one), merging(two, LogBase.E))
    for step in range(40):
        a, b = partials(one, 5, seed=step), partials(two, 3, seed=step)
        first, second = together(*a, *b) if step % 2 else (alone[0](*a), alone[1](*b))
        assert_merged(one, first, *a)
        assert_merged(two, second, *b, LogBase.E)


@needs_peers
def test_groups_of_a_larger_mesh_have_workspaces_of_their_own():
    if DEVICES < 4:
        pytest.skip("needs four devices")
    mesh = Mesh(np.array(jax.devices()[: DEVICES // 2 * 2]).reshape(2, -1), ("data", "cp"))
    exchange = exchange_of(mesh.shape["cp"], mesh=mesh)
    o, lse = zip(*(partials(exchange, 5, seed=group) for group in range(2)), strict=True)
    step = lambda o, lse: exchange(Partial(o[0, 0], lse[0, 0], TWO))[None, None]  # noqa: E731
    spec = P("data", "cp")
    merged = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))(np.stack(o), np.stack(lse))
    for group in range(2):
        assert_merged(exchange, merged[group], o[group], lse[group])


@needs_peers
def test_independent_calls_are_one_chain():
    """The proof that no compiler can reorder them: each call takes the token that the call before it made."""
    exchange = exchange_of()

    def step(o, lse):
        return [exchange(Partial(o[0] * i, lse[0], TWO))[None] for i in range(1, 7)]

    exchange_hlo.assert_one_chain(mapped(exchange, step).lower(*partials(exchange, 4)).compile().as_text(), 6)


@needs_peers
def test_programs_stay_on_the_fast_dispatch_path():
    """An effect known to JAX costs some 200 us per dispatch; order and number of calls do not need one."""
    exchange = exchange_of()
    assert not merging(exchange).trace(*partials(exchange, 4)).jaxpr.effects


@needs_peers
@pytest.mark.parametrize("check_vma", [False, True])
def test_scan_over_layers(check_vma):
    exchange = exchange_of()

    def step(o, lse):
        def layer(carry, scale):
            merged = exchange(Partial(o[0] * scale + carry, lse[0], TWO))
            return carry + merged.astype(jnp.float32).sum().astype(o.dtype) * 0, merged

        zero = (o[0, 0, 0, 0] * 0).astype(o.dtype)
        return lax.scan(layer, zero, jnp.arange(1, 6, dtype=o.dtype))[1][None]

    o, lse = partials(exchange, 4)
    merged = mapped(exchange, step, check_vma=check_vma)(o, lse)
    for i in range(5):
        assert_merged(exchange, merged[:, i], (o * np.asarray(i + 1, o.dtype)).astype(o.dtype), lse)


@needs_peers
@pytest.mark.parametrize("check_vma", [False, True])
def test_results_differ_between_ranks_and_shard_map_knows(check_vma):
    exchange = exchange_of()

    def step(o, lse):
        merged = exchange(Partial(o[0], lse[0], TWO))
        return lax.psum(merged.astype(jnp.float32), "cp"), merged[None]

    o, lse = partials(exchange, 4)
    specs = {"in_specs": P("cp"), "out_specs": (P(), P("cp")), "check_vma": check_vma}
    total, merged = jax.jit(jax.shard_map(step, mesh=exchange.mesh, **specs))(o, lse)
    assert_merged(exchange, merged, o, lse)
    np.testing.assert_allclose(total, np.asarray(merged).astype(np.float32).sum(0), rtol=1e-5, atol=1e-5)


@needs_peers
def test_vmap_folds_into_tokens():
    exchange = exchange_of(max_tokens=16)
    o, lse = partials(exchange, 12)
    fold = lambda x: x.reshape(exchange.cp, 3, 4, *x.shape[2:])  # noqa: E731
    step = lambda o, lse: jax.vmap(lambda o, lse: exchange(Partial(o, lse, TWO)))(o[0], lse[0])[None]  # noqa: E731
    merged = mapped(exchange, step)(fold(o), fold(lse))
    assert_merged(exchange, np.asarray(merged).reshape(exchange.cp, 12, *merged.shape[3:]), o, lse)
    assert call_numbers(exchange) == [1] * exchange.cp


@needs_peers
def test_differentiation_is_refused():
    exchange = exchange_of()
    loss = mapped(
        exchange, lambda o, lse: jax.grad(lambda o: exchange(Partial(o[0], lse[0], TWO)).astype(jnp.float32).sum())(o)
    )
    with pytest.raises(NotImplementedError, match="it has no derivative"):
        loss(*partials(exchange, 2))


# Time.


def skipping(exchange, absent):
    """A program in which rank `absent` does not call the exchange."""

    def step(o, lse):
        missing = jnp.zeros((o.shape[1], exchange.heads_per_rank, exchange.head_dim), o.dtype)
        return lax.cond(lax.axis_index("cp") == absent, lambda: missing, lambda: exchange(Partial(o[0], lse[0], TWO)))[
            None
        ]

    return mapped(exchange, step, check_vma=False)


@needs_peers
def test_a_rank_that_never_comes():
    exchange = exchange_of(timeout_s=0.3)
    absent = exchange.cp - 1
    merge, inputs = merging(exchange), partials(exchange, 3)
    skip = skipping(exchange, absent).lower(*inputs).compile()
    merge(*inputs).block_until_ready()
    exchange.check()

    out = np.asarray(skip(*inputs)).astype(np.float32)
    assert np.isnan(out[:absent]).all()
    assert (out[absent] == 0).all()
    with pytest.raises(PeerTimeoutError, match=rf"rank \d waited longer than 0\.3 s for rank {absent} in call 1 \(row"):
        exchange.check()
    with pytest.raises(PeerTimeoutError):  # tracing
        merging(exchange)(*inputs)
    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match="PeerTimeoutError"):  # a program compiled before
        merge(*inputs).block_until_ready()
    assert time.monotonic() - start < 0.3

    exchange.reset()
    exchange.check()
    for step in range(3):
        o, lse = partials(exchange, 3, seed=step)
        assert_merged(exchange, merge(o, lse), o, lse)
    exchange.check()


def sleeping(exchange, late, seconds):
    """A program in which rank `late` sleeps before its exchange."""

    def wait(x):
        time.sleep(seconds)
        return x

    def step(o, lse):
        lse = lax.cond(lax.axis_index("cp") == late, lambda: jax.pure_callback(wait, lse, lse), lambda: lse)
        return exchange(Partial(o[0], lse[0], TWO))[None]

    return mapped(exchange, step, check_vma=False)


@needs_peers
def test_a_rank_that_comes_late_but_in_time():
    exchange = exchange_of(timeout_s=20.0)
    o, lse = partials(exchange, 3)
    assert_merged(exchange, sleeping(exchange, 0, 0.3)(o, lse), o, lse)
    exchange.check()


@needs_peers
def test_a_rank_that_comes_too_late():
    exchange = exchange_of(timeout_s=0.2)
    merge, (o, lse) = merging(exchange), partials(exchange, 3)
    late = sleeping(exchange, 1, 1.0).lower(o, lse).compile()
    merge(o, lse).block_until_ready()
    late_once = late(o, lse)  # the first call of a site waits ten times as long
    assert_merged(exchange, late_once, o, lse)
    out = np.asarray(late(o, lse)).astype(np.float32)
    assert np.isnan(out[0]).all()
    with pytest.raises(PeerTimeoutError, match="for rank 1"):
        exchange.check()
    exchange.reset()
    assert_merged(exchange, merge(o, lse), o, lse)


@needs_peers
def test_a_rank_that_calls_once_more():
    exchange = exchange_of(timeout_s=0.1)
    merge, (o, lse) = merging(exchange), partials(exchange, 3)

    def step(o, lse):
        merged = exchange(Partial(o[0], lse[0], TWO))
        more = lax.cond(lax.axis_index("cp") == 0, lambda: exchange(Partial(o[0], lse[0], TWO)), lambda: merged)
        return merged[None], more[None]

    merge(o, lse).block_until_ready()
    merged, more = mapped(exchange, step, check_vma=False)(o, lse)
    assert_merged(exchange, merged, o, lse)
    assert np.isnan(np.asarray(more)[0].astype(np.float32)).all()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited"):
        exchange.check()
    exchange.reset()
    assert_merged(exchange, merge(o, lse), o, lse)


@needs_peers
def test_an_expired_wait_is_logged_once_while_nobody_asks(caplog):
    exchange = exchange_of(timeout_s=0.1)
    skipping(exchange, 0)(*partials(exchange, 1)).block_until_ready()
    deadline = time.monotonic() + 5
    while "PeerTimeoutError" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3 * watcher.PERIOD_S)
    assert caplog.text.count("PeerTimeoutError") == 1
    assert re.search(r"rank \d waited .* for rank 0 in call 0", caplog.text)


@needs_peers
def test_skew():
    """Ranks that are late by up to a millisecond, each at other calls."""
    exchange = exchange_of(timeout_s=20.0)

    def wait(microseconds):
        time.sleep(float(microseconds) * 1e-6)
        return np.uint32(0)

    def step(o, lse, delays):
        def layer(carry, delay):
            late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.uint32), delay)
            merged = exchange(Partial(o[0] + (carry + late).astype(o.dtype), lse[0], TWO))
            return merged[0, 0, 0].astype(jnp.uint32) * 0, merged

        return lax.scan(layer, jnp.uint32(0), delays[0])[1][None]

    o, lse = partials(exchange, 2)
    delays = np.random.default_rng(0).integers(1, 1000, (exchange.cp, 50)).astype(np.int32)
    merged = np.asarray(mapped(exchange, step, check_vma=False)(o, lse, delays))
    assert_merged(exchange, merged[:, 0], o, lse)
    assert (merged.view(np.uint16) == merged[:, :1].view(np.uint16)).all()
    exchange.check()


# Long runs.


@pytest.mark.soak
@needs_peers
def test_soak_with_random_sizes():
    """10^5 calls."""
    exchange = exchange_of(max_tokens=8)
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 100)

    def step(o, lse):
        return tuple(exchange(Partial(o[0, :n], lse[0, :n], TWO))[None] for n in sizes)

    program = mapped(exchange, step)
    for run in range(1000):
        o, lse = partials(exchange, 8, seed=run)
        results = program(o, lse)
        for i in (run % 100, 99):
            assert_merged(exchange, results[i], o[:, : sizes[i]], lse[:, : sizes[i]])
    exchange.check()
    assert call_numbers(exchange) == [100_000] * exchange.cp


@pytest.mark.soak
@needs_peers
def test_two_programs_alternate_ten_thousand_times():
    one, two = exchange_of(), exchange_of(head_dim=128, heads=RANKS, dtype="float16")
    programs, inputs = (merging(one), merging(two)), (partials(one, 5), partials(two, 3))
    first = [np.asarray(program(*x)).view(np.uint16) for program, x in zip(programs, inputs, strict=True)]
    for step in range(10_000):
        for program, x, expected in zip(programs, inputs, first, strict=True):
            merged = program(*x)
            if step % 100 == 0:
                np.testing.assert_array_equal(np.asarray(merged).view(np.uint16), expected)
    one.check()
    two.check()


# Memory.


def spec_of(**facts) -> ExchangeSpec:
    usual = {"cp": 8, "heads": 128, "head_dim": 512, "dtype": np.dtype(jnp.bfloat16), "max_tokens": 32}
    return ExchangeSpec(**usual | facts)


@pytest.mark.parametrize(
    ("facts", "lse", "data"),
    [
        ({}, 2 * 7 * 512 * 4, 2 * 7 * 512 * 1024),  # 7 368 832 bytes with the 128 of the control line
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
        ({"dtype": np.dtype(np.float32)}, "dtype float32 is not bfloat16 or float16"),
        ({"head_dim": 7}, "head_dim = 7 x bfloat16 are not whole 16-byte units"),
        ({"cp": 65}, "65 ranks exceed its 64"),
        ({"max_tokens": 1 << 20}, "16777216 rows exceed its 16777215"),
    ],
)
def test_shapes_it_cannot_serve(facts, why):
    topology = Topology("cp", facts.get("cp", 8), (), "gpu", "NVIDIA H200", None)
    assert why in fused.blocker(topology, spec_of(**facts))


class FakeDevice:
    """A GPU as far as a blocker looks."""

    def __init__(self, slice_index):
        self.slice_index = slice_index


@pytest.mark.parametrize(
    ("platform", "capability", "slices", "why"),
    [
        ("tpu", None, (0, 0), "not platform tpu"),
        ("gpu", (8, 0), (0, 0), "compute capability 9.0 or newer, not 8.0"),
        ("gpu", (9, 0), (0, 1), "devices are on 2 hosts"),
        ("gpu", (9, 0), (0, 0), None),
    ],
)
def test_places_it_cannot_serve(platform, capability, slices, why):
    group = tuple(FakeDevice(index) for index in slices)
    topology = Topology("cp", 2, (group,), platform, "", capability)
    found = fused.blocker(topology, spec_of(cp=2))
    assert found is None if why is None else why in found


def test_a_name_with_a_blocker_is_an_error():
    with pytest.raises(BackendError, match="float32 is not bfloat16"):
        exchange_of(dtype="float32")
    with pytest.raises(BackendError, match=r"flashinfer.*(platform|installed)"):
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
