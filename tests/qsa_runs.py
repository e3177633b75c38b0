"""Ways to run a layer over requests, for tests: each returns what one shot over whole requests would give."""

import jax.numpy as jnp
import numpy as np

from jaxcp import qsa

TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2}
"""Relative to the largest output. float32: some hundred roundings of 6e-8; bfloat16: a dozen of 4e-3."""


def close(y, want, dtype):
    """Asserts every output to the dtype's tolerance."""
    want = np.asarray(want, np.float64)
    scale = np.abs(want).max() if want.size else 1
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=0, atol=TOLERANCE[dtype] * scale)


def ids(blocks) -> list:
    """Selections as lists of ids; asserts that they are contiguous, ascending, -1 behind."""
    out = []
    for row in np.asarray(blocks):
        valid = row[row >= 0]
        assert (row[: len(valid)] == valid).all()
        assert (np.diff(valid) > 0).all()
        out.append(valid.tolist())
    return out


def same_selection(got, want):
    """Asserts equal selections, row by row."""
    got, want = [list(map(int, g)) for g in got], [list(map(int, w)) for w in want]
    differing = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w]
    assert not differing, f"row {differing[0]}: {got[differing[0]]} instead of {want[differing[0]]}"


class Session:
    """A cache with its requests' lengths: `feed` runs a prefill over new tokens, `step` a decode."""

    def __init__(self, config, tensors, dtype="float32", *, requests=3, tokens=96, rows=64, page_size=8, **cache):
        """`tokens` per request in shuffled pages; `rows` is the least bucket, one program for all smaller chunks."""
        self.params, self.rows = qsa.from_tensors(tensors, config, dtype), rows
        pages = -(-tokens // page_size)
        table = 1 + np.random.default_rng(5).permutation(requests * pages).reshape(requests, pages)
        self.cache = qsa.init_cache(
            config, requests=requests, pages=1 + table.size, page_table=table, page_size=page_size, dtype=dtype,
            **{"max_query_tokens": 7} | cache,
        )  # fmt: skip
        self.lengths = np.zeros(requests, int)

    def feed(self, parts: dict, rope=None, **options):
        """Prefill of `parts`, request -> [tokens, hidden]; returns request -> (y, selections)."""
        requests = list(parts)
        lengths = [len(parts[r]) for r in requests]
        rope = None if rope is None else np.concatenate([rope[r] for r in requests], 1)
        plan = qsa.plan(
            lengths, self.lengths[requests], requests=requests, rope_positions=rope, cache=self.cache,
            min_rows=self.rows, min_context=self.cache.capacity,
        )  # fmt: skip
        x = plan.pad(np.concatenate(list(parts.values())).astype(self.params.dtype))
        y, self.cache, blocks = qsa.prefill(self.params, x, self.cache, plan, return_selection=True, **options)
        assert not np.asarray(y[sum(lengths) :], np.float32).any()
        self.lengths[requests] += lengths
        cuts = np.cumsum([0, *lengths])
        y, blocks = np.asarray(y, np.float64), ids(blocks)
        return {r: (y[a:b], blocks[a:b]) for r, a, b in zip(requests, cuts[:-1], cuts[1:], strict=True)}

    def step(self, parts: dict, k=1, rope=None, **options):
        """Decode of up to k tokens of each request in `parts`; the others idle."""
        n = len(self.lengths)
        x = np.zeros((n, k, self.params.config.hidden))
        counts, positions = np.zeros(n, int), np.zeros((3, n, k), np.int32)
        for r, part in parts.items():
            x[r, : len(part)], counts[r] = part, len(part)
            if rope is not None:
                positions[:, r, : len(part)] = rope[r]
        self.lengths += counts
        y, self.cache, blocks = qsa.decode(
            self.params, jnp.asarray(x.reshape(n * k, -1), self.params.dtype), self.cache, self.lengths,
            counts=counts, rope_positions=None if rope is None else jnp.asarray(positions.reshape(3, -1)),
            return_selection=True, **options,
        )  # fmt: skip
        y, blocks = np.asarray(y, np.float64).reshape(n, k, -1), ids(blocks)
        return {r: (y[r, : len(p)], blocks[r * k : r * k + len(p)]) for r, p in parts.items()}

    def finish(self):
        """Asserts that nothing was dropped or stale."""
        qsa.check(self.cache)


def joined(pieces):
    """[(y, selections), ...] of consecutive chunks as one."""
    return np.concatenate([y for y, _ in pieces]), [row for _, rows in pieces for row in rows]
