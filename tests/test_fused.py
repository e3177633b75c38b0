"""The fused exchange: the table of cases, many calls on one workspace, and what lies around the calls of a program.

On CPU the host twin runs behind the same handler interface, protocol and workspace code; JAXCP_TEST_PLATFORM=cuda runs
the same tests on as many GPUs as there are.
"""

import cases
import exchange_hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_calls import (
    DEVICES,
    RANKS,
    TWO,
    assert_merged,
    call_numbers,
    exchange_of,
    mapped,
    merging,
    needs_peers,
    on_several_gpus,
    partials,
    set_call_numbers,
)
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcp import LogBase, Partial
from jaxcp.errors import TopologyError
from jaxcp.exchange import fused

pytestmark = on_several_gpus
CASES = [case for case in cases.EXCHANGE if case.dtype in fused.DTYPES and case.cp <= DEVICES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case):
    cases.check(case, cases.run(case, "fused"))


@needs_peers
@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_words_that_look_unwritten(dtype):
    """Input words of 0xFFFFFFFF are NaNs like any other: nobody waits for them to be overwritten."""
    exchange = exchange_of(dtype=dtype, timeout_s=5.0)
    merge, (o, lse) = merging(exchange), partials(exchange, 3)
    for _ in range(3):  # both slots, and one of them again
        o[:, 1:].view(np.uint32)[..., 5] = 0xFFFFFFFF
        o[0, 0].view(np.uint32)[..., 0] = 0xFFFFFFFF
        assert_merged(exchange, merge(o, lse)[:, :, :, 24:], o[..., 24:], lse)
        per_word = 4 // o.dtype.itemsize
        got = np.isnan(np.asarray(merge(o, lse), np.float32)).reshape(exchange.cp, 3, exchange.heads_per_rank, -1)
        want = np.zeros_like(got)
        want[:, 1:, :, 5 * per_word : 6 * per_word] = want[:, 0, :, :per_word] = True
        np.testing.assert_array_equal(got, want)
    exchange.check()


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
def test_shard_map_knows_that_results_differ_between_ranks():
    exchange = exchange_of()

    def step(o, lse):
        return exchange(Partial(o[0], lse[0], TWO), return_lse=True)

    for specs in ((P(), P("cp")), (P("cp"), P())):
        program = jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P("cp"), out_specs=specs))
        with pytest.raises(ValueError, match="out_specs"):
            program(*partials(exchange, 4))


@needs_peers
@pytest.mark.parametrize("wider", ["o", "lse"])
def test_results_differ_wherever_one_of_the_operands_does(wider):
    if DEVICES < 4:
        pytest.skip("needs four devices")
    mesh = Mesh(np.array(jax.devices()[: DEVICES // 2 * 2]).reshape(2, -1), ("data", "cp"))
    exchange = exchange_of(mesh.shape["cp"], mesh=mesh)
    o, lse = partials(exchange, 2)
    wide = {"o": o, "lse": lse}[wider]
    arguments = {"o": o, "lse": lse} | {wider: np.stack([wide, wide * 2])}
    specs = {"o": P("cp"), "lse": P("cp")} | {wider: P("data", "cp")}

    def step(x):
        x = x | {wider: x[wider][0]}
        return exchange(Partial(x["o"][0], x["lse"][0], TWO))[None]

    with pytest.raises(ValueError, match="out_specs"):  # replicas along "data" would differ
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=P("cp")))(arguments)


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


@needs_peers
@pytest.mark.parametrize("manual", [("data", "cp"), ("cp",)], ids="-".join)
@pytest.mark.parametrize("order", ["ranks swapped", "groups swapped"])
def test_a_program_whose_mesh_orders_the_devices_otherwise(order, manual):
    """Who is whose peer is in the exchange's mesh; a program of another one reports it instead of mixing up heads.

    Where the program leaves an axis to the compiler it does not know its place along that axis: ranks are compared.
    """
    if RANKS < 4:
        pytest.skip("needs four devices")
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    exchange = exchange_of(cp=2, mesh=Mesh(devices, ("data", "cp")))
    other = Mesh(devices[:, ::-1] if order == "ranks swapped" else devices[[1, 0]], ("data", "cp"))
    o, lse = partials(exchange, 3)
    spec = P("cp")
    program = jax.jit(
        jax.shard_map(
            lambda o, lse: exchange(Partial(o[0], lse[0], TWO))[None],
            mesh=other, in_specs=spec, out_specs=spec, axis_names=set(manual), check_vma=False,
        )
    )  # fmt: skip
    got = np.asarray(program(o, lse))
    if order == "groups swapped" and manual == ("cp",):
        exchange.check()
        assert_merged(exchange, got, o, lse)
        return
    assert np.isnan(got.astype(np.float32)).all()
    with pytest.raises(TopologyError, match=r"mesh puts rank \d's device at place \d, the exchange's mesh at place \d"):
        exchange.check()
    exchange.reset()
    right = jax.jit(
        jax.shard_map(
            lambda o, lse: exchange(Partial(o[0], lse[0], TWO))[None],
            mesh=exchange.mesh, in_specs=spec, out_specs=spec, axis_names=set(manual), check_vma=False,
        )
    )  # fmt: skip
    assert_merged(exchange, right(o, lse), o, lse)
