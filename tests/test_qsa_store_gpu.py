"""Norms, rotations, writes into the cache and gated attention in CUDA, on a GPU, against XLA's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import qsa
from jaxcp.qsa.layer import Products
from jaxcp.qsa.operations import WRITE_KV, operations
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.rope import table
from jaxcp.qsa.segments import Segments, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]

FLASH = qsa.QSAConfig.flash_next()
SMALL = {"head_dim": 64, "rotary_dim": 32, "mrope_section": (6, 5, 5), "index_dim": 64, "heads": 16, "kv_heads": 1}
RAGGED = ((0, 5), (3, 1), (64, 0), (130, 77), (2, 2), (1, 1), (255, 9))
"""(prefix, new tokens): whole and cut blocks, one that only an old prefix completes, an idle request."""


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU (JAXCP_TEST_PLATFORM=cuda)")


class Case:
    """A layer with random weights, and products of the new tokens of several requests over random caches."""

    def __init__(self, batch=RAGGED, rows=None, options=None, seed=0, **cache):
        rng = np.random.default_rng(seed)
        self.config = dataclasses.replace(FLASH, hidden=64, budget=64, **(options or {}))
        self.params = qsa.init_params(self.config, jax.random.key(seed))
        norms = {n: self.random(rng, (self.config.head_dim,)) for n in ("q_norm", "k_norm")}
        self.params = dataclasses.replace(self.params, **norms)
        prefix, count = np.array(batch, np.int32).T
        self.rows = rows or int(count.sum()) + 3  # the last ones are padding
        first = np.cumsum(count) - count
        request = rng.permutation(len(batch)).astype(np.int32)
        self.segments = Segments(*(jnp.asarray(a, jnp.int32) for a in (first, count, prefix, request)))
        pages = -(-int((prefix + count).max()) // 64)
        self.cache = qsa.init_cache(
            self.config, requests=len(batch), pages=1 + pages * len(batch), layers=3,
            page_table=1 + rng.permutation(pages * len(batch)).reshape(len(batch), pages), **cache,
        )  # fmt: skip
        filled = {n: self.random(rng, a.shape, a.dtype) for n, a in self.arrays().items() if a.dtype != jnp.int32}
        ring = np.full(self.cache.ring_positions.shape, -1, np.int32)
        for p, of in zip(prefix, request, strict=True):  # what the prefixes have left in the rings
            for position in range(max(0, p - self.cache.ring), p):
                ring[1, 1 + of, position % self.cache.ring] = position, position + 7, position // 2, position // 3
        self.cache = dataclasses.replace(self.cache, **filled, ring_positions=jnp.asarray(ring))
        widths = self.config.heads * 2 * self.config.head_dim, *2 * [self.config.kv_heads * self.config.head_dim]
        widths += ((self.config.index_heads + 1) * self.config.index_dim,)
        self.of = Products(*(self.random(rng, (self.rows, n)) for n in widths))
        self.rope = jnp.asarray(np.sort(rng.integers(0, 100_000, (3, self.rows))), jnp.int32)
        self.kind = rows_of(self.segments, self.rows)
        self.angles = table(self.config, self.rope, jnp.float32)

    @staticmethod
    def random(rng, shape, dtype=jnp.bfloat16):
        values = jnp.asarray(rng.normal(size=shape), jnp.float8_e4m3fn if dtype == jnp.uint8 else dtype)
        return jax.lax.bitcast_convert_type(values, jnp.uint8) if dtype == jnp.uint8 else values

    def arrays(self):
        names = ("k", "v", "index", "ring_keys", "ring_positions", "faults")
        return {name: getattr(self.cache, name) for name in names}

    def both(self, run):
        """run(operations) by XLA and by CUDA, each jitted."""
        return [jax.jit(lambda by=by: run(operations(by, self.config, self.cache)))() for by in ("xla", "cuda")]

    def held(self, cache):
        """Arrays of a cache without its dumps; faults are counted."""
        cut = {"faults": slice(None), "ring_keys": np.s_[:, 1:], "ring_positions": np.s_[:, 1:]}
        return {n: np.asarray(getattr(cache, n)[cut.get(n, np.s_[:, 1:])]) for n in self.arrays()}


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}").astype(np.int64)


def nearly(got, want):
    """The same roundings of sums in another order: a last place here and there."""
    apart = np.abs(bits(got) - bits(want))
    assert apart.max() <= 1, f"{apart.max()} places apart"
    assert (apart > 0).mean() < 0.01, f"{(apart > 0).mean():.1%} differ"


@pytest.mark.parametrize("options", [{}, SMALL, {"rotary_dim": 128, "mrope_section": (23, 21, 20)}, {"heads": 64}])
def test_norms_and_rotations(options):
    case = Case(options=options)
    want, got = case.both(lambda do: do.prepare(case.params, case.of, case.angles))
    for name in want._fields:
        nearly(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(bits(got.index_k), bits(want.index_k))
    np.testing.assert_array_equal(bits(got.kv[:, 1]), bits(want.kv[:, 1]))


@pytest.mark.parametrize("options", [{}, SMALL])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_keys_and_values(options, kv_dtype):
    case = Case(options=options, kv_dtype=kv_dtype)
    shape = (case.rows, 2, *case.cache.k.shape[3:])
    kv = Case.random(np.random.default_rng(1), shape, case.cache.k.dtype)
    position = case.kind.position.at[3].set(case.cache.capacity)  # beyond the pages: to the dump, or nowhere
    run = lambda write: write.run(case.cache, jnp.int32(1), kv, case.kind.request, position)  # noqa: E731
    want, got = (case.held(jax.jit(lambda by=by: run(WRITE_KV[by]))()) for by in ("xla", "cuda"))
    for name in want:
        np.testing.assert_array_equal(bits(got[name]), bits(want[name]))
    assert (bits(want["k"]) != bits(case.held(case.cache)["k"])).any()


@pytest.mark.parametrize("options", [{}, SMALL, {"ratio": 16}, {"ratio": 1}])
@pytest.mark.parametrize("index_dtype", [None, "float8_e4m3fn"])
def test_index_keys(options, index_dtype):
    case = Case(options=options, index_dtype=index_dtype)
    keys = case.of.index[:, : case.config.index_dim]
    write = lambda do: do.write_index(case.params, case.cache, jnp.int32(1), keys, case.rope, case.segments)  # noqa: E731
    want, got = (case.held(cache) for cache in case.both(write))
    nearly(got.pop("index"), want["index"])
    for name in got:
        np.testing.assert_array_equal(bits(got[name]), bits(want[name]))
    before = case.held(case.cache)
    assert (bits(want["index"]) != bits(before["index"])).any()
    assert (want["ring_positions"] != before["ring_positions"]).any()
    assert not want["faults"].any()


def test_stale_rings_are_counted():
    case = Case()
    case.cache = dataclasses.replace(case.cache, ring_positions=case.cache.ring_positions - 1)
    keys = case.of.index[:, : case.config.index_dim]
    write = lambda do: do.write_index(case.params, case.cache, jnp.int32(1), keys, case.rope, case.segments).faults  # noqa: E731
    want, got = case.both(write)
    assert got.tolist() == want.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (RAGGED, {}), (RAGGED, SMALL), (((300, 1), (700, 1), (64, 1)), {}), (((900, 1),), {"head_dim": 128}),
        (((0, 700),), {}), (((513, 64),), {"heads": 32}), (((100, 33),), {"heads": 80, "kv_heads": 2}),
    ],
)  # fmt: skip
def test_gated_attention(batch, options):
    case = Case(batch, options=options)
    k = case.config.selected_blocks
    rng, blocks = np.random.default_rng(2), np.full((case.rows, k), -1, np.int32)
    for row, position in zip(blocks, np.asarray(case.kind.position), strict=True):
        chosen = np.sort(rng.permutation(max(0, position + 1) // case.config.ratio)[:k])
        row[: len(chosen)] = chosen
    context, longest = case.cache.capacity, max(count for _, count in batch)
    queries = Queries(case.segments, case.kind, context, longest)
    arguments = case.params, case.of.q_gate, case.angles, jnp.asarray(blocks), case.cache, jnp.int32(1), queries
    want, got = (np.asarray(x, np.float32) for x in case.both(lambda do: do.attended(*arguments)))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
    assert not got[np.asarray(case.kind.position) < 0].any()
    assert np.abs(want).max() > 0.5


def test_slices_of_many_rows():
    """More rows than have queries at a time."""
    case = Case(((0, 7000),))
    k = case.config.selected_blocks
    visible = (np.asarray(case.kind.position) + 1) // case.config.ratio
    blocks = np.where(np.arange(k) < visible[:, None], np.arange(k), -1).astype(np.int32)
    queries = Queries(case.segments, case.kind, case.cache.capacity, 7000)
    arguments = case.params, case.of.q_gate, case.angles, jnp.asarray(blocks), case.cache, jnp.int32(1), queries
    want, got = (np.asarray(x, np.float32) for x in case.both(lambda do: do.attended(*arguments)))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
