"""The merge itself: its maths, its special values, and that the base travels with the LSE."""

import itertools

import cases
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxcp import LogBase, Partial, lse

BASES = tuple(LogBase)
SHAPES = [(1, 3, 8), (2, 3, 8), (5, 4, 16)]


def random_partials(sources, rows, dim, base, dtype="float32", seed=0) -> Partial:
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((sources, rows, dim)).astype(jnp.dtype(dtype))
    return Partial(jnp.asarray(o), jnp.asarray(4 * rng.standard_normal((sources, rows)), jnp.float32), base)


def check(merged: Partial, partials: Partial) -> None:
    o, total, scale = cases.oracle(np.asarray(partials.o), np.asarray(partials.lse), partials.base)
    cases.check_o(np.asarray(merged.o), o, scale)
    cases.check_lse(np.asarray(merged.lse), total)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_matches_oracle(shape, dtype, base):
    partials = random_partials(*shape, base, dtype)
    merged = lse.merge(partials)
    assert merged.o.dtype == partials.o.dtype
    assert merged.base is base
    check(merged, partials)


@pytest.mark.parametrize("base", BASES)
def test_merge_is_attention_over_all_keys(base):
    """Partials of disjoint key sets merge to softmax over their union."""
    rng = np.random.default_rng(0)
    logits, values = rng.standard_normal((2, 12)), rng.standard_normal((12, 8))

    def attend(keys):
        weights = np.exp(logits[:, keys])
        return weights @ values[keys] / weights.sum(1, keepdims=True), np.log(weights.sum(1)) / base.ln

    whole, whole_lse = attend(slice(None))
    parts = [attend(keys) for keys in (slice(0, 5), slice(5, 6), slice(6, 12))]
    o, l = (jnp.array(arrays, jnp.float32) for arrays in zip(*parts, strict=True))
    merged = lse.merge(Partial(o, l, base))
    np.testing.assert_allclose(merged.o, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole_lse, rtol=1e-5, atol=1e-6)


def test_mistaken_base_would_show():
    """Partition functions 2 and 8: the base's value is in the weights."""
    o = jnp.array([[[0.0]], [[10.0]]])
    natural = jnp.log(jnp.array([[2.0], [8.0]]))
    right = lse.merge(Partial(o, natural, LogBase.E)).o
    wrong = lse.merge(Partial(o, natural, LogBase.TWO)).o
    np.testing.assert_allclose([right.item(), wrong.item()], [8.0, 7.2330], rtol=1e-4)


# Special values.

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("empty", [NAN, INF, -INF])
@pytest.mark.parametrize("payload", [NAN, INF, -INF, 7.0])
def test_an_empty_source_is_selected_away(payload, empty, base):
    o = jnp.array([[[payload, payload]], [[1.0, 2.0]], [[payload, 3.0]]])
    merged = lse.merge(Partial(o, jnp.array([[empty], [0.5], [empty]]), base))
    np.testing.assert_array_equal(merged.o, [[1.0, 2.0]])
    np.testing.assert_allclose(merged.lse, [0.5], rtol=1e-6)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("empties", list(itertools.product([NAN, INF, -INF], repeat=2)), ids=str)
def test_all_empty_is_neutral(empties, base):
    merged = lse.merge(Partial(jnp.full((2, 1, 4), NAN), jnp.array(empties)[:, None], base))
    np.testing.assert_array_equal(merged.o, np.zeros((1, 4)))
    np.testing.assert_array_equal(merged.lse, [-INF])


def test_no_source_is_neutral():
    merged = lse.merge(Partial(jnp.zeros((0, 2, 4)), jnp.zeros((0, 2)), LogBase.E))
    np.testing.assert_array_equal(merged.o, np.zeros((2, 4)))
    np.testing.assert_array_equal(merged.lse, [-INF, -INF])


def test_neutral_changes_nothing():
    partial = jax.tree.map(lambda x: x[0], random_partials(1, 3, 8, LogBase.TWO, "bfloat16"))
    neutral = lse.neutral(partial.o.shape, partial.o.dtype, LogBase.E)
    in_same_base = Partial(neutral.o, neutral.lse, LogBase.TWO)
    for merged in (lse.merge_two(partial, neutral), lse.merge_two(in_same_base, partial)):
        np.testing.assert_array_equal(merged.o, partial.o)
        np.testing.assert_array_equal(merged.lse, partial.lse)


@pytest.mark.parametrize("base", BASES)
def test_far_apart(base):
    merged = lse.merge(Partial(jnp.array([[[1.0]], [[5.0]]]), jnp.array([[100.0], [-100.0]]), base))
    assert (merged.o.item(), merged.lse.item()) == (1.0, 100.0)


def test_the_end_of_float32():
    merged = lse.merge(Partial(jnp.array([[[1.0]], [[5.0]]]), jnp.array([[3e38], [3e38]]), LogBase.E))
    assert merged.o.item() == 3.0
    assert np.isfinite(merged.lse.item())


# Algebra. Equal to rounding: sums in another order round differently.

FINITE = st.floats(-50, 50, width=32)
LSES = st.one_of(FINITE, st.sampled_from([NAN, INF, -INF]))


@st.composite
def partials(draw):
    n = draw(st.sampled_from([2, 5]))  # few shapes: each is compiled
    o = draw(hnp.arrays(np.float32, (n, 2, 3), elements=st.floats(-4, 4, width=32)))
    lses = draw(hnp.arrays(np.float32, (n, 2), elements=LSES))
    return Partial(jnp.asarray(o), jnp.asarray(lses), draw(st.sampled_from(BASES)))


def same(a: Partial, b: Partial) -> None:
    np.testing.assert_allclose(a.o, b.o, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(np.isneginf(a.lse), np.isneginf(b.lse))
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=50)
@given(partials(), st.data())
def test_order_does_not_matter(p, data):
    order = np.array(data.draw(st.permutations(range(p.o.shape[0]))))
    same(lse.merge(p), lse.merge(Partial(p.o[order], p.lse[order], p.base)))


@settings(max_examples=50)
@given(partials(), st.data())
def test_grouping_does_not_matter(p, data):
    """Merging merged parts (chunks, then ranks) equals merging at once."""
    cut = data.draw(st.integers(1, p.o.shape[0] - 1))
    parts = [lse.merge(Partial(p.o[s], p.lse[s], p.base)) for s in (slice(0, cut), slice(cut, None))]
    same(lse.merge_two(*parts), lse.merge(p))


@settings(max_examples=50)
@given(partials(), st.floats(-8, 8, width=32))
def test_a_common_shift_shifts_the_lse_alone(p, shift):
    shifted = lse.merge(Partial(p.o, p.lse + np.float32(shift), p.base))
    merged = lse.merge(p)
    same(Partial(shifted.o, shifted.lse - np.float32(shift), p.base), merged)


@settings(max_examples=50)
@given(partials())
def test_the_base_is_only_a_unit(p):
    """The same partials in the other base merge to the same rows and to the same LSE in that base."""
    other = LogBase.E if p.base is LogBase.TWO else LogBase.TWO
    same(lse.with_base(lse.merge(lse.with_base(p, other)), p.base), lse.merge(p))


def test_source_order_fixes_the_bits():
    p = random_partials(8, 16, 32, LogBase.TWO, "bfloat16")
    a, b = jax.jit(lse.merge)(p), jax.jit(lse.merge)(p)
    np.testing.assert_array_equal(a.o, b.o)


def test_conversion_of_bases():
    natural = jnp.log(jnp.array([1.0, 2.0, 8.0]))
    np.testing.assert_allclose(lse.convert(natural, LogBase.E, LogBase.TWO), [0.0, 1.0, 3.0], atol=1e-6)
    assert lse.convert(natural, LogBase.E, LogBase.E) is natural


# A partial is a pytree whose base is static.


def test_partial_is_a_pytree_with_its_base():
    p = random_partials(2, 3, 8, LogBase.TWO)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(p)
    assert doubled.base is LogBase.TWO
    np.testing.assert_array_equal(doubled.o, 2 * p.o)


def test_merge_two_takes_the_base_and_dtype_of_the_first():
    a, b = (
        jax.tree.map(lambda x: x[0], random_partials(1, 3, 8, base, dtype, seed))
        for seed, (base, dtype) in enumerate([(LogBase.TWO, "bfloat16"), (LogBase.E, "float32")])
    )
    merged = lse.merge_two(a, b)
    assert (merged.base, merged.o.dtype) == (LogBase.TWO, jnp.bfloat16)
    same_base = lse.with_base(b, LogBase.TWO)
    check(merged, Partial(jnp.stack([a.o, b.o.astype(a.o.dtype)]), jnp.stack([a.lse, same_base.lse]), LogBase.TWO))


def test_unit_axis_is_dropped():
    p = random_partials(2, 3, 8, LogBase.E)
    np.testing.assert_array_equal(lse.merge(Partial(p.o, p.lse[..., None], p.base)).lse, lse.merge(p).lse)


# Bad input.


def test_a_partial_needs_a_base():
    with pytest.raises(TypeError, match=r"Partial.base: got None; expected LogBase.TWO or LogBase.E"):
        Partial(jnp.zeros((1, 4)), jnp.zeros(1))


@pytest.mark.parametrize(("o", "l", "error", "message"), [
    (jnp.zeros((2, 3, 8)), jnp.zeros((2, 4)), ValueError, r"lse.shape: got \(2, 4\); expected \(2, 3\)"),
    (jnp.zeros((2, 3, 8)), jnp.zeros((2, 3, 2)), ValueError, "lse.shape"),
    (jnp.zeros((2, 3, 8), jnp.bfloat16), jnp.zeros((2, 3), jnp.bfloat16), TypeError, "lse.dtype: got bfloat16"),
    (jnp.zeros((2, 3, 8), jnp.float8_e4m3fn), jnp.zeros((2, 3)), TypeError, "o.dtype: got float8_e4m3fn"),
])  # fmt: skip
def test_bad_partials(o, l, error, message):
    with pytest.raises(error, match=message):
        lse.merge(Partial(o, l, LogBase.E))


def test_not_a_partial():
    with pytest.raises(TypeError, match="Partial"):
        lse.validated((jnp.zeros((2, 3, 8)), jnp.zeros((2, 3))), "pair")


def test_merge_two_of_different_shapes():
    a, b = (Partial(jnp.zeros((rows, 8)), jnp.zeros(rows), LogBase.E) for rows in (2, 3))
    with pytest.raises(ValueError, match=r"b\.o\.shape: got \(3, 8\); expected \(2, 8\)"):
        lse.merge_two(a, b)
