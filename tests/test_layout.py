"""Decode's token layout against brute force: owners, lengths, page tables, int32 limits, host equal to traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcp.layout import INT32_MAX, Interleave

cps = st.sampled_from([1, 2, 3, 4, 8])
granularities = st.sampled_from([1, 2, 4, 16])
lengths = st.one_of(st.integers(0, 200), st.integers(2040, 2060))
layouts = st.builds(Interleave, cps, granularities)


def brute_force(layout, length):
    """Positions below `length` of each rank, by dealing out granules."""
    owned = [[] for _ in range(layout.cp)]
    for p in range(length):
        owned[p // layout.granularity % layout.cp].append(p)
    return owned


@given(layouts, lengths)
def test_positions_and_local_indices_are_a_bijection(layout, length):
    owned = brute_force(layout, length)
    for rank, positions in enumerate(owned):
        assert (layout.owner(positions) == rank).all()
        assert layout.local_index(positions).tolist() == list(range(len(positions)))
        assert layout.global_position(np.arange(len(positions)), rank).tolist() == positions


@given(layouts, lengths, st.integers(0, 100))
def test_lengths_are_those_of_brute_force(layout, length, more):
    owned, longer = brute_force(layout, length), brute_force(layout, length + more)
    counts = [len(positions) for positions in owned]
    assert layout.local_lengths(length).tolist() == counts
    assert [layout.local_length(length, r) for r in range(layout.cp)] == counts
    assert sum(counts) == length
    got = [layout.range_length(length, more, r) for r in range(layout.cp)]
    assert got == [len(b) - len(a) for a, b in zip(owned, longer, strict=True)]


@given(layouts, lengths, st.integers(1, 5))
def test_visible_lengths_use_the_global_bound(layout, length, query_tokens):
    for rank, positions in enumerate(brute_force(layout, length)):
        bounds = [length - query_tokens + t + 1 for t in range(query_tokens)]
        expected = [sum(p < bound for p in positions) for bound in bounds]
        assert layout.visible_lengths(length, query_tokens, rank).tolist() == expected


def test_an_early_row_can_be_empty_although_its_rank_has_keys():
    assert Interleave(2).local_length(3, 1) == 1
    assert Interleave(2).visible_lengths(3, 3, 1).tolist() == [0, 1, 1]


@st.composite
def pools(draw):
    layout = draw(layouts)
    page_size = layout.granularity * draw(st.integers(1, 3))
    pages = draw(st.permutations(range(1, 9)))
    length = draw(st.integers(0, len(pages) * page_size * layout.cp))
    return layout, page_size, list(pages), length


@given(pools())
def test_slots_rows_and_page_tables_agree_with_brute_force(pool):
    layout, page_size, pages, length = pool
    width = layout.widened(page_size)
    assert width == page_size * layout.cp
    slots = [pages[p // width] * width + p % width for p in range(length)]
    assert layout.slots(pages, np.arange(length), page_size).tolist() == slots
    rows = {}
    for rank, positions in enumerate(brute_force(layout, length)):
        own = [slots[p] for p in positions]
        assert (layout.slot_owner(own) == rank).all()
        physical = layout.physical_row(own)
        # Tokens of a rank fill its pages without a gap, in the order of the page table.
        used = -(-len(positions) // page_size)
        table = layout.local_page_table(pages, length, rank, page_size)
        assert table.tolist() == pages[:used] + [-1] * (len(pages) - used)
        assert physical.tolist() == [table[j // page_size] * page_size + j % page_size for j in range(len(own))]
        written = np.zeros(length, int)
        written[positions] = physical
        assert layout.write_rows(slots, rank, dump_row=0).tolist() == written.tolist()
        rows[rank] = set(physical.tolist())
    assert sum(len(r) for r in rows.values()) == length, "two tokens share a row"


@pytest.mark.parametrize("layout", [Interleave(1), Interleave(2, 16), Interleave(3), Interleave(8, 4)], ids=str)
def test_traced_and_host_agree_up_to_int32_limits(layout):
    rng = np.random.default_rng(0)
    host = np.concatenate([np.arange(100), rng.integers(0, INT32_MAX, 1000), INT32_MAX - np.arange(100)])
    device = jnp.asarray(host, jnp.int32)
    for rank in (0, layout.cp - 1):
        for name, arguments in {
            "owner": (), "local_index": (), "local_length": (rank,), "visible_lengths": (3, rank),
        }.items():  # fmt: skip
            formula = getattr(layout, name)
            on_host = formula(host, *arguments)
            traced = jax.jit(lambda x, f=formula, a=arguments: f(x, *a))(device)
            assert on_host.dtype == traced.dtype == np.int32
            np.testing.assert_array_equal(on_host, traced)
        np.testing.assert_array_equal(layout.global_position(layout.local_index(host), layout.owner(host)), host)


def test_traced_pages_and_slots_agree_with_the_host():
    layout, pages = Interleave(3, 2), np.array([5, 2, 7], np.int32)
    position = np.arange(18)
    slots = layout.slots(pages, position, 4)
    np.testing.assert_array_equal(jax.jit(lambda t, p: layout.slots(t, p, 4))(pages, position), slots)
    np.testing.assert_array_equal(jax.jit(layout.write_rows)(slots, 1), layout.write_rows(slots, 1))
    table = jax.jit(lambda t, n: layout.local_page_table(t, n, 1, 4))(pages, jnp.int32(13))
    np.testing.assert_array_equal(table, layout.local_page_table(pages, 13, 1, 4))


def test_the_longest_int32_length_is_exact():
    layout = Interleave(3)
    assert layout.local_lengths(INT32_MAX).tolist() == [(INT32_MAX - r + 2) // 3 for r in range(3)]
    assert layout.local_lengths(INT32_MAX).sum(dtype=np.int64) == INT32_MAX


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Interleave(0), ValueError, "cp: got 0"),
        (lambda: Interleave(True), ValueError, "cp: got True"),
        (lambda: Interleave(2, 0), ValueError, "granularity: got 0"),
        (lambda: Interleave(2).local_length(-1, 0), ValueError, "length: got -1"),
        (lambda: Interleave(2).local_length(2**31, 0), ValueError, "length: got 2147483648"),
        (lambda: Interleave(2).local_length(1.5, 0), TypeError, "length: got dtype float64"),
        (lambda: Interleave(2).local_length(4, 2), ValueError, "rank: got 2"),
        (lambda: Interleave(2).global_position(2**30, 1), ValueError, "global_position: got 2147483649"),
        (lambda: Interleave(2).range_length(2**31 - 1, 1, 0), ValueError, r"start \+ count: got 2147483648"),
        (lambda: Interleave(2).visible_lengths(4, 0, 0), ValueError, "query_tokens: got 0"),
        (lambda: Interleave(2, 4).widened(6), ValueError, "page_size: got 6"),
        (lambda: Interleave(2).slots([1], [8], 4), ValueError, "page_table: got 1 pages = 8 tokens"),
        (lambda: Interleave(2).local_page_table([1], 9, 0, 4), ValueError, "page_table: got 1 pages"),
    ],
)
def test_bad_host_values_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
