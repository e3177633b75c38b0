"""The sharded paged cache: who stores what, what is dropped and reported, dtypes, bytes, the host's page pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import rows_of
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxcp import CacheOverflowError, storage
from jaxcp import cache as cache_lib
from jaxcp.cache import Cache, CacheConfig, check, init_cache
from jaxcp.layout import Interleave
from jaxcp.pages import PagePool
from jaxcp.topology import make_mesh

CONFIG = CacheConfig.gqa(layers=2, kv_heads=2, head_dim=4, dtype="float32", page_size=4)


def on_rank(layout, pages=13, requests=3, config=CONFIG, page_table=None) -> Cache:
    """One rank's part of a cache, poisoned, outside shard_map: enough for `write`."""
    whole = init_cache(config, Interleave(1, layout.granularity), pages=pages, requests=requests, page_table=page_table)
    poison = lambda x: None if x is None else x + jnp.asarray(99, x.dtype)  # noqa: E731
    return dataclasses.replace(whole, k=poison(whole.k), v=poison(whole.v), layout=layout)


def write(cache, first, counts, rank=0, query_tokens=5, layer=1):
    """Writes tokens whose rows hold 1000 * request + position."""
    first, counts = (jnp.asarray(x, jnp.int32) for x in (first, counts))
    request = 1000.0 * jnp.arange(len(first))[:, None]
    value = request + first[:, None] + jnp.arange(query_tokens)
    config = cache.config
    k = jnp.broadcast_to(value[..., None, None], (*value.shape, config.kv_heads, config.key_dim)).astype(jnp.float32)
    v = None if config.latent else -k[..., : config.value_dim]
    return jax.jit(cache_lib.write)(cache, jnp.int32(layer), k, v, first, counts, jnp.int32(rank))


def stored(cache, page_table):
    """(page, row) -> value of every row of layer 1 that is not poison, page 0 left out."""
    k = np.asarray(cache.k[1, 1:, :, 0, 0])
    return {(p + 1, r): k[p, r] for p, r in zip(*np.nonzero(k != 99), strict=True)}


@pytest.mark.parametrize("layout", [Interleave(1), Interleave(2), Interleave(3, 2), Interleave(8, 4)], ids=str)
def test_each_rank_stores_the_rows_it_owns_and_nothing_else(layout):
    first, counts = np.array([0, 7, 30]), np.array([5, 3, 0])
    seen = 0
    for rank in range(layout.cp):
        cache = write(on_rank(layout), first, counts, rank)
        table, width = np.asarray(cache.page_table), 4 * layout.cp
        expected = {}
        for b in range(3):
            own = rows_of(rank, first[b] + counts[b], layout.cp, layout.granularity)
            for j, p in enumerate(own):
                if p >= first[b]:
                    expected[table[b, p // width], j % 4] = 1000 * b + p
        assert stored(cache, table) == expected
        seen += len(expected)
        np.testing.assert_array_equal(cache.k[0], 99)  # the other layer
        np.testing.assert_array_equal(np.where(np.asarray(cache.k) == 99, -99, cache.k), -np.asarray(cache.v))
        check(cache)
    assert seen == counts.sum()


def outside(cache, allowed):
    """Rows written in pages other than page 0 and those of the requests `allowed`."""
    pages = set(np.asarray(cache.page_table)[allowed].ravel().tolist())
    return [at for at in stored(cache, cache.page_table) if at[0] not in pages]


INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    ("first", "counts", "lost"),
    [
        ((14, 0, 0), (5, 1, 0), (3, 0, 0)),  # the last three lie beyond 16 tokens
        ((16, 0, 0), (2, 0, 0), (2, 0, 0)),
        ((-2, 0, 0), (5, 0, 0), (2, 0, 0)),
        ((INT32_MAX - 2, -(2**31), 4), (5, 5, 1), (5, 5, 0)),  # positions that wrap around int32
        ((1000, 1000, 1000), (0, 0, 0), (0, 0, 0)),  # nobody writes
    ],
)
def test_rows_without_a_page_are_dropped_and_counted_per_request(first, counts, lost):
    cache = write(on_rank(Interleave(1)), first, counts)
    assert cache.dropped.tolist() == list(lost)
    written = [b for b in range(3) if counts[b] > lost[b]]
    assert not outside(cache, written)
    assert len(stored(cache, None)) == sum(counts) - sum(lost)
    if any(lost):
        with pytest.raises(CacheOverflowError, match=f"request {int(np.argmax(lost))} lost {max(lost)} rows"):
            check(cache)
    again = write(cache, first, counts)
    assert again.dropped.tolist() == [2 * n for n in lost]


@pytest.mark.parametrize("bad", [0, -1, 13, INT32_MAX, 2**30])
def test_a_device_table_with_foreign_ids_harms_nobody(bad):
    """The second page of request 0 is not one: its rows are dropped, and so are those behind the gap."""
    cache = on_rank(Interleave(1))
    cache = dataclasses.replace(cache, page_table=cache.page_table.at[0, 1].set(bad))
    cache = write(cache, (2, 0, 0), (5, 0, 0))
    assert cache.dropped.tolist() == [3, 0, 0]
    assert stored(cache, None) == {(1, 2): 2, (1, 3): 3}
    cache = write(cache, (8, 0, 0), (1, 0, 0))
    assert cache.dropped.tolist() == [4, 0, 0]


@pytest.mark.parametrize("layer", [-1, 2, INT32_MAX])
def test_a_traced_layer_out_of_range_writes_nothing(layer):
    cache = write(on_rank(Interleave(1)), (0, 0, 0), (5, 5, 5), layer=layer)
    np.testing.assert_array_equal(cache.k, 99)


def test_latent_rows_are_stored_once():
    config = CacheConfig.mla(layers=2, latent_dim=6, rope_dim=2, dtype="float32", page_size=4)
    cache = write(on_rank(Interleave(1), config=config), (0, 0, 0), (2, 0, 0))
    assert cache.v is None
    assert cache.k.shape == (2, 13, 4, 1, 8)
    assert stored(cache, None) == {(1, 0): 0, (1, 1): 1}
    assert config.row_bytes == 32


@pytest.mark.parametrize("dtype", storage.CACHE_DTYPES[:3])
def test_rows_are_rounded_to_the_cache_dtype(dtype):
    x = jnp.asarray([1.0, 1 / 3, -65503.0], jnp.float32)
    np.testing.assert_array_equal(storage.decode(storage.encode(x, np.dtype(jnp.dtype(dtype)))), x.astype(dtype))


def test_float8_saturates_and_keeps_nan():
    x = jnp.asarray([0.0, 1.0, 17.0, 448.0, 464.1, 1e9, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    bits = storage.encode(x, storage.E4M3)
    assert bits.dtype == jnp.uint8
    np.testing.assert_array_equal(
        storage.decode(bits).astype(jnp.float32), np.float32([0, 1, 16, 448, 448, 448, 448, -448, np.nan])
    )


@pytest.mark.parametrize(
    ("config", "row"),
    [
        (CacheConfig.gqa(layers=30, kv_heads=3, head_dim=64, dtype="float32"), 2 * 3 * 64 * 4),
        (CacheConfig.gqa(layers=30, kv_heads=8, head_dim=128), 2 * 8 * 128 * 2),
        (CacheConfig.mla(layers=61), 576 * 2),
        (CacheConfig.mla(layers=61, dtype="float8_e4m3fn"), 576),
    ],
)
def test_bytes_are_those_of_the_arrays(config, row):
    assert config.row_bytes == row
    layout = Interleave(8)
    whole = jax.eval_shape(lambda: init_cache(config, Interleave(1), pages=8 * 9, requests=8))
    arrays = sum(x.size * x.dtype.itemsize for x in (whole.k, whole.v) if x is not None)
    sharded = dataclasses.replace(whole, layout=layout)
    assert sharded.bytes_per_rank * 8 == arrays == config.layers * 72 * 16 * row


def test_data_groups_have_pages_of_their_own():
    cache = init_cache(CONFIG, Interleave(2), pages=5, requests=4, mesh=BOTH, axis_name="cp", data_axes=("data",))
    assert cache.k.shape == (2, 20, 4, 2, 4)
    assert cache.bytes_per_rank == 2 * 5 * 4 * CONFIG.row_bytes
    assert cache.page_table.tolist() == [[1, 2], [3, 4]] * 2
    assert {shard.data.shape for shard in cache.page_table.addressable_shards} == {(2, 2)}
    assert cache.partition_specs("cp", ("data",)).k == P(None, ("data", "cp"))
    check(cache)
    with pytest.raises(CacheOverflowError, match="request 2 lost 7 rows"):
        check(dataclasses.replace(cache, dropped=cache.dropped + jnp.array([0, 0, 7, 0])))


def test_a_cache_is_made_shard_by_shard():
    mesh = make_mesh(4)
    cache = init_cache(CONFIG, Interleave(4), pages=5, requests=2, mesh=mesh, axis_name="cp")
    assert cache.k.shape == (2, 20, 4, 2, 4)
    assert cache.bytes_per_rank == 2 * 5 * 4 * CONFIG.row_bytes
    for x in (cache.k, cache.v):
        assert {shard.data.shape for shard in x.addressable_shards} == {(2, 5, 4, 2, 4)}
    assert cache.page_table.tolist() == [[1, 2], [3, 4]]
    assert cache.capacity == 32
    assert cache.requests == 2
    assert jax.tree.structure(cache.partition_specs("cp")) == jax.tree.structure(cache)


MESH = {"mesh": make_mesh(2), "axis_name": "cp"}
BOTH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "cp"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": Interleave(2)}, ValueError, "layout.cp: got 2; expected 1"),
        ({"layout": Interleave(3), **MESH}, ValueError, "layout.cp: got 3; expected 2, the size of axis 'cp'"),
        ({"layout": Interleave(2), **MESH, "axis_name": "tp"}, ValueError, "axis_name: got 'tp'; expected an axis"),
        ({"mesh": MESH["mesh"]}, TypeError, "mesh, axis_name"),
        ({"layout": Interleave(1, 3)}, ValueError, "page_size: got 4; expected a multiple of granularity = 3"),
        ({"pages": 1}, ValueError, "pages: got 1; expected 2 <= pages"),
        ({"pages": 2**30}, ValueError, "pages: got 1073741824"),
        ({"pages": 2, "requests": 2}, ValueError, "pages: got 2; expected at least 3"),
        ({"requests": 0}, ValueError, "requests: got 0"),
        ({"layout": Interleave(2), **MESH, "data_axes": ("dp",)}, ValueError, "data_axes: got 'dp'; expected an axis"),
        (
            {"layout": Interleave(2), "mesh": BOTH, "axis_name": "cp", "data_axes": ("data",)},
            ValueError,
            "requests: got 1; expected a multiple of 2",
        ),
        ({"page_table": [[1, 5]]}, ValueError, r"page_table: got 5; expected ids in \[1, 5\)"),
        ({"page_table": [[1, -1]]}, ValueError, "page_table: got -1"),
        ({"page_table": [[1, 3, 1, 0, 0]]}, ValueError, "page_table: got page 1 twice for request 0"),
        ({"page_table": [1, 2]}, ValueError, r"page_table.shape: got \(2,\)"),
        ({"page_table": [[1.0]]}, TypeError, "page_table.dtype: got float64"),
    ],
)
def test_bad_caches_are_refused(changes, error, message):
    arguments = {"layout": Interleave(1), "pages": 5, "requests": 1} | changes
    with pytest.raises(error, match=message):
        init_cache(CONFIG, arguments.pop("layout"), **arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CacheConfig.gqa(layers=0, kv_heads=1, head_dim=4), ValueError, "layers: got 0"),
        (lambda: CacheConfig.gqa(layers=1, kv_heads=1, head_dim=4, dtype="int8"), TypeError, "dtype: got 'int8'"),
        (lambda: CacheConfig.gqa(layers=1, kv_heads=1, head_dim=4, dtype="fp8"), TypeError, "dtype: got 'fp8'"),
        (lambda: CacheConfig(1, 2, 8, 4, latent=True), ValueError, "latent: got kv_heads=2"),
        (lambda: CacheConfig(1, 1, 8, 9, latent=True), ValueError, "value_dim <= key_dim"),
    ],
)
def test_bad_configs_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# The page pool.


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 80)),
            st.tuples(st.just("free"), st.integers(0, 3), st.just(0)),
        ),
        max_size=30,
    )
)
def test_a_page_is_held_by_one_request_at_a_time(steps):
    pool, held = PagePool(Interleave(2), pages=12, page_size=4), [[], [], [], []]
    for action, request, tokens in steps:
        if action == "free":
            pool.free(held[request])
            held[request] = []
            continue
        need = -(-tokens // 8) - len(held[request])
        if need > pool.free_pages:
            with pytest.raises(CacheOverflowError, match=f"{tokens} tokens need {need} more pages"):
                pool.allocate(tokens, held[request])
        else:
            before, held[request] = held[request], pool.allocate(tokens, held[request])
            assert held[request][: len(before)] == before
            assert 8 * len(held[request]) >= tokens
        pages = [page for request in held for page in request]
        assert len(set(pages)) == len(pages)
        assert set(pages) <= set(range(1, 12))
        assert pool.free_pages == 11 - len(pages)
    table = pool.table(held, 11)
    assert [row[row > 0].tolist() for row in table] == held


def test_only_a_holder_frees_a_page():
    pool = PagePool(Interleave(2), pages=5, page_size=4)
    pages = pool.allocate(20)
    pool.free(pages[:1])
    for bad in (pages[:1], [0], [9], [pages[1], pages[1]]):
        with pytest.raises(ValueError, match="pages from allocate, each once"):
            pool.free(bad)
    with pytest.raises(ValueError, match="pages_per_request: got 1; expected at least 2"):
        pool.table([pages[1:]], 1)
