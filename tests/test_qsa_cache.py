"""Caches: e4m3, faults that only the device can see, pages, layers, saving and restoring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session, close, joined, same_selection

import jaxcp
from jaxcp import qsa
from jaxcp.storage import E4M3

C, W, X = oracle.TINY, oracle.weights(oracle.TINY), oracle.hidden(oracle.TINY, 50)


def test_e4m3_storage_is_a_plain_cast_of_the_same_rows():
    plain = Session(C, W, "bfloat16")
    small = Session(C, W, "bfloat16", kv_dtype=E4M3, index_dtype="float8_e4m3fn")
    for run in (plain, small):
        run.feed({1: X})
    for name in ("k", "v", "index"):
        stored, wide = getattr(small.cache, name), getattr(plain.cache, name)
        assert stored.dtype == jnp.uint8
        assert stored.nbytes * 2 == wide.nbytes
        np.testing.assert_array_equal(np.asarray(stored).view(E4M3), np.asarray(wide).astype(E4M3))
    np.testing.assert_array_equal(small.cache.ring_keys, plain.cache.ring_keys)


def test_e4m3_values_are_what_attention_reads():
    """While all blocks are selected, the layer over e4m3 K/V is attention over the rounded rows."""
    run = Session(C, W, kv_dtype=E4M3)
    y, _ = run.feed({0: X[: C.row_width]})[0]
    want, exact = (attention_of(rounding) for rounding in (lambda a: a.astype(np.float32).astype(E4M3), lambda a: a))
    close(y, want, "float32")
    assert np.abs(y - exact).max() > 1e-3, "the test must see the rounding"


def attention_of(rounding):
    """Dense attention of the first rows over keys and values as `rounding` leaves them, float64."""
    n, w = C.row_width, {name: np.asarray(a, np.float64) for name, a in W.items()}
    x, rope = np.float64(X[:n]), np.stack([np.arange(n)] * 3)
    qg = (x @ w["q_proj.weight"].T).reshape(n, C.heads, 2, C.head_dim)
    q = oracle.rotate(C, oracle.norm(C, qg[:, :, 0], w["q_norm.weight"]), rope)
    k = oracle.norm(C, (x @ w["k_proj.weight"].T).reshape(n, C.kv_heads, C.head_dim), w["k_norm.weight"])
    k = np.float64(rounding(oracle.rotate(C, k, rope)))
    v = np.float64(rounding((x @ w["v_proj.weight"].T).reshape(n, C.kv_heads, C.head_dim)))
    o = np.stack([oracle.attend(q[p], k[: p + 1], v[: p + 1]) for p in range(n)])
    return (o / (1 + np.exp(-qg[:, :, 1]))).reshape(n, -1) @ w["o_proj.weight"].T


def test_e4m3_chunks_and_decode_agree_with_one_shot():
    options = {"kv_dtype": E4M3, "index_dtype": E4M3}
    y, blocks = Session(C, W, **options).feed({0: X})[0]
    run = Session(C, W, **options)
    parts = [run.feed({0: X[:18]})[0]] + [run.step({0: X[at : at + 4]}, k=4)[0] for at in range(18, 50, 4)]
    got = joined(parts)
    same_selection(got[1], blocks)
    close(got[0], y, "float32")


def untouched(before, after, pages):
    """Asserts that only the dump changed outside `pages`."""
    for name in ("k", "v", "index"):
        a, b = (np.delete(np.asarray(getattr(c, name)), [0, *pages], axis=1) for c in (before, after))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("length", [97, 99, 2**30, 0, -5])
def test_device_lengths_that_do_not_fit_are_dropped(length):
    """Of three requests one has an impossible length: its rows are 0, nothing is written, the others are right."""
    run = Session(C, W)
    run.feed({0: X[:20], 2: X[:30]})
    before = jax.tree.map(jnp.copy, run.cache)
    x = np.stack([X[20], X[0], X[30]])
    lengths = jnp.asarray([21, length, 31])
    y, run.cache = qsa.decode(run.params, jnp.asarray(x), run.cache, lengths)
    want = oracle.layer(C, W, X[:31]).y
    close(np.asarray(y), np.stack([want[20], np.zeros(C.hidden), want[30]]), "float32")
    untouched(before, run.cache, np.asarray(run.cache.page_table)[[0, 2]].ravel())
    np.testing.assert_array_equal(before.ring_positions[:, 2], run.cache.ring_positions[:, 2])
    with pytest.raises(jaxcp.CacheOverflowError, match="1 rows beyond"):
        qsa.check(run.cache)


def test_rows_without_a_page_are_dropped():
    """The third page of a request is missing: its rows from token 16 on have no place."""
    run = Session(C, W)
    table = np.array(run.cache.page_table)
    table[0, 2] = 0
    run.cache = run.cache.with_page_table(table)
    y, _ = run.feed({0: X[:20]})[0]
    assert y[:16].any(axis=1).all()
    assert not y[16:].any()
    with pytest.raises(jaxcp.CacheOverflowError, match="4 rows"):
        run.finish()


def test_a_plan_made_without_the_cache_cannot_write_elsewhere():
    """Requests and tokens that the cache does not have: dropped and reported, nothing else touched."""
    run = Session(C, W)
    run.feed({0: X[:20]})
    before = jax.tree.map(jnp.copy, run.cache)
    plan = qsa.plan([10, 10, 3], [90, 0, 0], requests=[1, 7, 2])
    _, run.cache = qsa.prefill(run.params, plan.pad(X[:23]), run.cache, plan)
    untouched(before, run.cache, np.asarray(run.cache.page_table)[1:].ravel())
    with pytest.raises(jaxcp.CacheOverflowError, match="14 rows"):
        qsa.check(run.cache)


@pytest.mark.parametrize(("prefix", "stale"), [(18, False), (14, False), (9, True), (22, True)])
def test_a_prefix_whose_pending_keys_are_gone_is_reported(prefix, stale):
    """After 18 tokens the ring has positions 9 ... 17; a forward from elsewhere would pool the wrong keys."""
    run = Session(C, W, max_query_tokens=6)
    run.feed({0: X[:18]})
    run.lengths[0] = prefix
    run.feed({0: X[prefix : prefix + 5]})
    if stale:
        with pytest.raises(jaxcp.StaleCacheError, match="1 blocks"):
            run.finish()
    else:
        run.finish()


def test_pages_may_be_allocated_as_a_request_grows():
    run = Session(C, W)
    full = np.array(run.cache.page_table)
    pieces = []
    for at in range(0, 50, 10):
        table = np.where(np.arange(full.shape[1]) < -(-(at + 10) // 8), full, 0)
        run.cache = run.cache.with_page_table(table)
        pieces.append(run.feed({0: X[at : at + 10]})[0])
    run.finish()
    y, blocks = joined(pieces)
    want = oracle.layer(C, W, X)
    same_selection(blocks, want.blocks)
    close(y, want.y, "float32")


def test_layers_do_not_touch_each_other():
    run = Session(C, W, layers=3)
    other = oracle.hidden(C, 30, 7)
    plan = qsa.plan([30], cache=run.cache, min_rows=64, min_context=96)
    for layer, x in ((2, other), (0, X[:30])):
        _, run.cache = qsa.prefill(run.params, plan.pad(x), run.cache, plan, layer=layer)
    assert not np.asarray(run.cache.k[1]).any()
    run.lengths[0] = 30
    y, _ = run.feed({0: X[30:]}, layer=0)[0]
    close(y, oracle.layer(C, W, X).y[30:], "float32")


def test_the_dump_holds_what_has_no_place():
    """Padding rows are written to page 0 and ring row 0, which belong to nobody."""
    run = Session(C, W)
    plan = qsa.plan([5], cache=run.cache, min_rows=64, min_context=96)
    x = np.full((64, C.hidden), 3.0, np.float32)
    _, run.cache = qsa.prefill(run.params, jnp.asarray(x), run.cache, plan)
    k = np.asarray(run.cache.k)
    assert k[0, 0, 0].any()
    written = np.argwhere(k.any(axis=(3, 4)))
    first = int(run.cache.page_table[0, 0])
    assert {tuple(w) for w in written.tolist()} == {(0, 0, 0), *((0, first, i) for i in range(5))}


def test_a_snapshot_of_another_geometry_is_refused():
    run, other = Session(C, W), Session(C, W, page_size=16)
    run.feed({0: X[:20]})
    with pytest.raises(ValueError, match=r"snapshot\.k"):
        qsa.restore(other.cache, 0, qsa.save(run.cache, 0, 20))
    with pytest.raises(ValueError, match="page_table"):
        qsa.save(run.cache, 0, 20000)
    with pytest.raises(ValueError, match="request"):
        qsa.save(run.cache, 3, 1)
