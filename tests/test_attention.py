"""One rank's attention against float64, on every rank; what it costs; what it refuses."""

import dataclasses
import functools
import logging

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import BackendError, LogBase, Partial, lse
from jaxcp.attention import IMPLEMENTATIONS, api, attention, checks, online, paged
from jaxcp.layout import INT32_MAX, Interleave
from jaxcp.products import contract

LONG = tuple(range(2047, 2054))


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of requests; `counts` None: every query token is real."""

    cp: int
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    latent: bool = False
    query_tokens: int = 1
    counts: tuple[int, ...] | None = None
    granularity: int = 1
    page_size: int = 4
    dtype: str = "float32"
    base: LogBase = LogBase.TWO

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)[2:]
            if getattr(self, f.name) != f.default
        ]
        return f"cp={self.cp},n={len(self.lengths)}," + ",".join(changed)


def around(cp):
    return (0, 1, max(cp - 1, 0), cp, cp + 1, 2 * cp + 1)


CASES = [
    *(Case(cp, around(cp), base=LogBase.E if cp % 2 else LogBase.TWO) for cp in (1, 2, 3, 4, 8)),
    *(Case(cp, around(cp), query_tokens=k, heads=9, kv_heads=3) for cp, k in ((1, 4), (2, 3), (3, 4), (8, 3), (8, 4))),
    Case(3, LONG, query_tokens=3, page_size=16, dtype="bfloat16"),
    Case(8, LONG, query_tokens=4, page_size=16, granularity=16),
    Case(2, LONG, heads=16, kv_heads=1, key_dim=24, value_dim=16, latent=True, page_size=64),
    Case(4, (*LONG, 0, 5), heads=3, kv_heads=3, query_tokens=4, granularity=8, page_size=8, base=LogBase.E),
    Case(2, around(2), dtype="float16", query_tokens=3),
    Case(3, around(3), dtype="bfloat16", granularity=4),
    Case(2, (0, 2, 37), 128, 1, key_dim=576, value_dim=512, latent=True, query_tokens=3, dtype="bfloat16"),
    Case(8, (17, 64, 65), heads=9, kv_heads=1, key_dim=24, value_dim=16, latent=True, granularity=4, query_tokens=4),
    Case(2, (5, 9, 0, 3), query_tokens=4, counts=(4, 2, 0, 3)),
    Case(3, (7, 3, 40), query_tokens=3, counts=(0, 1, 3), granularity=2, heads=9, kv_heads=3),
    Case(2, (5, 33), key_dim=8, value_dim=12),
    Case(2, (5, 33), heads=1, kv_heads=1, page_size=1),
]  # fmt: skip


class Batch:
    """Random queries, keys and values of a case in its dtype; pages of a rank, NaN wherever nothing is stored."""

    def __init__(self, case: Case, layers: int = 2):
        self.case, rng = case, np.random.default_rng(0)
        real = case.counts or (case.query_tokens,) * len(case.lengths)
        self.counts = np.minimum(real, case.lengths)
        draw = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), case.dtype), np.float64)  # noqa: E731
        self.q = draw(len(case.lengths), case.query_tokens, case.heads, case.key_dim)
        self.keys = [draw(n, case.kv_heads, case.key_dim) for n in case.lengths]
        self.values = (
            [k[..., : case.value_dim] for k in self.keys]
            if case.latent
            else [draw(n, case.kv_heads, case.value_dim) for n in case.lengths]
        )
        table = max(-(-max(case.lengths) // (case.page_size * case.cp)), 1) + 1
        ids = 1 + rng.permutation(len(case.lengths) * table)
        self.page_table = ids.reshape(-1, table).astype(np.int32)
        self.pages, self.layers, self.scale = ids.size + 1, layers, case.key_dim**-0.5

    def stored(self, rows, rank):
        """Pages [layers, pages, ...]: the last layer holds the rows, the others NaN."""
        case = self.case
        store = oracle.paged(rows, rank, case.cp, case.granularity, case.page_size, self.pages, self.page_table)
        full = np.full((self.layers, *store.shape), np.nan)
        full[-1] = store
        return jnp.asarray(full, case.dtype)

    def run(self, rank, **changes) -> Partial:
        case = self.case
        # L counts real tokens only, so a request shorter than its query tokens starts with rows that see nothing.
        counts = None if case.counts is None else jnp.asarray(case.counts, jnp.int32)
        arrays = {
            "q": jnp.asarray(self.q.reshape(-1, *self.q.shape[2:]), case.dtype),
            "k_pages": self.stored(self.keys, rank),
            "v_pages": None if case.latent else self.stored(self.values, rank),
            "page_table": self.page_table, "lengths": jnp.asarray(case.lengths, jnp.int32), "counts": counts,
            "rank": jnp.int32(rank),
        }  # fmt: skip
        arrays |= {name: changes.pop(name) for name in list(changes) if name in arrays}
        return self.step(**changes)(arrays)

    @functools.cache  # noqa: B019  # one compilation for all ranks of a case
    def step(self, **changes):
        case = self.case
        static = {
            "layer": self.layers - 1, "layout": Interleave(case.cp, case.granularity), "scale": self.scale,
            "base": case.base, "value_dim": case.value_dim,
        }  # fmt: skip
        return jax.jit(lambda arrays: attention(**arrays, **static | changes))

    def expected(self, positions_of):
        """(o, lse in the case's base, magnitude). Query tokens that lie before position 0 see nothing."""
        case = self.case
        q, counts = self.q, self.counts
        if case.counts is None:  # the last tokens are the real ones: shift them to the front, and back
            shift = [np.arange(case.query_tokens) + case.query_tokens - n for n in counts]
            q = np.stack([x[s % case.query_tokens] for x, s in zip(q, shift, strict=True)])
        found = oracle.partial(q, self.keys, self.values, counts, self.scale, positions_of)
        if case.counts is None:
            found = [
                np.stack([np.roll(x, case.query_tokens - n, axis=0) for x, n in zip(xs, counts, strict=True)])
                for xs in found
            ]
        o, l, magnitude = (x.reshape(-1, *x.shape[2:]) for x in found)
        return o, l / case.base.ln, magnitude


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_and_their_merge_match_the_oracle(case):
    batch = Batch(case)
    partials = [batch.run(rank) for rank in range(case.cp)]
    for rank, got in enumerate(partials):
        o, l, magnitude = batch.expected(lambda n, r=rank: oracle.rows_of(r, n, case.cp, case.granularity))
        assert got.o.dtype == case.dtype
        assert got.lse.dtype == jnp.float32
        assert got.base is case.base
        oracle.assert_close(got.o, o, magnitude, case.dtype)
        np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(l))
        seen = np.isfinite(l)
        np.testing.assert_allclose(np.asarray(got.lse)[seen], l[seen], rtol=1e-5, atol=2e-5)
    o, _, magnitude = batch.expected(np.arange)
    merged = lse.merge(jax.tree.map(lambda *x: jnp.stack(x), *partials))
    oracle.assert_close(merged.o, o, 2 * magnitude, case.dtype)


def test_a_row_can_be_empty_on_a_rank_that_holds_keys_of_the_request():
    case = Case(2, (3,), query_tokens=3)
    got = Batch(case).run(1)
    assert np.isneginf(got.lse[0]).all()
    assert not np.asarray(got.o[0]).any()
    assert np.isfinite(got.lse[1:]).all()


@pytest.mark.parametrize("base", LogBase)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_key_breaks_the_rows_that_see_it(base, bad):
    """Its rank's LSE must not say "no key seen": the other ranks' keys alone would look like a result."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 1, 2, 8), *[(1, 6, 1, 8)] * 2))
    broken = online.attend(q, k.at[0, 4].set(bad), v, jnp.array([[4, 5]]), scale=1.0, base=base)
    other = online.attend(q, 100 * k, v, jnp.array([[6, 6]]), scale=1.0, base=base)
    merged = lse.merge_two(other, broken)
    assert np.isnan(merged.o[0, 0, 1]).any()
    np.testing.assert_array_equal(lse.merge_two(broken, other).lse, merged.lse)
    assert np.isfinite(merged.o[0, 0, 0]).all()


@pytest.mark.parametrize("layer", [jnp.float32(1), jnp.zeros(2, jnp.int32)])
def test_a_device_layer_that_is_no_index_is_refused(layer):
    with pytest.raises(TypeError, match=r"layer: got .*; expected an integer scalar"):
        checks.layer_index(layer, 2)


def test_wide_device_lengths_do_not_wrap():
    with jax.enable_x64(True):
        wide = jnp.asarray([2**32 + 5, -(2**40), 7], jnp.int64)
        assert checks.request_ints("lengths", wide, 3).tolist() == [INT32_MAX, -1, 7]
        assert checks.request_ints("lengths", jnp.asarray([2**32 - 1], jnp.uint32), 1).tolist() == [INT32_MAX]


def test_float64_reaches_float64():
    with jax.enable_x64(True):
        case = Case(3, (0, 5, 70), query_tokens=3, dtype="float64")
        batch = Batch(case)
        got = batch.run(1)
        o, l, magnitude = batch.expected(lambda n: oracle.rows_of(1, n, 3, 1))
        assert got.lse.dtype == jnp.float64
        oracle.assert_close(got.o, o, magnitude, "float64")
        np.testing.assert_allclose(got.lse, l, rtol=1e-12)


def test_float8_pages_hold_bits():
    case = Case(2, (5, 33), query_tokens=3)
    batch = Batch(case)
    rounded = lambda rows: [np.asarray(jnp.asarray(x, jnp.float8_e4m3fn), np.float64) for x in rows]  # noqa: E731
    batch.keys, batch.values = rounded(batch.keys), rounded(batch.values)
    bits = lambda rows: jax.lax.bitcast_convert_type(  # noqa: E731
        batch.stored(rows, 0).astype(jnp.float8_e4m3fn), jnp.uint8
    )
    got = batch.run(0, k_pages=bits(batch.keys), v_pages=bits(batch.values))
    o, _, magnitude = batch.expected(lambda n: oracle.rows_of(0, n, 2, 1))
    oracle.assert_close(got.o, o, magnitude, "float32")


def test_pages_that_are_not_owned_end_the_request():
    """A gap in the page table, or an id outside the pool, hides what lies behind it; page 0 is never read."""
    case = Case(1, (12,), page_size=4)
    batch = Batch(case)
    o, _, magnitude = oracle.partial(
        batch.q, [k[:4] for k in batch.keys], [v[:4] for v in batch.values], [1], batch.scale, np.arange
    )
    for bad in (0, -1, batch.pages, 2**31 - 1):
        table = batch.page_table.copy()
        table[0, 1] = bad
        got = batch.run(0, page_table=table)
        oracle.assert_close(got.o, o[:, 0], magnitude[:, 0], "float32")


# What it costs.


def compiled(pages_per_request, *, query_tokens=64, page_size=16, requests=2):
    q = jax.ShapeDtypeStruct((requests * query_tokens, 8, 64), jnp.float32)
    pages = jax.ShapeDtypeStruct((1, 1 + requests * pages_per_request, page_size, 2, 64), jnp.float32)
    table = jax.ShapeDtypeStruct((requests, pages_per_request), jnp.int32)
    lengths = jax.ShapeDtypeStruct((requests,), jnp.int32)
    function = lambda q, k, v, t, n: attention(  # noqa: E731
        q, k, v, t, n, layer=0, layout=Interleave(1), rank=0, scale=1.0, base=LogBase.E
    )
    return jax.jit(function).lower(q, pages, pages, table, lengths).compile()


def test_memory_is_bounded_by_one_block_whatever_the_capacity():
    rows, keys = 2 * 8 * 64, online.block_keys(2 * 8 * 64, 16)
    scores, block = 4 * rows * keys, 4 * 2 * keys * 2 * 64
    state = 4 * rows * 64
    small, large = (compiled(n).memory_analysis().temp_size_in_bytes for n in (512, 8192))
    assert scores <= online.SCORE_BYTES
    # Scores and weights, keys and values as read and as the products want them, the merged state and its successor.
    assert small <= 3 * scores + 4 * block + 8 * state
    assert large - small <= 2 * 4 * 2 * (8192 - 512), "only the page table may grow with the capacity"


def test_work_follows_the_longest_request(monkeypatch):
    reads = []

    def counting(pages, layer, ids, read=paged.read_pages):
        jax.debug.callback(lambda: reads.append(1))
        return read(pages, layer, ids)

    monkeypatch.setattr(paged, "read_pages", counting)
    monkeypatch.setattr(online, "MAX_BLOCK_KEYS", 64)
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((1, 129, 16, 2, 16)), jnp.float32)
    table = jnp.arange(1, 129).reshape(2, 64)
    q = jnp.ones((2, 4, 16))
    step = jax.jit(
        lambda n: attention(q, pages, pages, table, n, layer=0, layout=Interleave(1), rank=0, scale=1.0, base=LogBase.E)
    )
    for lengths, blocks in (((0, 0), 0), ((1, 64), 1), ((65, 3), 2), ((1024, 1), 16)):
        reads.clear()
        jax.block_until_ready(step(jnp.asarray(lengths, jnp.int32)))
        jax.effects_barrier()
        assert len(reads) == 2 * blocks  # keys and values


def test_float32_products_use_the_highest_precision():
    text = str(
        jax.make_jaxpr(
            lambda q: (
                online.attend(
                    q, jnp.ones((1, 4, 1, 8)), jnp.ones((1, 4, 1, 8)), jnp.full((1, 2), 4), scale=1.0, base=LogBase.E
                ).o
            )
        )(jnp.ones((1, 1, 2, 8)))
    )
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2


def test_bfloat16_products_run_on_cpu_whatever_their_shape():
    """XLA:CPU answers "Unsupported element type for DotThunk" for this one unless its operands are widened."""
    a, b = jnp.full((16, 2, 512), 1.5, jnp.bfloat16), jnp.full((2, 512, 128), 0.25, jnp.bfloat16)
    out = jax.jit(lambda a, b: contract("thl,hlv->thv", a, b))(a, b)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 192)


# Implementations.


def test_a_name_never_falls_back(monkeypatch):
    batch = Batch(Case(1, (5,)))
    blocked = dataclasses.replace(IMPLEMENTATIONS["xla"], blocker=lambda problem: f"pages of {problem.page_size} rows")
    monkeypatch.setitem(IMPLEMENTATIONS, "kernel", blocked)
    with pytest.raises(BackendError, match="implementation='kernel' cannot serve this call: pages of 4 rows"):
        batch.run(0, implementation="kernel")
    with pytest.raises(ValueError, match="implementation: got 'nope'; expected 'auto' or one of"):
        batch.run(0, implementation="nope")


def test_auto_takes_the_first_without_a_blocker_and_says_so_once(monkeypatch, caplog):
    blocked = dataclasses.replace(IMPLEMENTATIONS["xla"], blocker=lambda problem: "not here")
    best_first = {"kernel": blocked, **IMPLEMENTATIONS}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", best_first)
    api._log_choice.cache_clear()
    caplog.set_level(logging.INFO, "jaxcp")
    batch = Batch(Case(1, (5,)))
    named, auto, again = batch.run(0, implementation="xla"), batch.run(0), batch.run(0)
    np.testing.assert_array_equal(named.o, auto.o)
    np.testing.assert_array_equal(named.o, again.o)
    assert [r.message for r in caplog.records] == ["attention: xla (plain XLA, works everywhere); not kernel: not here"]


# Bad input.


def test_no_token_and_no_request():
    batch = Batch(Case(2, (5, 33)))
    assert batch.run(0, q=jnp.zeros((0, 4, 16))).o.shape == (0, 4, 16)
    none = jnp.zeros(0, jnp.int32)
    nobody = {"q": jnp.zeros((0, 4, 16)), "page_table": none.reshape(0, 3), "lengths": none}
    assert batch.run(0, **nobody).lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.ones((2, 4))}, ValueError, r"q.shape: got \(2, 4\); expected \[tokens, heads, key_dim\]"),
        ({"q": jnp.ones((2, 4, 8))}, ValueError, "key_dim=16"),
        ({"q": jnp.ones((2, 3, 16))}, ValueError, "heads divisible by kv_heads = 2"),
        ({"q": jnp.ones((3, 4, 16))}, ValueError, "3 tokens for 2 requests"),
        ({"q": jnp.ones((2, 4, 16), jnp.int32)}, TypeError, "q.dtype: got int32"),
        ({"k_pages": jnp.ones((2, 3, 4, 16))}, ValueError, "k_pages.shape"),
        ({"k_pages": jnp.ones((2, 3, 4, 2, 16), jnp.int32)}, TypeError, "k_pages.dtype: got int32"),
        ({"v_pages": jnp.ones((2, 3, 4, 1, 16))}, ValueError, "Keys and values are paged alike"),
        ({"v_pages": None, "value_dim": None}, ValueError, "value_dim: got None"),
        ({"v_pages": None, "value_dim": 17}, ValueError, r"value_dim: got 17; .* in \[1, key_dim=16\]"),
        ({"page_table": jnp.ones((3, 2), jnp.int32)}, ValueError, r"page_table.shape: got \(3, 2\)"),
        ({"lengths": jnp.ones((2, 1), jnp.int32)}, ValueError, r"lengths.shape: got \(2, 1\)"),
        ({"lengths": jnp.ones(2)}, TypeError, "lengths.dtype: got float32"),
        ({"counts": jnp.ones(3, jnp.int32)}, ValueError, r"counts.shape: got \(3,\); expected \[requests=2\]"),
        ({"layer": 2}, ValueError, r"layer: got 2; expected an integer in \[0, 2\)"),
        ({"layer": -1}, ValueError, "layer: got -1"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        Batch(Case(2, (5, 33))).run(0, **changes)


@pytest.mark.parametrize("lengths", [np.array([5, -1]), [5, -1]])
def test_negative_host_lengths_are_refused(lengths):
    pages = jnp.zeros((1, 3, 4, 1, 8))
    with pytest.raises(ValueError, match="lengths: got -1; expected 0 <= lengths"):
        attention(
            jnp.zeros((2, 1, 8)),
            pages,
            pages,
            np.array([[1], [2]]),
            lengths,
            layer=0,
            layout=Interleave(1),
            rank=0,
            scale=1.0,
            base=LogBase.E,
        )


def test_bounds_beyond_the_keys_given_do_not_reach_the_padding(monkeypatch):
    """A chunk of a longer prefix: its keys are no multiple of the block, and every row sees all of them."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 1, 3, 8), (1, 10, 1, 8), (1, 10, 1, 8))
    )
    options = {"scale": 1.0, "base": LogBase.E}
    whole = online.attend(q, k, v, jnp.full((1, 3), 10), **options)
    monkeypatch.setattr(online, "MAX_BLOCK_KEYS", 7)
    start = lse.neutral(q.shape, jnp.float32, LogBase.E)
    blocks = online.attend_rows(start, q, k, v, jnp.full((1, 3), 25), **options)
    np.testing.assert_allclose(blocks.o, whole.o, atol=1e-6)
    np.testing.assert_allclose(blocks.lse, whole.lse, atol=1e-6)
