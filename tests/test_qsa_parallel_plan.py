"""Plans of context-parallel prefill: host work, buckets, dealing out and back; every refusal, before device work."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from qsa_parallel import Ranks, mesh_of, program
from qsa_runs import close, same_selection

from jaxcp import qsa
from jaxcp.layout import Zigzag
from jaxcp.qsa.balance import cuts, of_ranks

C, W = oracle.TINY, oracle.weights(oracle.TINY)
COST = qsa.Cost.of(qsa.QSAConfig.flash_next())


@pytest.fixture(scope="module")
def run():
    return Ranks(C, W, cp=4)


def test_the_host_does_work_per_request_only():
    """A million tokens cost what a thousand cost: 16 bytes per request go to the device."""
    mesh = mesh_of(8)
    qsa.plan([1 << 10], cp=8, mesh=mesh)
    tracemalloc.start()
    plan = qsa.plan([1 << 20, 3], [5, 9], cp=8, mesh=mesh)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert plan.table.shape == (4, 2)
    assert plan.rope_positions is None
    assert plan.table.sharding == NamedSharding(mesh, P()), "on the mesh once, not at every call"


@pytest.mark.parametrize("layout", ["zigzag", "interleave"])
def test_shard_and_unshard(layout):
    lengths, x = [30, 0, 7], np.arange(1.0, 75.0).reshape(37, 2)
    plan = qsa.plan(lengths, cp=4, layout=layout)
    rows = plan.shard(x)
    assert rows.shape == (plan.rows, 2)
    want = plan.layout.split(lengths).shard(x, plan.local_rows)
    np.testing.assert_array_equal(rows, want.reshape(plan.rows, 2))
    np.testing.assert_array_equal(plan.unshard(rows)[:37], x)
    ids = np.arange(37, dtype=np.int32)
    np.testing.assert_array_equal(plan.unshard(plan.shard(ids))[:37], ids)


def test_one_rank_has_the_plain_plan():
    plan, plain = qsa.plan([30, 7], cp=1), qsa.plan([30, 7])
    assert jax.tree.structure(plan) == jax.tree.structure(plain)
    np.testing.assert_array_equal(plan.shard(np.ones((37, 2))), plain.pad(np.ones((37, 2))))


def test_replanning_stays_in_the_program(run):
    plan = qsa.plan([30, 7], cache=run.cache, cp=4, min_rows=64, mesh=run.mesh)
    again = plan.replan([1, 20], [90, 3], requests=[2, 0])
    assert jax.tree.structure(again) == jax.tree.structure(plan)
    assert again.table.shape == plan.table.shape
    assert again.table.sharding == plan.table.sharding
    assert plan.replan([5]).table[:, 1].tolist() == [5, 0, 0, 0], "fewer requests leave segments unused"
    for arguments, match in (
        (([60, 40],), r"lengths: got a bucket of \d+; expected 64"),
        (([1, 1, 1],), "lengths: got a bucket of 4; expected 2"),
        (([1], [96]), "97; expected at most 96 tokens, the cache's capacity"),
        (([1, 1], [1, 1], 7), "positional"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            plan.replan(*arguments)
    with pytest.raises(ValueError, match="rope_positions: got positions; expected the like of this plan's"):
        plan.replan([2], rope_positions=np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"lengths.*prefix_lengths: got a bucket of 320; expected 256"):
        qsa.plan([3], cp=4).replan([3], [280])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"cp": 0}, ValueError, "cp: got 0"),
        ({"layout": "spiral"}, ValueError, r"layout: got 'spiral'; expected one of \['interleave', 'zigzag'\]"),
        ({"layout": "interleave", "balance": COST}, ValueError, "balance: got a cost with layout PackedInterleave"),
        ({"cp": 1, "balance": COST}, ValueError, "balance: got a cost with layout None"),
        ({"index_keys": "cooked"}, ValueError, "index_keys: got 'cooked'"),
        ({"index_keys": "compressed", "cache": None}, ValueError, "'compressed' with no cache"),
        ({"index_keys": "compressed", "cp": 1}, ValueError, "'compressed' with cp = 1"),
        ({"index_keys": "compressed", "layout": "interleave"}, ValueError, "'compressed' with the interleaved layout"),
        ({"index_keys": "compressed"}, ValueError, "lengths: got 30; expected multiples of 32"),
        ({"rope_positions": np.array([[*range(29), 3, 0]] * 3)}, ValueError, "28 then 3 at token 29"),
    ],
)
def test_plan(run, options, error, match):
    with pytest.raises(error, match=match):
        qsa.plan([30, 1], **{"cp": 4, "cache": run.cache} | options)


def test_compressed_keys_need_whole_blocks_in_the_prefix(run):
    with pytest.raises(ValueError, match="prefix_lengths: got 6; expected multiples of 4"):
        qsa.plan([32], [6], cp=4, cache=run.cache, index_keys="compressed")


def test_costs_are_sums_over_rows():
    """Against a loop over positions; 2051 tokens of the model's budget on both sides."""
    small = dataclasses.replace(COST, budget=9, token=3.0, block=2.0)
    per_row = [3 * min(p + 1, 9) + 2 * ((p + 1) // 4) for p in range(60)]
    np.testing.assert_allclose(small.below(np.arange(61)), np.cumsum([0, *per_row]))
    assert (COST.token, COST.block) == (4 * 24 * 256, 2 * 4 * 128)


@pytest.mark.parametrize("cp", [4, 8])
@pytest.mark.parametrize(
    ("lengths", "prefix"),
    [([8192], [0]), ([3000, 5192, 0, 7], [64, 0, 3, 5000]), ([8192], [57344]), ([4096] * 3, [0] * 3)],
)
def test_cuts_by_cost_level_the_ranks(cp, lengths, prefix):
    """The same work on every rank, and as many rows as with blocks of equal length."""
    lengths, prefix = np.array(lengths), np.array(prefix)
    even = Zigzag(cp).split(lengths)
    level = Zigzag(cp).split(lengths, cuts(COST, lengths, prefix, cp))
    np.testing.assert_array_equal(level.counts(), even.counts())
    before, after = (of_ranks(COST, split, prefix) for split in (even, level))
    assert before.sum() == after.sum()
    assert after.max() <= 1.005 * after.mean()
    assert after.max() <= before.max() * 1.002
    assert (np.diff(level.starts) >= 0).all()
    np.testing.assert_array_equal(level.starts[:, [0, -1]], np.stack([0 * lengths, lengths], 1))


def test_cuts_where_every_row_costs_the_same():
    """Prefixes beyond the budget, and no scoring: any cuts will do, whatever rounding makes of equal costs."""
    flat = dataclasses.replace(COST, token=1 / 3, block=0)
    lengths, prefix = np.array([3384, 13492, 5]), np.array([5176, 5452, 9000])
    level = Zigzag(5).split(lengths, cuts(flat, lengths, prefix, 5))
    assert (np.diff(level.starts) >= 0).all()
    np.testing.assert_array_equal(level.counts(), Zigzag(5).split(lengths).counts())


@pytest.mark.parametrize("parts", [{"block": -1.0}, {"token": float("nan")}, {"token": 0, "block": 0}])
def test_costs_are_not_negative(parts):
    with pytest.raises(ValueError, match=r"cost: got \(token, block\)"):
        dataclasses.replace(COST, **parts)


def test_cuts_by_cost_at_whole_blocks():
    starts = cuts(COST, np.array([8192, 40]), np.array([0, 4]), 4, 4)
    assert not (starts % 4).any()
    cache = qsa.init_cache(C, requests=1, pages=200, page_size=64)
    plan = qsa.plan([1000], cp=4, cache=cache, balance=qsa.Cost.of(C), index_keys="compressed")
    assert not np.asarray(plan.starts % 4).any()
    with pytest.raises(ValueError, match="lengths: got 1001; expected multiples of 4"):
        plan.replan([1001])


def test_a_balanced_batch_is_the_same_batch():
    """Cuts by cost change who computes a row, not what; a later batch in the same buckets has its own cuts."""
    run = Ranks(C, W, cp=4, rows=256, balance=qsa.Cost.of(C))
    x = {0: oracle.hidden(C, 90), 1: oracle.hidden(C, 5), 2: oracle.hidden(C, 33)}
    plan = run.plan(x)
    assert plan.starts[0].tolist() != Zigzag(4).split([90]).starts[0].tolist()
    got = run.feed({0: x[0][:60], 1: x[1][:5], 2: x[2][:3]}), run.feed({2: x[2][3:], 0: x[0][60:]})
    for r, parts in {0: (0, 1), 1: (0,), 2: (0, 1)}.items():
        want = oracle.layer(C, W, x[r])
        same_selection([row for i in parts for row in got[i][r][1]], want.blocks)
        close(np.concatenate([got[i][r][0] for i in parts]), want.y, "float32")


def test_arrays_of_other_sizes(run):
    plan = qsa.plan([30], cp=4)
    with pytest.raises(ValueError, match="x: got 99 rows; expected at most"):
        plan.shard(np.zeros((99, 2)))
    with pytest.raises(ValueError, match="y: got 30 rows"):
        plan.unshard(np.zeros((30, 2)))
    with pytest.raises(ValueError, match=r"plan\.layout: got None"):
        qsa.plan([30]).split()


def refused(run, plan, match, mesh=None, cache=None, error=ValueError, **options):
    """The call raises while tracing, and the cache is still there."""
    mesh, cache = mesh or run.mesh, cache or run.cache
    x = jnp.zeros((plan.rows, C.hidden))
    with pytest.raises(error, match=match):
        program(mesh, **options)(run.params, x, cache, plan, np.int32(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_a_plan_for_another_axis(run):
    refused(run, qsa.plan([30], cp=2), "plan: got a plan for cp = 2; expected cp = 4, the size of axis 'cp'")
    refused(run, qsa.plan([30]), "plan: got a plan for cp = 1; expected cp = 4")
    with pytest.raises(ValueError, match="axis_name: got None; expected the mesh axis of the plan's 4 ranks"):
        qsa.prefill(run.params, jnp.zeros((32, C.hidden)), run.cache, qsa.plan([30], cp=4))


def test_a_plan_on_another_mesh(run):
    elsewhere = jax.sharding.Mesh(np.array(jax.devices()[4:8]), ("cp",))
    refused(run, qsa.plan([30], cp=4, mesh=elsewhere), "incompatible devices")


def test_a_cache_of_another_plan(run):
    large = qsa.init_cache(C, requests=4, pages=65, page_size=8, dtype="float32")
    plan = qsa.plan([30], cp=4, cache=large)
    refused(run, plan, "cache: got 3 requests of 96 tokens; expected at least 4 of 128, those of the cache in the plan")


def test_other_refusals(run):
    plan = qsa.plan([30], cp=4, cache=run.cache)
    refused(run, plan, "schedule: got 'someday'", schedule="someday")
    with pytest.raises(ValueError, match=r"x\.shape: got \(4, 16\); expected \(\d+, 16\).*plan\.shard"):
        program(run.mesh)(run.params, jnp.zeros((16, C.hidden)), run.cache, plan, np.int32(0))
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), run.params)
    with pytest.raises(ValueError, match=r"params: got a weight of shape .* expected 1 layers, the cache's"):
        qsa.prefill_layers(stacked, jnp.zeros((16, C.hidden)), run.cache, qsa.plan([5]))
