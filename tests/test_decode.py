"""Decode and prefill over a sharded cache: equal to float64 attention over everything stored, step after step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import rows_of
from decode_session import Case, Session
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import CacheOverflowError, decode
from jaxcp.cache import checked
from jaxcp.layout import Interleave
from jaxcp.prefix import gather_chunk
from jaxcp.topology import make_mesh

MLA = {"kv_heads": 1, "key_dim": 12, "value_dim": 8, "latent": True}

CASES = [
    Case(1),
    Case(2, backend="ag_rs"),
    Case(3, heads=9, granularity=2, backend="allgather"),
    Case(8, heads=16, kv_heads=2, page_size=1, backend="ag_rs"),
    Case(8, heads=1, kv_heads=1, granularity=4),
    Case(2, heads=16, **MLA, dtype="bfloat16", granularity=4),
    Case(4, heads=9, **MLA, backend="ag_rs"),
    Case(3, cache_dtype="float8_e4m3fn"),
    Case(4, heads=6, dtype="float16", cache_dtype="bfloat16", value_dim=12),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_conversation_matches_the_oracle(case):
    """Ragged prompts, more prompt, decoding, drafts of which some are rejected, padding rows, an idle request."""
    session = Session(case)
    session.check_step("prefill", (0, 5, 13), 13, chunk=8)
    session.check_step("prefill", (3, 13, 0), 13, chunk=8)
    session.check_step("attention", (1, 1, 1), 1)
    session.check_step("attention", (3, 3, 3), 3)
    session.truncate(session.lengths - [2, 0, 3])
    session.check_step("attention", (3, 0, 2), 3)
    session.check_step("prefill", (1, 2, 13), 13, chunk=8)
    session.check_step("attention", (1, 1, 0), 1)
    decode.check(session.cache)


@pytest.mark.parametrize("cp", [2, 8])
def test_lengths_around_a_cycle_and_a_page(cp):
    """Requests that start with their first tokens in decode: lengths 1 ... 2 cp + 1, every shard empty at first."""
    session = Session(Case(cp, heads=8, kv_heads=2, page_size=2))
    for step in range(2 * cp + 1):
        session.check_step("attention", (1, step % 2, int(step > cp)), 1)


def test_long_ragged_requests():
    lengths = np.arange(2047, 2054)
    session = Session(Case(3, heads=3, page_size=16, capacity=2100, requests=7))
    q, k, v = session.new_tokens(2053)
    session.grow(k, v, lengths)
    session.call("prefill", q, k, v, lengths, lengths)
    for _ in range(2):
        session.check_step("attention", [4] * 7, 4)
        session.truncate(session.lengths - 3)


def test_counts_default_to_all_tokens():
    session = Session(Case(2))
    session.check_step("prefill", (4, 4, 4), 4)
    q, k, v = session.new_tokens(2)
    session.grow(k, v, (2, 2, 2))
    out = session.call("attention", q, k, v, session.lengths, None)
    np.testing.assert_allclose(out[:, :, :9], session.expected(q, (2, 2, 2))[0], atol=1e-5)


@pytest.mark.parametrize("case", [Case(3), Case(2, heads=16, **MLA, cache_dtype="float8_e4m3fn")], ids=str)
def test_prefill_does_not_depend_on_how_a_prompt_is_cut(case):
    whole, cut, decoded = (Session(case) for _ in range(3))
    q, k, v = whole.new_tokens(24)
    lengths = np.array([24, 24, 24])
    expected = whole.call("prefill", q, k, v, lengths, lengths)
    pieces = [
        cut.call("prefill", q[:, a : a + 8], k[:, a : a + 8], v[:, a : a + 8], [a + 8] * 3, [8] * 3, chunk=c)
        for a, c in ((0, 1), (8, 16), (16, 1))
    ]
    steps = [
        decoded.call("attention", q[:, a : a + 3], k[:, a : a + 3], v[:, a : a + 3], [a + 3] * 3, [3] * 3)
        for a in range(0, 24, 3)
    ]
    np.testing.assert_allclose(np.concatenate(pieces, 1), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(steps, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [Interleave(1), Interleave(2, 4), Interleave(3, 2), Interleave(8)], ids=str)
def test_a_gathered_chunk_is_in_token_order(layout):
    rng = np.random.default_rng(1)
    case = Case(layout.cp, granularity=layout.granularity, capacity=16 * layout.cp, requests=2)
    session = Session(case)
    lengths = np.array([16 * layout.cp, 16 * layout.cp - 3])
    q, k, v = session.new_tokens(lengths.max())
    session.call("prefill", q, k, v, lengths, lengths)
    width, specs = 4 * layout.cp, session.cache.partition_specs("cp")
    for _ in range(3):
        pages = int(rng.integers(1, 4))
        first = int(rng.integers(0, 4 - pages + 1))
        gathered = jax.jit(
            jax.shard_map(
                lambda cache, page, pages=pages: gather_chunk(cache, jnp.int32(1), page, pages, "cp"),
                mesh=session.mesh,
                in_specs=(specs, P()),
                out_specs=P(),
                check_vma=False,
            )
        )(session.cache, jnp.int32(first))
        for got, sent in zip(gathered, (k, v), strict=True):
            for b, length in enumerate(lengths):
                stop = min((first + pages) * width, length)
                np.testing.assert_allclose(got[b, : stop - first * width], sent[b, first * width : stop], rtol=1e-6)


@pytest.mark.parametrize("name", ["attention", "prefill"])
def test_device_lengths_out_of_range_harm_nobody_and_are_reported(name):
    session, twin = Session(Case(2, capacity=16)), Session(Case(2, capacity=16))
    for each in (session, twin):
        each.check_step("prefill", (14, 10, 6), 14)
    q, k, v = session.new_tokens(3)
    for lengths, lost in (((17, 13, 9), (1, 0, 0)), ((2**31 - 1, 13, 9), (3, 0, 0)), ((-5, 13, 9), (3, 0, 0))):
        before = np.asarray(session.cache.dropped)
        out = session.call(name, q, k, v, lengths, (3, 3, 3))
        assert (np.asarray(session.cache.dropped) - before).tolist() == list(lost)
        healthy = twin.call(name, q, k, v, (14, 13, 9), (0, 3, 3))
        np.testing.assert_allclose(out[1:], healthy[1:], rtol=1e-6, atol=1e-6)
        assert np.isfinite(out).all()
        with pytest.raises(CacheOverflowError, match=r"request 0 lost \d rows"):
            decode.check(session.cache)
    decode.check(twin.cache)


@pytest.mark.parametrize("name", ["attention", "prefill"])
def test_shard_map_may_check_how_values_vary(name):
    session = Session(Case(2, dtype="bfloat16"), check_vma=True)
    session.check_step(name, (4, 9, 0), 9)
    session.check_step(name, (3, 1, 9), 9)


def test_other_mesh_axes_hold_their_own_groups():
    """data x cp: each data group attends for its own requests over its own ranks' rows."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "cp"))
    exchange = jaxcp.Exchange(mesh, "cp", max_tokens=8, heads=4, head_dim=8, dtype="float32", backend="a2a")
    config = decode.CacheConfig.gqa(layers=1, kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    cache = decode.init_cache(
        config, Interleave(4), pages=5, requests=4, mesh=mesh, axis_name="cp", data_axes=("data",)
    )
    assert cache.bytes_per_rank == 5 * 4 * config.row_bytes
    specs = cache.partition_specs("cp", ("data",))
    q, k, v = (jnp.asarray(np.random.default_rng(0).standard_normal((2 * 2 * 6, n, 8)), jnp.float32) for n in (4, 2, 2))
    lengths = jnp.full(2, 6, jnp.int32)

    def step(q, k, v, cache):
        out, cache = decode.prefill(q, k, v, cache, lengths, exchange=exchange)
        return decode.attention(out * 0 + q, k, v, cache, lengths, exchange=exchange)[0]

    out = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data", "cp"), P("data"), P("data"), specs),
            out_specs=P("data", "cp"),
            check_vma=False,
        )
    )(q, k, v, cache)
    single = Session(Case(1, heads=4, kv_heads=2, layers=1, requests=4))
    shaped = [np.asarray(x).reshape(4, 6, *x.shape[1:]) for x in (q, k, v)]
    expected = single.call("prefill", *shaped, [6] * 4, [6] * 4, layer=0)
    np.testing.assert_allclose(np.asarray(out).reshape(4, 6, 4, 8), expected, rtol=1e-5, atol=1e-6)


def trace(session, **changes):
    """decode.attention on 2 ranks with 3 requests of 2 tokens, traced only."""
    arguments = {
        "q": jnp.zeros((6, 5, 8)), "k": jnp.zeros((6, 3, 8)), "v": jnp.zeros((6, 3, 8)),
        "cache": session.cache, "lengths": jnp.full(3, 4, jnp.int32),
    } | changes  # fmt: skip
    host = {name: arguments.pop(name) for name in list(arguments) if not isinstance(arguments[name], jax.Array)}
    cache = host.pop("cache")

    def call(arrays, cache):
        return decode.attention(**arrays, cache=cache, **{"exchange": session.exchange} | host)

    specs = cache.partition_specs("cp")
    jax.eval_shape(
        jax.shard_map(
            call, mesh=session.mesh, in_specs=(P(), specs), out_specs=(P(None, "cp"), specs), check_vma=False
        ),
        arguments,
        cache,
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.zeros((6, 5))}, ValueError, r"q.shape: got \(6, 5\); .* \[tokens, heads_per_rank=5, key_dim=8\]"),
        ({"q": jnp.zeros((6, 9, 8))}, ValueError, "Give the heads that this rank keeps"),
        ({"q": jnp.zeros((6, 5, 4))}, ValueError, "key_dim=8"),
        ({"q": jnp.zeros((5, 5, 8))}, ValueError, "5 tokens for 3 requests"),
        ({"q": jnp.zeros((6, 5, 8), jnp.int32)}, TypeError, "q.dtype: got int32"),
        ({"k": jnp.zeros((6, 2, 8))}, ValueError, r"k.shape: got \(6, 2, 8\); expected \(6, 3, 8\)"),
        ({"v": jnp.zeros((6, 3, 4))}, ValueError, r"v.shape: got \(6, 3, 4\); expected \(6, 3, 8\)"),
        ({"k": jnp.zeros((6, 3, 8), jnp.bfloat16)}, TypeError, "k.dtype: got bfloat16; expected float32"),
        ({"lengths": np.array([4, -1, 4])}, ValueError, "lengths: got -1; expected 0 <= lengths <= 64"),
        ({"lengths": np.array([4, 4, 65])}, ValueError, "lengths: got 65; expected 0 <= lengths <= 64"),
        ({"lengths": jnp.full(2, 4)}, ValueError, r"lengths.shape: got \(2,\); expected \[requests=3\]"),
        ({"lengths": jnp.full(3, 4.0)}, TypeError, "lengths.dtype: got float32"),
        ({"counts": np.array([3, 1, 1])}, ValueError, "counts: got 3; expected 0 <= counts <= 2"),
        ({"layer": 2}, ValueError, "layer: got 2"),
        ({"implementation": "cudnn"}, ValueError, "implementation: got 'cudnn'"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(changes, error, message):
    with pytest.raises(error, match=message):
        trace(Session(Case(2)), **changes)


def test_good_arguments_are_accepted():
    trace(Session(Case(2)), counts=np.array([2, 1, 0]), layer=1, implementation="xla", lengths=np.array([64, 1, 0]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": jnp.zeros((2, 8, 4, 3, 4))}, ValueError, r"cache.k.shape: .* expected \[layers=2, pages, .* dim=8\]"),
        ({"v": jnp.zeros((1, 8, 4, 3, 8))}, ValueError, "cache.v.shape"),
        ({"v": jnp.zeros((2, 8, 4, 3, 8), jnp.bfloat16)}, TypeError, "cache.v.dtype: got bfloat16; expected float32"),
        ({"page_table": jnp.zeros((2, 4), jnp.int32)}, ValueError, r"cache.page_table: got int32\[2, 4\]"),
        ({"page_table": jnp.zeros((3, 4))}, ValueError, "cache.page_table: got float32"),
    ],
)
def test_a_cache_that_contradicts_its_config_is_refused(changes, error, message):
    session = Session(Case(2))
    with pytest.raises(error, match=message):
        trace(session, cache=dataclasses.replace(session.cache, **changes))


def test_something_else_is_no_cache():
    with pytest.raises(TypeError, match=r"cache: got NoneType; expected a Cache"):
        checked(None)


def exchange_of(cp, heads, head_dim=8, dtype="float32"):
    return jaxcp.Exchange(make_mesh(cp), "cp", max_tokens=8, heads=heads, head_dim=head_dim, dtype=dtype, backend="a2a")


@pytest.mark.parametrize(
    ("exchange", "q", "message"),
    [
        (lambda: exchange_of(3, 9), (6, 3, 8), "cache.layout.cp: got 2; expected 3, the ranks of the exchange"),
        (lambda: exchange_of(2, 10), (6, 5, 8), "exchange.heads: got 10; expected a multiple of kv_heads = 3"),
        (lambda: exchange_of(2, 9, head_dim=4), (6, 5, 8), "partial.o.shape: got"),
    ],
)
def test_an_exchange_that_does_not_fit_the_cache_is_refused(exchange, q, message):
    with pytest.raises(ValueError, match=message):
        trace(Session(Case(2)), exchange=exchange(), q=jnp.zeros(q))


def test_a_latent_cache_needs_a_scale_and_its_own_shapes():
    session = Session(Case(2, heads=10, **MLA))
    rows = {"q": jnp.zeros((6, 5, 12)), "k": jnp.zeros((6, 8)), "v": jnp.zeros((6, 4))}
    trace(session, **rows, scale=0.1)
    with pytest.raises(TypeError, match="scale: got None"):
        trace(session, **rows)
    with pytest.raises(ValueError, match=r"rope.shape: got \(6, 8\); expected \(6, 4\)"):
        trace(session, **rows | {"v": jnp.zeros((6, 8))}, scale=0.1)


def test_a_call_outside_its_axis_is_refused():
    session = Session(Case(2))
    q, k = jnp.zeros((6, 5, 8)), jnp.zeros((6, 3, 8))
    with pytest.raises(ValueError, match="axis 'cp': got a call outside it"):
        decode.attention(q, k, k, session.cache, np.full(3, 4), exchange=session.exchange)
    other = jax.sharding.Mesh(jax.devices()[:4], ("cp",))
    with pytest.raises(ValueError, match="axis 'cp': got an axis of 4 ranks"):
        jax.eval_shape(
            jax.shard_map(
                lambda: decode.attention(q, k, k, session.cache, np.full(3, 4), exchange=session.exchange)[0],
                mesh=other,
                in_specs=(),
                out_specs=P(None, "cp"),
                check_vma=False,
            )
        )


@pytest.mark.parametrize("name", ["attention", "prefill"])
def test_no_token_is_no_work(name):
    session = Session(Case(2))
    out = session.call(name, *(x[:, :0] for x in session.new_tokens(1)), [4, 5, 6], None)
    assert out.shape == (3, 0, 10, 8)


def test_ranks_own_what_the_layout_says():
    session = Session(Case(4, granularity=2, requests=1))
    q, k, v = session.new_tokens(11)
    session.call("prefill", q, k, v, [11], [11])
    table, stored = np.asarray(session.cache.page_table)[0], np.asarray(session.cache.k)
    pages = stored.shape[1] // 4
    for rank in range(4):
        own = stored[1, rank * pages : (rank + 1) * pages]
        for j, p in enumerate(rows_of(rank, 11, 4, 2)):
            np.testing.assert_allclose(own[table[p // 16], j % 4], k[0, p], rtol=1e-6)
        assert np.isfinite(own[1:]).all(axis=(1, 2, 3)).sum() <= 1
        assert np.isfinite(own[1:, :, 0, 0]).sum() == len(rows_of(rank, 11, 4, 2))
