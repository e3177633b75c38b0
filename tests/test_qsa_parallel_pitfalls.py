"""Mistakes that others made in public with context-parallel prefill; numbered as in our notes on the algorithm.

21 prefix from a padded count    22 padding without ranks         23 rope from local rows     24 another axis' group
25 rows aligned to another width 26 local keys in the ring        27 local positions in index 28 order, missing waits
29 short requests                30 rows behind the last token
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from qsa_parallel import Ranks, held, mesh_of, program, same_on_every_device
from qsa_runs import Session, close, same_selection

from jaxcp import qsa
from jaxcp.qsa.view import view_of

C, W = oracle.TINY, oracle.weights(oracle.TINY)


def positions(plan, cache):
    """Every rank's (request, position) of its rows, as made on the device."""
    rows = jax.jit(jax.vmap(lambda rank: view_of(plan, rank, cache).own.rows))(jnp.arange(plan.cp))
    return np.stack([rows.request, rows.position], -1)


@pytest.mark.parametrize("layout", ["zigzag", "interleave"])
@pytest.mark.parametrize(("lengths", "prefixes"), [([3670], [1]), ([7, 0, 1030], [3669, 5, 2])])
def test_21_prefixes_and_positions_do_not_know_of_padding(layout, lengths, prefixes):
    """3670 tokens on four ranks are padded to 3672 and more; a prefix of 1 stays 1. Also 25: any number of rows."""
    cache = qsa.init_cache(C, requests=3, pages=1 + 3 * 64, page_size=64)
    plan = qsa.plan(lengths, prefixes, cache=cache, cp=4, layout=layout)
    assert plan.rows > sum(lengths)
    got = positions(plan, cache)
    want = [(b, prefixes[b] + i) for b, n in enumerate(lengths) for i in range(n)]
    split = plan.layout.split(lengths)
    for rank in range(4):
        tokens = split.tokens(rank, plan.local_rows)
        real = tokens >= 0
        assert (got[rank][~real, 1] == -1).all()
        assert got[rank][real].tolist() == [list(want[t]) for t in tokens[real]]


def test_22_one_rank_pads_nothing_into_the_batch():
    """An odd token count with a single rank: no row is added to a request, whatever padding rows hold."""
    run = Ranks(C, W, cp=1)
    plan = run.plan({0: np.zeros((41, 0))})
    x = plan.pad(oracle.hidden(C, 41)).at[41:].set(jnp.nan)
    y, cache, _ = program(run.mesh)(run.params, x, run.cache, plan, np.int32(0))
    close(y[:41], oracle.layer(C, W, oracle.hidden(C, 41)).y, "float32")
    assert not y[41:].any()
    assert np.asarray(cache.ring_positions)[0, 1, :, 0].max() == 40


@pytest.mark.parametrize("layout", [pytest.param("zigzag", marks=pytest.mark.slow), "interleave"])
def test_23_26_27_local_rows_have_global_positions(layout):
    """Two ranks, 16 tokens: keys rotated, rings filled and blocks compressed at the places of a whole request."""
    x, rope = oracle.hidden(C, 16), oracle.image_positions(16)
    run = Ranks(C, W, cp=2, layout=layout)
    run.feed({1: x}, {1: rope})
    same_on_every_device(run.cache)
    plain = Session(C, W)
    plain.feed({1: x}, {1: rope})
    ranks, alone = held(run.cache), held(plain.cache)
    for name in ("k", "v", "index", "ring_keys"):
        np.testing.assert_allclose(ranks[name], alone[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ranks["ring_positions"], alone["ring_positions"])
    pages = np.asarray(run.cache.page_table)[1, :2]
    np.testing.assert_allclose(run.cache.index[0, pages].reshape(4, -1), oracle.layer(C, W, x, rope).keys, atol=2e-6)


def test_24_gathers_go_along_their_own_axis():
    """On a mesh with a tensor-parallel axis beside it, as large as the group: groups are those of `cp`."""
    mesh = mesh_of(4, after={"tp": 2})
    run = Ranks(C, W, cp=4, mesh=mesh)
    x = oracle.hidden(C, 37)
    y, blocks = run.feed({0: x})[0]
    want = oracle.layer(C, W, x)
    same_selection(blocks, want.blocks)
    close(y, want.y, "float32")
    plan = run.plan({1: x})
    rows = jax.device_put(plan.shard(x), NamedSharding(mesh, P("cp")))
    text = program(mesh).lower(run.params, rows, run.cache, plan, np.int32(0)).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 2
    for line in gathers:
        assert "mesh['cp'=4,'tp'=2] {'cp'}" in line or "{{0,2,4,6},{1,3,5,7}}" in line or "[2,4]<=[4,2]T(1,0)" in line


def test_28_a_forward_that_raised_leaves_nothing_pending():
    """A refused forward between two others: the next one is right, there is nothing to join."""
    run, x = Ranks(C, W, cp=4), oracle.hidden(C, 50)
    first = run.feed({0: x[:20]})[0]
    plan = run.plan({0: x[20:]})
    with pytest.raises(ValueError, match=r"x\.shape"):
        program(run.mesh)(run.params, jnp.zeros((4, C.hidden)), run.cache, plan, np.int32(0))
    second = run.feed({0: x[20:]})[0]
    close(np.concatenate([first[0], second[0]]), oracle.layer(C, W, x).y, "float32")


def test_29_short_requests_keep_their_ranks():
    """Lengths 400, 7 and 0 on four ranks: the short one is cut too, and every rank has rows of the long one."""
    x = {0: oracle.hidden(C, 400), 1: oracle.hidden(C, 7), 2: oracle.hidden(C, 0)}
    run = Ranks(C, W, cp=4, tokens=400, rows=512)
    plan = run.plan(x)
    counts = plan.layout.split([400, 7, 0]).counts()
    assert counts.tolist() == [101, 102, 102, 102]
    assert counts.max() <= plan.local_rows < 200
    got = run.feed(x)
    for r in range(3):
        want = oracle.layer(C, W, x[r])
        same_selection(got[r][1], want.blocks)
        close(got[r][0], want.y, "float32")


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("interleave", marks=pytest.mark.slow)])
def test_30_padding_rows_are_zero_on_every_rank(layout):
    """Rows behind a rank's last token give 0 and change nothing, whatever they hold: here NaN."""
    x = oracle.hidden(C, 37)
    run = Ranks(C, W, cp=8, layout=layout)
    plan = run.plan({0: x})
    counts = plan.layout.split([37]).counts()
    real = np.arange(plan.local_rows) < counts[:, None]
    rows = np.where(real[..., None], plan.shard(x).reshape(8, plan.local_rows, -1), np.nan).reshape(plan.rows, -1)
    y, cache, blocks = program(run.mesh)(run.params, jnp.asarray(rows), run.cache, plan, np.int32(0))
    assert not np.asarray(y)[~real.reshape(-1)].any()
    assert (np.asarray(blocks)[~real.reshape(-1)] == -1).all()
    close(plan.unshard(y)[:37], oracle.layer(C, W, x).y, "float32")
    assert all(np.isfinite(a).all() for a in held(cache).values())
