"""Mistakes that others made in public, each reproduced once; numbered as in our notes on the algorithm.

 1 padded compression entries    2 whole key tiles read     3 own block visible        4 one visibility per request
 5 ties at the cut               6 candidate buffer         7 -1 inside the valid part 8 top-k over tokens
 9 NaN behind the valid rows    10 empty rows              11 rows with holes         12 all slots attended
13 blocks of several sequences  14 physical block starts   15 32-bit offsets          16 operands of two dtypes
17 folding in place             18 ring of one block       19 prefix without index    20 prefix inside a block

2, 5, 6, 7, 9, 10 and 16 are cases of the tables in qsa_selection_cases.py and qsa_attention_cases.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session, close, ids, joined, same_selection

from jaxcp import qsa
from jaxcp.qsa.indexing import put, take
from jaxcp.qsa.selection import top_blocks
from jaxcp.storage import E4M3, decode, encode

C, W = oracle.TINY, oracle.weights(oracle.TINY)
X = oracle.hidden(C, 61)


@pytest.fixture(scope="module")
def want():
    return oracle.layer(C, W, X)


def check(got, want, start=0):
    y, blocks = got
    same_selection(blocks, want.blocks[start : start + len(y)])
    close(y, want.y[start : start + len(y)], "float32")


def nan_filled(run):
    run.cache = jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, run.cache
    )
    return run


def test_01_extend_by_one_token(want):
    """A forward of fewer tokens than a block has compression entries without members: they must not be written."""
    run = nan_filled(Session(C, W))
    pieces = [run.feed({0: X[:21]})[0]]
    for at in range(21, 29):
        plan = qsa.plan([1], run.lengths[:1], cache=run.cache, min_rows=64, min_context=run.cache.capacity)
        x = jnp.full((plan.rows, C.hidden), 7.0).at[0].set(X[at])
        y, run.cache, blocks = qsa.prefill(run.params, x, run.cache, plan, return_selection=True)
        run.lengths[0] += 1
        pieces.append((np.asarray(y[:1]), ids(blocks)[:1]))
        pages = np.asarray(run.cache.page_table)
        written = np.isfinite(np.asarray(run.cache.index)[0, pages]).all(-1).reshape(3, -1).sum(1)
        assert written.tolist() == [(at + 1) // C.ratio, 0, 0], "blocks that are not finished stay as they were"
    check(joined(pieces), want)


def test_03_a_block_is_visible_only_when_complete(want):
    """Changing token 30 must not change the rows of tokens 28 and 29, which share its block."""
    changed = X.copy()
    changed[30:] *= -3
    before, after = (Session(C, W).feed({0: x})[0] for x in (X, changed))
    np.testing.assert_array_equal(before[0][:30], after[0][:30])
    assert before[1][:30] == after[1][:30]
    assert not np.allclose(before[0][30], after[0][30])
    for p, blocks in enumerate(before[1]):
        assert all(block * C.ratio + C.ratio - 1 <= p for block in blocks)


def test_04_visibility_is_per_token(want):
    """Of two rows in one decode, the second completes block 4; the first must not see it."""
    run = Session(C, W)
    run.feed({0: X[:18]})
    got = run.step({0: X[18:20]}, k=2)[0]
    check(got, want, 18)


def test_08_blocks_are_never_split(want):
    got = Session(C, W).feed({0: X})[0]
    check(got, want)
    for p, blocks in enumerate(got[1]):
        assert len(blocks) == min(C.selected_blocks, (p + 1) // C.ratio)


def test_11_rows_have_no_holes():
    """A block whose score is -inf or NaN still takes its place; -1 stands behind the valid entries only."""
    score = jnp.array([[5.0, -jnp.inf, 7.0, jnp.nan, 1.0]])
    for visible in range(6):
        row = top_blocks(score, jnp.array([visible]), 3)[0].tolist()
        assert row[min(visible, 3) :] == [-1] * (3 - min(visible, 3))
        assert min(row[: min(visible, 3)], default=0) >= 0


def test_12_short_contexts_make_short_rows():
    """Rows are as wide as the context's blocks need, and entries behind the count do not matter."""
    config = qsa.QSAConfig(**{**vars(C), "budget": 2048})
    run = Session(config, W)
    plan = qsa.plan([40], cache=run.cache, min_context=96)
    *_, blocks = qsa.prefill(run.params, plan.pad(X[:40]), run.cache, plan, return_selection=True)
    assert blocks.shape[1] == 96 // C.ratio


def test_13_sequences_and_images_do_not_mix():
    """Two requests at the same positions, one of them an image whose tokens all have one rope position."""
    text, image = X[:45], oracle.hidden(C, 45, 13)
    rope = np.stack([np.arange(45)] * 3)
    same = np.where(np.arange(45) < 5, np.arange(45), np.minimum(np.arange(45), 5))
    same = np.stack([same] * 3)
    got = Session(C, W, rows=96).feed({1: image, 0: text}, {1: same, 0: rope})
    check(got[0], oracle.layer(C, W, text))
    check(got[1], oracle.layer(C, W, image, same))


def test_14_blocks_start_at_logical_positions():
    """A request packed behind three rows of another one gives what it gives alone."""
    x = oracle.hidden(C, 3, 14)
    got = Session(C, W).feed({0: x, 1: X[:45]})[1]
    check(got, oracle.layer(C, W, X[:45]))


@pytest.mark.slow
def test_15_offsets_beyond_two_to_the_31():
    """4.2 M token places of 512 bytes: the last place lies beyond 2^31 elements."""
    pages = 2**22 // 64 + 2
    pool = jnp.zeros((1, pages, 64, 2, 256), jnp.uint8)
    page, place, layer = jnp.array([0, pages - 1]), jnp.array([0, 63]), jnp.int32(0)
    values = jnp.stack([jnp.full((2, 256), 7, jnp.uint8), jnp.full((2, 256), 9, jnp.uint8)])
    pool = jax.jit(put, donate_argnums=0)(pool, values, layer, page, place)
    got = jax.jit(take)(pool, layer, jnp.array([0, pages - 1, pages - 1, 1]), jnp.array([0, 63, 62, 0]))
    assert got[..., 0, 0].tolist() == [7, 9, 0, 0]


def test_17_positions_appended_twice(want):
    """Positions 0 ... 3, then 2 and 3 again with other tokens, then the right ones: folding is repeatable."""
    run = Session(C, W)
    run.feed({0: X[:4]})
    for wrong in (True, False):
        run.lengths[0] = 2
        got = run.feed({0: -X[2:4] if wrong else X[2:4]})[0]
    check(got, want, 2)
    check(run.feed({0: X[4:50]})[0], want, 4)
    run.finish()


@pytest.mark.parametrize("length", [17, 18, 19, 20])
def test_18_seven_draft_tokens_taken_back(want, length):
    """Wherever a block stands and however many of 7 drafts are rejected, the rest continues as if they never were."""
    for accepted in range(8):
        run = Session(C, W)
        run.feed({0: X[:length]})
        drafts = X[length : length + 7].copy()
        drafts[accepted:] += 5
        check(tuple(part[:accepted] for part in run.step({0: drafts}, k=7)[0]), want, length)
        run.lengths[0] = length + accepted
        check(run.step({0: X[length + accepted : length + accepted + 7]}, k=7)[0], want, length + accepted)
        run.finish()


def test_18_more_drafts_than_the_ring_keeps():
    run = Session(C, W, max_query_tokens=4)
    with pytest.raises(ValueError, match=r"7 tokens per request.*max_query_tokens = 4"):
        run.step({0: X[:7]}, k=7)


def test_19_a_restored_request_has_its_index_keys(want):
    """Save a request, let another one overwrite its pages, restore it into other pages and another row."""
    run = Session(C, W)
    run.feed({0: X[:30]})
    saved = jax.device_get(qsa.save(run.cache, 0, 30))
    run.lengths[0] = 0
    run.feed({0: oracle.hidden(C, 60, 19)})
    run.cache = qsa.restore(run.cache, 2, saved)
    run.lengths[2] = 30
    check(run.feed({2: X[30:]})[2], want, 30)
    run.finish()


def test_19_a_shared_prefix_page_brings_its_index_keys(want):
    """Two requests whose tables name the same pages for a whole-page prefix: no copy, no second computation."""
    run = Session(C, W)
    run.feed({0: X[:24]})
    table = np.array(run.cache.page_table)
    table[1, :3] = table[0, :3]
    run.cache, run.lengths[1] = run.cache.with_page_table(table), 24
    check(run.feed({1: X[24:]})[1], want, 24)
    run.finish()


def test_20_a_prefix_that_ends_inside_a_block(want):
    run = Session(C, W)
    check(joined([run.feed({0: X[:6]})[0], run.feed({0: X[6:]})[0]]), want)
    run.finish()


def test_storage_saturates():
    """A plain cast of 500 to e4m3 is NaN, which would spread to every row that selects it."""
    x = jnp.float32([1e9, -500, 448, 0.3])
    stored = decode(encode(x, E4M3))
    assert stored.astype(jnp.float32).tolist() == [448, -448, 448, float(jnp.float32(0.3).astype(E4M3))]
