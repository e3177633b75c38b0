"""Context-parallel prefill against one device: caches, scores and selections bit for bit, outputs to tolerance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from qsa_parallel import (
    Ranks,
    held,
    mesh_of,
    program,
    replicated,
    same_bits,
    same_on_every_device,
    stale,
    swapped,
)
from qsa_runs import Session, close, same_selection

from jaxcp import overlap, qsa
from jaxcp.lse import LogBase, Partial
from jaxcp.qsa import forward, mixing, parallel
from jaxcp.qsa.indexing import take
from jaxcp.qsa.layer import Projected, products
from jaxcp.qsa.operations import PREPARE, WRITE_INDEX, WRITE_KV
from jaxcp.qsa.peers import OnAxis
from jaxcp.qsa.resolve import Implementation
from jaxcp.qsa.selection import SELECT, scores
from jaxcp.qsa.sparse import ATTEND
from jaxcp.qsa.view import view_of

C, W = oracle.TINY, oracle.weights(oracle.TINY)
BUDGET, ROOM = (oracle.BUDGET, oracle.weights(oracle.BUDGET)), {"tokens": 8256, "page_size": 64, "rows": 256}
PREFIXES = (21, 0, 13, 6, 64, 3, 0, 8)


def batch(cp):
    """(prefix, length) of requests around every edge: long, one token, none, 2c - 1, 2c, 2c + 1, and more."""
    return list(zip(PREFIXES, (60, 1, 0, 2 * cp - 1, 2 * cp, 2 * cp + 1, 33, 5), strict=True))


def tokens(cases):
    """Token rows of every request, its prefix included."""
    return {i: oracle.hidden(C, prefix + n, i) for i, (prefix, n) in enumerate(cases)}


def both(cp, cases=None, **options):
    """(Session, Ranks) whose caches hold the prefixes of the cases, and the new tokens."""
    cases = batch(cp) if cases is None else cases
    x, sizes = tokens(cases), {"requests": len(cases), "tokens": 136, "rows": 256}
    plain = Session(C, W, **sizes)
    prefix = {i: x[i][:p] for i, (p, _) in enumerate(cases)}
    plain.feed(prefix)
    ranks = Ranks(C, W, cp=cp, **sizes, **options)
    ranks.cache, ranks.lengths = replicated(jax.tree.map(np.asarray, plain.cache), ranks.mesh), plain.lengths.copy()
    return plain, ranks, {i: x[i][p:] for i, (p, _) in enumerate(cases)}


def score_bits(index_q, cache, layer, queries, config):
    """In place of a selection, the bits of what it would choose from: every row's scores of its visible blocks."""
    pages = take(cache.page_table, queries.rows.request)
    keys = take(cache.index, layer, pages).reshape(len(index_q), -1, config.index_dim)
    score = jax.vmap(lambda q, k: scores(q[None], k)[0])(index_q, keys)
    seen = jnp.arange(score.shape[1]) < ((queries.rows.position + 1) // config.ratio)[:, None]
    return jnp.where(seen, lax.bitcast_convert_type(score, jnp.int32), -1)


def no_attention(q, blocks, cache, layer, queries, config):
    return Partial(jnp.zeros_like(q), jnp.zeros(q.shape[:2]), LogBase.TWO)


def unchanged(params, of, angles):
    """In place of norms and rotations: the products, in shape."""
    c = params.config
    k, v = (rows.reshape(-1, c.kv_heads, c.head_dim) for rows in (of.k, of.v))
    index = of.index.reshape(-1, c.index_heads + 1, c.index_dim)
    return Projected(jnp.stack([k, v], 1), index[:, :-1], index[:, -1])


def unchanged_queries(params, q_gate, angles):
    """As `unchanged`, of the queries and gates."""
    c = params.config
    return tuple(jnp.moveaxis(q_gate.reshape(-1, c.heads, 2, c.head_dim), 2, 0))


@functools.partial(jax.jit, static_argnames=("context", "longest", "implementation"))
def plain_mix(params, of, cache, segments, layer, **static):
    mixed, _, cache, blocks = forward.mix(params, of, cache, segments, None, layer, **static)
    return mixed, cache, blocks


def ranks_mix(mesh, plan, schedule, implementation):
    """jit(shard_map) of what lies between a layer's products."""

    def step(params, of, cache, plan, layer):
        view = view_of(plan, lax.axis_index("cp"), cache)
        ways = {"compressed": plan.index_block > 1, "peers": OnAxis("cp", schedule), "implementation": implementation}
        return parallel.mix(params, of, cache, view, layer, **ways)

    rows = P("cp")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), rows, P(), P(), P()), out_specs=(rows, P(), rows)))


@pytest.fixture
def compare(monkeypatch):
    return functools.partial(compare_mixes, monkeypatch)


def compare_mixes(monkeypatch, cp, schedule="overlapped", implementation="xla", cases=None, **options):
    """Both from the same projected rows: caches, selections or scores bit for bit, on every device; outputs close.

    Bits of a matrix product or a fused norm depend on how many rows it has, so rows are projected once for both.
    """
    plain, ranks, x = both(cp, cases, **options)
    monkeypatch.setitem(SELECT, "scores", Implementation(score_bits))
    monkeypatch.setitem(ATTEND, "scores", Implementation(no_attention))
    monkeypatch.setitem(PREPARE, implementation, Implementation(unchanged))
    for table in (WRITE_INDEX, WRITE_KV):
        monkeypatch.setitem(table, implementation, table["xla"])
    monkeypatch.setattr(mixing, "prepare_queries", unchanged_queries)
    plan, total = ranks.plan(x), sum(map(len, x.values()))
    of = jax.jit(products)(plain.params, plan.pad(np.concatenate(list(x.values()))))
    bounds = {"context": plan.context, "longest": plan.rows, "implementation": implementation}
    want = plain_mix(plain.params, of, plain.cache, plan.segments, jnp.int32(0), **bounds)
    dealt = jax.device_put(jax.tree.map(plan.shard, of), NamedSharding(ranks.mesh, P("cp")))
    run = ranks_mix(ranks.mesh, plan, schedule, implementation)
    mixed, cache, blocks = run(ranks.params, dealt, ranks.cache, plan, jnp.int32(0))
    same_on_every_device(cache)
    same_bits(held(cache), held(want[1]))
    got = np.asarray(plan.unshard(blocks))[:total]
    np.testing.assert_array_equal(got, np.asarray(want[2])[:total])
    close(plan.unshard(mixed)[:total], want[0][:total], "float32")
    qsa.check(cache)


@pytest.mark.parametrize("layout", ["zigzag", "interleave"])
@pytest.mark.parametrize("cp", [pytest.param(2, marks=pytest.mark.slow), 4, 8])
def test_caches_and_selections_are_those_of_one_device(compare, cp, layout):
    compare(cp, layout=layout)


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("interleave", marks=pytest.mark.slow)])
def test_what_selection_chooses_from_is_that_of_one_device(compare, layout):
    compare(4, layout=layout, implementation="scores")


@pytest.mark.parametrize("schedule", ["inline", "kv_first"])
def test_schedules_change_no_bit(compare, schedule):
    compare(4, schedule)


@pytest.mark.parametrize("cp", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_compressed_index_keys_change_no_bit(compare, cp):
    compare(cp, cases=[(8, 16 * cp), (0, 8 * cp), (64, 0), (12, 8 * cp)], index_keys="compressed")


def test_compressed_keys_of_requests_shorter_than_the_ring(compare):
    """A request's ring spans several ranks: 2 cp blocks of 4 tokens, and rings of 10."""
    compare(2, cases=[(0, 16), (4, 16), (0, 32)], index_keys="compressed")


def test_float8_rows_travel_as_stored(compare):
    compare(4, kv_dtype="float8_e4m3fn", cases=[(9, 40), (0, 21)])


@pytest.mark.parametrize(("cp", "layout"), [(4, "zigzag"), pytest.param(8, "interleave", marks=pytest.mark.slow)])
def test_chunks_then_decode(cp, layout):
    """Three chunks that end inside blocks, images and text, then decode steps: a whole request's answer."""
    x, rope = oracle.hidden(C, 83, 3), oracle.image_positions(83)
    other = oracle.hidden(C, 40, 4)
    run = Ranks(C, W, cp=cp, layout=layout, rows=64)
    pieces, text = [], np.broadcast_to(np.arange(40), (3, 40))
    for a, b in ((0, 30), (30, 61), (61, 80)):
        parts = {2: x[a:b]} | ({0: other} if a == 30 else {})
        pieces.append(run.feed(parts, {2: rope[:, a:b], 0: text})[2])
    pieces += [run.step({2: x[a : a + 1]}, rope={2: rope[:, a : a + 1]})[2] for a in range(80, 83)]
    run.finish()
    want = oracle.layer(C, W, x, rope)
    same_selection([row for _, rows in pieces for row in rows], want.blocks)
    close(np.concatenate([y for y, _ in pieces]), want.y, "float32")


def test_one_rank_is_the_plain_program():
    plain, ranks, x = both(1)
    a, b = plain.feed(x), ranks.feed(x)
    same_bits(held(plain.cache), held(ranks.cache))
    for i in x:
        np.testing.assert_array_equal(a[i][0], b[i][0])
        assert a[i][1] == b[i][1]


@pytest.mark.parametrize("order", [("data", "cp"), ("cp", "data")])
def test_data_parallel_groups_are_apart(order):
    """Two batches on the two data groups of a mesh, with caches of their own; the axis may stand anywhere."""
    mesh = mesh_of(4, data=2) if order[0] == "data" else mesh_of(4, after={"data": 2})
    runs = [Session(C, W, rows=64) for _ in range(2)]
    x = [
        {0: oracle.hidden(C, 37, 1), 1: oracle.hidden(C, 6, 2)},
        {2: oracle.hidden(C, 50, 3), 0: oracle.hidden(C, 1, 4)},
    ]
    first = qsa.plan([37, 6], requests=[0, 1], cache=runs[0].cache, cp=4, min_rows=64, min_context=96)
    plans = [first, first.replan([50, 1], requests=[2, 0])]
    rows = jnp.stack([plan.shard(np.concatenate(list(parts.values()))) for plan, parts in zip(plans, x, strict=True)])

    def stacked(trees):
        return jax.tree.map(lambda *a: jnp.stack(a), *trees)

    def step(params, x, cache, plan):
        cache, plan = jax.tree.map(lambda a: a[0], (cache, plan))
        y, cache = qsa.prefill(params, x[0], cache, plan, axis_name="cp")
        return jax.tree.map(lambda a: a[None], (y, cache))

    specs = P(), P("data", "cp"), P("data"), P("data")
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data", "cp"), P("data"))))
    caches = stacked([jax.tree.map(np.asarray, r.cache) for r in runs])
    y, cache = run(jax.tree.map(np.asarray, runs[0].params), np.asarray(rows), caches, stacked(plans))
    for group, (plan, plain, parts) in enumerate(zip(plans, runs, x, strict=True)):
        want = np.concatenate([y for y, _ in plain.feed(parts).values()])
        close(plan.unshard(y[group])[: len(want)], want, "float32")
        own, their = (held(c) for c in (jax.tree.map(lambda a, g=group: a[g], cache), plain.cache))
        for name in own:
            np.testing.assert_allclose(own[name], their[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_a_stack_of_layers(scan):
    """Layers with residual connections, unrolled and scanned, on eight ranks and on one device."""
    n, x = 3, oracle.hidden(C, 43)
    tensors = [oracle.weights(C, seed) for seed in range(n)]
    run = Ranks(C, W, cp=8, layers=n, rows=64)
    params = jax.tree.map(lambda *a: jnp.stack(a), *(qsa.from_tensors(t, C, "float32") for t in tensors))
    plan = run.plan({1: x})
    step = functools.partial(qsa.prefill_layers, axis_name="cp", scan=scan)
    mapped = jax.shard_map(step, mesh=run.mesh, in_specs=(P(), P("cp"), P(), P()), out_specs=(P("cp"), P()))
    y, cache = jax.jit(mapped, donate_argnums=2)(params, plan.shard(x), run.cache, plan)
    want = np.float64(x)
    for t in tensors:
        want = want + oracle.layer(C, t, want).y
    close(plan.unshard(y)[: len(x)], want, "float32")
    same_on_every_device(cache)
    plain = Session(C, W, layers=n, rows=64)
    own = qsa.plan([len(x)], requests=[1], cache=plain.cache)
    again, _ = qsa.prefill_layers(params, own.pad(x), plain.cache, own, scan=scan)
    close(again[: len(x)], want, "float32")


@pytest.mark.parametrize("broken", [swapped, stale])
def test_wrong_peer_rows_are_seen_on_every_rank(broken, monkeypatch):
    name = broken.__name__  # programs are kept by the name of their schedule
    monkeypatch.setitem(overlap.SCHEDULES, name, broken)
    plain, ranks, x = both(4, [(0, 64), (5, 40)])
    want = np.concatenate([y for y, _ in plain.feed(x).values()])
    plan, rows = ranks.plan(x), np.concatenate(list(x.values()))
    run = program(ranks.mesh, schedule=name)
    y, cache, _ = run(ranks.params, plan.shard(rows), ranks.cache, plan, np.int32(0))
    split = plan.layout.split([64, 40])
    for rank, (got, own) in enumerate(
        zip(y.reshape(4, plan.local_rows, -1), split.shard(want, plan.local_rows), strict=True)
    ):
        with pytest.raises(AssertionError):
            close(got, own, "float32")
        device = jax.tree.map(lambda a, r=rank: a.addressable_shards[r].data, cache)
        with pytest.raises(AssertionError, match="k differs"):
            same_bits(held(device), held(plain.cache))


def test_one_program_serves_a_bucket_and_nothing_leaves_the_devices():
    """Lengths, prefixes, rows of the cache and layers are data: no retrace, no transfer in either direction."""
    run = Ranks(C, W, cp=4, rows=128, layers=2)
    step, before = program(run.mesh), None
    layers = replicated([jnp.int32(0), jnp.int32(1)], run.mesh)
    for turn, parts in enumerate(({0: 40, 1: 3}, {1: 60, 2: 31}, {2: 0, 0: 9}, {0: 7, 2: 1})):
        x = {r: oracle.hidden(C, n, r) for r, n in parts.items()}
        plan = run.plan(x)
        rows = jax.device_put(plan.shard(np.concatenate(list(x.values()))), NamedSharding(run.mesh, P("cp")))
        if turn == 1:
            before = qsa.traces(), step._cache_size()
        with jax.transfer_guard("disallow_explicit") if turn else jax.transfer_guard("allow"):
            y, run.cache, _ = step(run.params, rows, run.cache, plan, layers[turn % 2])
        y.block_until_ready()
        run.lengths[list(parts)] += list(parts.values())
    assert (qsa.traces(), step._cache_size()) == before


@pytest.mark.slow
def test_ranks_agree_with_the_models_budget():
    """Rows on both sides of the budget, at the model's budget and ratio."""
    x = {0: oracle.hidden(oracle.BUDGET, 2100, 1)}
    plain = Session(*BUDGET, tokens=2112, page_size=64, rows=2560, requests=1)
    ranks = Ranks(*BUDGET, cp=8, tokens=2112, page_size=64, rows=2560, requests=1)
    a, b = plain.feed(x), ranks.feed(x)
    assert a[0][1] == b[0][1]
    close(b[0][0], a[0][0], "float32")


@functools.cache
def one_device(cases):
    """New tokens, the cache and its lengths after the prefixes, and what one device makes of them."""
    x = [oracle.hidden(BUDGET[0], prefix + n, i) for i, (prefix, n) in enumerate(cases)]
    plain = Session(*BUDGET, requests=len(cases), **ROOM)
    if prefixes := {i: x[i][:prefix] for i, (prefix, _) in enumerate(cases) if prefix}:
        plain.feed(prefixes)
    cache, lengths = jax.tree.map(np.asarray, plain.cache), plain.lengths.copy()
    new = {i: x[i][prefix:] for i, (prefix, _) in enumerate(cases)}
    return new, cache, lengths, plain.feed(new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cp", "layout", "cases"),
    [
        (8, "zigzag", ((0, 8193),)),
        (8, "interleave", ((0, 8193),)),
        (4, "zigzag", ((7168, 1024),)),
        (8, "zigzag", ((0, 2048),) * 4),
        (4, "zigzag", ((64, 3000), (0, 5192))),
    ],
)
def test_published_cases(cp, layout, cases):
    """The shapes of public equality runs (prefix 57344 and 4 x 8192 at a quarter or less), at the model's budget."""
    new, cache, lengths, want = one_device(cases)
    ranks = Ranks(*BUDGET, cp=cp, layout=layout, requests=len(cases), **ROOM)
    ranks.cache, ranks.lengths = replicated(cache, ranks.mesh), lengths.copy()
    for i, (y, blocks) in ranks.feed(new).items():
        assert blocks == want[i][1]
        close(y, want[i][0], "float32")
