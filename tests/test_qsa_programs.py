"""What the compiled programs do: one per bucket, caches updated in place, nothing to the host, bounded memory."""

import re
from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session, close, ids

from jaxcp import qsa
from jaxcp.qsa import queries, selection
from jaxcp.qsa.decode import _decode
from jaxcp.qsa.forward import forward
from jaxcp.qsa.plan import bucket
from jaxcp.qsa.prefill import _prefill
from jaxcp.storage import E4M3

C, W, X = oracle.TINY, oracle.weights(oracle.TINY), oracle.hidden(oracle.TINY, 60)


def test_one_program_serves_many_batches():
    """Retraces come from buckets alone: lengths, prefixes, requests, layers and page tables are data."""
    run = Session(C, W, rows=64, layers=2)
    run.feed({0: X[:10], 1: X[:3]})
    run.step({0: X[:1]})
    before = qsa.traces()
    run.feed({1: X[:30], 2: X[:20]})
    run.feed({0: X[:0], 2: X[:1]}, layer=1)
    run.step({0: X[:1], 2: X[5:6]}, layer=1)
    run.cache = run.cache.with_page_table(np.array(run.cache.page_table)[:, ::-1])
    run.step({1: X[:1]})
    assert qsa.traces() == before
    run.feed({0: X[:20], 1: X[:20], 2: X[:20]})
    assert qsa.traces() == before | {"prefill": before["prefill"] + 1}, "three requests are another bucket"


@pytest.mark.parametrize("least", [1, 16, 24])
def test_buckets(least):
    sizes = [bucket(n, least) for n in range(5000)]
    assert all(n <= size <= max(least, 1.25 * n) for n, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert all(bucket(size, least) == size for size in set(sizes))
    assert len(set(sizes)) <= 4 * 13


def test_nothing_leaves_the_device():
    run = Session(C, W)
    plan = qsa.plan([20, 7], cache=run.cache)
    x, token = plan.pad(X[:27]), jnp.asarray(X[:3])
    with jax.transfer_guard("disallow"):
        _, cache = qsa.prefill(run.params, x, run.cache, plan)
        y, _ = qsa.decode(run.params, token, cache, [21, 8, 1], layer=0)
    y.block_until_ready()


def test_the_cache_is_donated():
    run = Session(C, W)
    plan = qsa.plan([20], cache=run.cache, min_rows=64, min_context=96)
    old = run.cache
    _, new = qsa.prefill(run.params, plan.pad(X[:20]), old, plan)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    _, newer = qsa.decode(run.params, jnp.asarray(X[:3]), new, [21, 1, 1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(newer))


def large(dtype="bfloat16", layers=3, pages=4096, **options):
    """A cache far larger than anything else in a forward, as shapes only."""
    make = bind(qsa.init_cache, C, requests=2, pages=pages, layers=layers, dtype=dtype, **options)
    table = np.zeros((2, 8), int)
    return jax.eval_shape(lambda: make(page_table=table))


@pytest.mark.parametrize("storage", ["bfloat16", E4M3])
def test_no_cache_is_copied(storage):
    """Temporaries of a decode are a small part of the pool they write, in every layer and storage dtype."""
    cache = large(kv_dtype=storage, index_dtype=storage)
    params = jax.eval_shape(lambda: qsa.from_tensors(W, C))
    x, ints = jax.ShapeDtypeStruct((2, C.hidden), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = _decode.lower(params, x, cache, ints, ints, None, layer, implementation="xla", return_selection=False)
    compiled = lowered.compile()
    pool = np.prod(cache.k.shape) * cache.kv_dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 20
    assert not re.search(r"(copy|convert)\S* = \S*\[3,4096,64,2,8\]", compiled.as_text())


def test_layers_in_a_scan_update_the_cache_in_place():
    """A stack of layers in one program, `layer` traced: equal to a loop, and no pool is copied."""
    n, run = 3, Session(C, W, layers=3)
    stacked = jax.tree.map(
        lambda *a: jnp.stack(a), *(qsa.from_tensors(oracle.weights(C, s), C, "float32") for s in range(n))
    )
    plan = qsa.plan([40], min_rows=64, min_context=96)

    def stack(params, x, cache, plan):
        def one(carry, scanned):
            x, cache = carry
            y, cache = qsa.prefill(scanned[0], x, cache, plan, layer=scanned[1])
            return (x + y, cache), None

        return jax.lax.scan(one, (x, cache), (params, jnp.arange(n, dtype=jnp.int32)))[0]

    y, cache = jax.jit(stack, donate_argnums=2)(stacked, plan.pad(X[:40]), run.cache, plan)
    want = np.float64(X[:40])
    for seed in range(n):
        want = want + oracle.layer(C, oracle.weights(C, seed), want).y
    close(y[:40], want, "float32")
    qsa.check(cache)
    shapes = jax.eval_shape(lambda: (stacked, plan.pad(X[:40])))
    compiled = jax.jit(stack, donate_argnums=2).lower(*shapes, large("float32"), plan).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < np.prod(large("float32").k.shape) * 4 / 5


def test_memory_is_bounded_at_long_context():
    """2048 rows over 32K tokens: all scores would be 256 MiB and all gathered keys 256 MiB; a step keeps 64 MiB."""
    config, context = oracle.BUDGET, 32768
    make = bind(qsa.init_cache, config, requests=1, pages=1 + context // 64, dtype="float32")
    cache = jax.eval_shape(lambda: make(page_table=1 + np.arange(context // 64)[None]))
    params = jax.eval_shape(lambda: qsa.from_tensors(oracle.weights(config), config, "float32"))
    plan = qsa.plan([2048], [context - 2048])
    x, layer = jax.ShapeDtypeStruct((2048, config.hidden), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = _prefill.lower(params, x, cache, plan, layer, peers=None, implementation="xla", return_selection=False)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * queries.SCRATCH_BYTES


def test_steps_and_tiles_do_not_matter(monkeypatch):
    """Whatever the scratch bound makes of tiles and steps, the answer is the same."""
    run, x = Session(C, W), [oracle.hidden(C, n, n) for n in (5, 41, 14)]
    plan = qsa.plan([len(a) for a in x], cache=run.cache, min_rows=64, min_context=96)
    arguments = run.params, plan.pad(np.concatenate(x)), run.cache, plan.segments, None, jnp.int32(0)
    statics = {"context": 96, "longest": 64, "implementation": "xla"}
    y, _, blocks = jax.jit(bind(forward, **statics))(*arguments)
    monkeypatch.setattr(queries, "SCRATCH_BYTES", 8000)  # two tiles, and three rows of attention, at once
    monkeypatch.setattr(selection, "MAX_TILE", 16)
    y_small, _, blocks_small = jax.jit(bind(forward, **statics))(*arguments)
    assert ids(blocks) == ids(blocks_small)
    close(y_small, y, "float32")
