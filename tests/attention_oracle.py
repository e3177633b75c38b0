"""Attention in float64, one token and head at a time, and paged storage built row by row.

Ownership is written out here (owner(p) = p // I mod c) instead of being taken from the library.
"""

import math

import numpy as np

TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "float16": 2.0**-9, "bfloat16": 2.0**-7}
"""Error over sum_n p_n |v_n|. 16 bits: half an ulp for each rounded weight and for the output, times two."""


def rows_of(rank, length, cp, granularity):
    """Positions below `length` that `rank` owns, ascending."""
    position = np.arange(length)
    return position[position // granularity % cp == rank]


def one(q, k, v, scale):
    """Row q over keys k, values v: (o, natural LSE, sum of p |v|)."""
    if not len(k):
        return np.zeros(v.shape[1]), -np.inf, np.zeros(v.shape[1])
    s = k @ q * scale
    p = np.exp(s - s.max())
    return p @ v / p.sum(), s.max() + math.log(p.sum()), p @ np.abs(v) / p.sum()


def partial(q, keys, values, counts, scale, positions_of):
    """Causal attention of the last counts[b] tokens of each request over the keys at `positions_of(length)`.

    Args:
      q: [requests, query_tokens, heads, key_dim].
      keys, values: per request, [length, kv_heads, dim]; length counts the new tokens.
      positions_of: bound -> positions below it that count.

    Returns:
      o [requests, query_tokens, heads, value_dim], lse [...] (natural), magnitude as o: sum of p |v|.
    """
    q, keys, values = (
        np.asarray(q, np.float64),
        [np.asarray(x, np.float64) for x in keys],
        [np.asarray(x, np.float64) for x in values],
    )
    requests, query_tokens, heads, _ = q.shape
    o = np.zeros((requests, query_tokens, heads, values[0].shape[2]))
    lse, magnitude = np.full(o.shape[:-1], -np.inf), np.zeros_like(o)
    for b in range(requests):
        for t in range(counts[b]):
            at = positions_of(max(len(keys[b]) - counts[b] + t + 1, 0))
            for j in range(heads):
                g = j // (heads // keys[b].shape[1])
                o[b, t, j], lse[b, t, j], magnitude[b, t, j] = one(q[b, t, j], keys[b][at, g], values[b][at, g], scale)
    return o, lse, magnitude


def full(q, keys, values, counts, scale):
    """Attention over all keys: o [requests, query_tokens, heads, value_dim] and its magnitude."""
    o, _, magnitude = partial(q, keys, values, counts, scale, np.arange)
    return o, magnitude


def assert_close(got, want, magnitude, dtype):
    """|got - want| within the dtype's tolerance of sum p |v|, and exactly 0 where no key was seen."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), "not finite"
    excess = np.abs(got - want) - TOLERANCE[str(dtype)] * magnitude
    assert (excess <= 0).all(), f"off by {np.abs(got - want).max():.3g}, {excess.max():.3g} beyond the tolerance"


def paged(rows, rank, cp, granularity, page_size, pages, page_table, poison=np.nan):
    """Pages [pages, page_size, ...] of one rank that hold each request's rows; everything else is `poison`."""
    store = np.full((pages, page_size, *rows[0].shape[1:]), poison)
    width = page_size * cp
    for b, request in enumerate(rows):
        for p in rows_of(rank, len(request), cp, granularity):
            inside = p % width
            row = inside // (cp * granularity) * granularity + inside % granularity
            store[page_table[b, p // width], row] = request[p]
    return store
