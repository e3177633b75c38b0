"""Prefill's token layouts against brute force: rows, runs, places, shard and gather; host equal to traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxcp.layout import INT32_MAX, PackedInterleave, Zigzag

layouts = st.builds(
    lambda kind, cp: kind(cp), st.sampled_from([Zigzag, PackedInterleave]), st.sampled_from([1, 2, 3, 4, 8])
)
batches = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3), st.integers(500, 520)), min_size=1, max_size=5)


def blocks_of(length, cp):
    """Sizes of a request's 2c blocks, by dealing tokens to blocks until none is left."""
    sizes = [0] * (2 * cp)
    for token in range(length):
        sizes[token % (2 * cp)] += 1
    return sizes


def brute_force(layout, lengths):
    """Rows of every rank as lists of (request, token of the request)."""
    ranks = [[] for _ in range(layout.cp)]
    if isinstance(layout, PackedInterleave):
        packed = [(b, i) for b, n in enumerate(lengths) for i in range(n)]
        for t, token in enumerate(packed):
            ranks[t % layout.cp].append(token)
        return ranks
    for rank in range(layout.cp):
        for block in (rank, 2 * layout.cp - 1 - rank):
            for b, n in enumerate(lengths):
                sizes = blocks_of(n, layout.cp)
                start = sum(sizes[:block])
                ranks[rank] += [(b, i) for i in range(start, start + sizes[block])]
    return ranks


@given(layouts, batches, st.integers(0, 3))
@example(Zigzag(4), [8192, 7], 0)
@example(Zigzag(8), [0], 1)
def test_rows_runs_and_places_are_those_of_brute_force(layout, lengths, extra):
    split, ranks = layout.split(lengths), brute_force(layout, lengths)
    first = np.cumsum([0, *lengths])
    assert split.counts().tolist() == [len(rows) for rows in ranks]
    rows = max(map(len, ranks)) + extra
    seen = []
    for rank, tokens in enumerate(ranks):
        packed = [int(first[b]) + i for b, i in tokens]
        assert split.tokens(rank, rows).tolist() == packed + [-1] * (rows - len(packed))
        runs = split.runs(rank)
        unrolled = [
            (b, offset + k * split.stride)
            for _, n, b, offset in zip(*(a.tolist() for a in runs), strict=True)
            for k in range(n)
        ]
        assert unrolled == tokens
        assert (np.cumsum(runs.count) - runs.count == runs.first_row).all()
        got_rank, got_row = split.locate(packed)
        assert (got_rank == rank).all()
        assert got_row.tolist() == list(range(len(packed)))
        assert split.gathered(packed, rows).tolist() == [rank * rows + i for i in range(len(packed))]
        seen += packed
    assert sorted(seen) == list(range(sum(lengths))), "every token once"


@given(layouts, batches, st.integers(0, 3))
def test_gather_undoes_shard(layout, lengths, extra):
    split = layout.split(lengths)
    x = np.arange(1, 1 + 2 * sum(lengths)).reshape(-1, 2)
    rows = int(split.counts().max()) + extra
    shards = split.shard(x, rows)
    assert shards.shape == (layout.cp, rows, 2)
    for rank, n in enumerate(split.counts()):
        assert shards[rank, :n].all()
        assert not shards[rank, n:].any(), "padding rows are 0"
    np.testing.assert_array_equal(split.gather(shards), x)
    assert split.shard(x).shape[1] == split.counts().max()


@pytest.mark.parametrize("layout", [Zigzag(4), PackedInterleave(3)], ids=str)
def test_arrays_on_a_device_are_sharded_alike(layout):
    split, x = layout.split([13, 0, 22]), np.arange(70.0).reshape(35, 2)
    shards = split.shard(jnp.asarray(x), 13)
    assert isinstance(shards, jax.Array)
    np.testing.assert_array_equal(shards, split.shard(x, 13))
    np.testing.assert_array_equal(split.gather(shards), x)


@given(st.integers(0, 600), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 500))
def test_zigzag_segments_are_bottom_right_causal(length, cp, prefix):
    """Of a run's segment, the last row sits at prefix + the block's end: kv_len - q_len + i is row i's position."""
    split = Zigzag(cp).split([length])
    sizes = blocks_of(length, cp)
    for rank in range(cp):
        runs = split.runs(rank)
        for half, block in enumerate((rank, 2 * cp - 1 - rank)):
            kv_len, q_len = prefix + sum(sizes[: block + 1]), sizes[block]
            assert runs.count[half] == q_len
            assert prefix + runs.offset[half] == kv_len - q_len


@pytest.mark.parametrize("layout", [Zigzag(1), Zigzag(4), Zigzag(8), PackedInterleave(3), PackedInterleave(8)], ids=str)
def test_traced_and_host_agree(layout):
    """One compiled program serves all lengths of a batch size; unused entries of a table are requests of length 0."""
    rows, tokens = 700, 5000
    calls = {
        "counts": jax.jit(lambda n: layout.split(n).counts()),
        "runs": jax.jit(lambda n, r: layout.split(n).runs(r)),
        "tokens": jax.jit(lambda n, r: layout.split(n).tokens(r, rows)),
        "gathered": jax.jit(lambda n: layout.split(n).gathered(jnp.arange(tokens), rows)),
    }
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.array([*rng.integers(0, 900, 5), 3, 0, 0])
        host, device = layout.split(lengths), jnp.asarray(lengths, jnp.int32)
        total = lengths.sum()
        np.testing.assert_array_equal(calls["counts"](device), host.counts())
        np.testing.assert_array_equal(calls["gathered"](device)[:total], host.gathered(np.arange(total), rows))
        for rank in range(layout.cp):
            traced = calls["tokens"](device, rank)
            assert traced.dtype == host.tokens(rank, rows).dtype == np.int32
            np.testing.assert_array_equal(traced, host.tokens(rank, rows))
            for a, b in zip(calls["runs"](device, rank), host.runs(rank), strict=True):
                np.testing.assert_array_equal(a, b)
    assert {f._cache_size() for f in calls.values()} == {1}


def test_the_longest_batch_does_not_wrap():
    for layout in (Zigzag(8), PackedInterleave(8)):
        split = layout.split([INT32_MAX - 5, 5])
        assert split.counts().sum(dtype=np.int64) == INT32_MAX
        token = np.array([0, INT32_MAX - 1])
        rank, row = split.locate(token)
        for t, r, i in zip(token, rank, row, strict=True):
            runs = split.runs(r)
            run = np.searchsorted(runs.first_row + runs.count, i, side="right")
            assert split.first[runs.request[run]] + runs.offset[run] + (i - runs.first_row[run]) * split.stride == t


def test_sizes_of_the_models_shapes():
    """Block sizes and rows of published cases: 8K and 8193 on four ranks, 3000 + 5192."""
    assert np.unique(Zigzag(4).split([8192]).sizes).tolist() == [1024]
    odd = Zigzag(4).split([8193])
    assert odd.sizes[0].tolist() == [1025] + [1024] * 7
    assert odd.counts().tolist() == [2049, 2048, 2048, 2048]
    assert Zigzag(4).split([3000, 5192]).sizes.tolist() == [[375] * 8, [649] * 8]


@pytest.mark.parametrize("kind", [Zigzag, PackedInterleave])
@pytest.mark.parametrize(
    ("cp", "lengths", "error", "message"),
    [
        (0, [1], ValueError, "cp: got 0"),
        (True, [1], ValueError, "cp: got True"),
        (2, [-1], ValueError, "lengths: got -1"),
        (2, [1.5], TypeError, "lengths: got dtype float64"),
        (2, [], ValueError, "lengths: got shape"),
        (2, 5, ValueError, "lengths: got shape"),
        (2, [2**30, 2**30], ValueError, "lengths: got a sum of 2147483648"),
    ],
)
def test_bad_host_values_are_refused(kind, cp, lengths, error, message):
    with pytest.raises(error, match=message):
        kind(cp).split(lengths)
