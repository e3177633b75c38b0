"""The table of exchange cases that every backend and implementation is tested with, and its float64 oracle.

A backend's test file only names the backend:

    @pytest.mark.parametrize("case", cases.EXCHANGE, ids=str)
    def test_matches_oracle(case):
        cases.check(case, cases.run(case, "a2a"))
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import LogBase, Partial

MAX_TOKENS = 32
"""Capacity that `run` declares; the cases with more tokens are sliced."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Partials of `cp` ranks. `filling` names what is special about them (see `_FILLINGS`)."""

    cp: int
    heads: int
    dim: int
    tokens: int
    base: LogBase = LogBase.TWO
    dtype: str = "bfloat16"
    filling: str = "random"
    unit_axis: bool = False

    def __str__(self) -> str:
        lse_axis = "-unit" if self.unit_axis else ""
        return (
            f"c{self.cp}-h{self.heads}-d{self.dim}-t{self.tokens}-base{self.base.value}-{self.dtype}"
            f"-{self.filling}{lse_axis}"
        )

    @property
    def heads_per_rank(self) -> int:
        return math.ceil(self.heads / self.cp)

    @property
    def elements(self) -> int:
        return self.cp * self.heads * self.dim * self.tokens

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """o [cp, tokens, heads, dim] in `dtype`, lse [cp, tokens, heads(, 1)] float32; index r is rank r's partial."""
        rng = np.random.default_rng(list(str(self).encode()))
        o = rng.standard_normal((self.cp, self.tokens, self.heads, self.dim), np.float32).astype(jnp.dtype(self.dtype))
        lse = (4 * rng.standard_normal(o.shape[:-1])).astype(np.float32)
        _FILLINGS[self.filling](rng, o, lse)
        if self.dtype == "float64":
            lse = lse.astype(np.float64)
        return o, lse[..., None] if self.unit_axis else lse

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 (o [cp, tokens, h, dim], lse [cp, tokens, h], sum_i w_i |o_i| like o); index r is rank r's result."""
        o, lse = self.inputs()
        merged = oracle(o, lse.reshape(o.shape[:-1]), self.base)
        fill = (0.0, -np.inf, 0.0)
        return tuple(self._by_rank(x, value) for x, value in zip(merged, fill, strict=True))

    def _by_rank(self, merged: np.ndarray, value: float) -> np.ndarray:
        """[tokens, heads, ...] to [cp, tokens, h, ...]; `value` in rows that have no head."""
        out = np.full((self.cp, self.tokens, self.heads_per_rank, *merged.shape[2:]), value)
        for head in range(self.heads):
            out[head // self.heads_per_rank, :, head % self.heads_per_rank] = merged[:, head]
        return out


def oracle(o: np.ndarray, lse: np.ndarray, base: LogBase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge over axis 0 in float64: o, lse, and sum_i w_i |o_i|, the scale of the rounding errors."""
    lse = np.where(lse < np.inf, lse, -np.inf).astype(np.float64)
    m = lse.max(axis=0)
    m = np.where(m == -np.inf, 0.0, m)
    b = 2.0 if base is LogBase.TWO else math.e
    w = b ** (lse - m)
    s = w.sum(axis=0)
    seen = s > 0
    w = w / np.where(seen, s, 1.0)
    terms = np.where(w[..., None] > 0, w[..., None] * np.where(w[..., None] > 0, o, 0).astype(np.float64), 0.0)
    merged_lse = np.where(seen, m + np.log(np.where(seen, s, 1.0)) / math.log(b), -np.inf)
    return terms.sum(axis=0), merged_lse, np.abs(terms).sum(axis=0)


def check_o(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> None:
    """Two units in the last place of the result's dtype, plus what cancellation makes of float32 rounding."""
    info = jnp.finfo(got.dtype)
    magnitude = np.maximum(np.abs(want), float(info.tiny))
    unit = np.maximum(float(info.eps) * 2.0 ** np.floor(np.log2(magnitude)), float(info.tiny))
    rounding = 1e-6 if info.bits < 64 else 1e-14
    error = np.abs(got.astype(np.float64) - want)  # NaN in `got` fails the comparison below
    assert got.shape == want.shape
    worst = np.max(error / (2 * unit + rounding * scale), initial=0.0)
    assert worst <= 1, f"error is {worst:.3g} times the tolerance"


def check_lse(got: np.ndarray, want: np.ndarray) -> None:
    """float32 accuracy, and exactly -inf where nothing was seen."""
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=5e-7, atol=4e-6)


def check(case: Case, results: tuple[np.ndarray, np.ndarray]) -> None:
    """Results of all ranks, o [cp, tokens, h, dim] and lse [cp, tokens, h], against the oracle."""
    want_o, want_lse, scale = case.expected()
    got_o, got_lse = results
    assert got_o.dtype == jnp.dtype(case.dtype)
    check_o(got_o, want_o, scale)
    check_lse(got_lse, want_lse)


def run(case: Case, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """The case through an `Exchange` in shard_map over the first `cp` devices: merged o and lse of all ranks."""
    mesh = Mesh(np.array(jax.devices()[: case.cp]), ("cp",))
    exchange = jaxcp.Exchange(
        mesh, "cp", max_tokens=MAX_TOKENS, heads=case.heads, head_dim=case.dim, dtype=case.dtype, backend=backend
    )
    try:
        merged = call(exchange, *case.inputs(), case.base)
        exchange.check()
        return merged
    finally:
        exchange.close()


def call(exchange: jaxcp.Exchange, o: np.ndarray, lse: np.ndarray, base: LogBase) -> tuple[np.ndarray, np.ndarray]:
    """One exchange of the partials o[r], lse[r] of rank r; o and lse of all ranks, stacked on axis 0."""
    axis = exchange.axis_name

    def step(o, lse):
        return tuple(x[None] for x in exchange(Partial(o[0], lse[0], base), return_lse=True))

    mapped = jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=P(axis), out_specs=P(axis)))
    return tuple(np.asarray(x) for x in mapped(o, lse))


# What the shards hold.


def _nothing(rng, o, lse):
    pass


def _empty_shard(rng, o, lse):
    """The last rank holds no key, and its kernel left garbage."""
    o[-1], lse[-1] = np.nan, -np.inf


def _one_owner(rng, o, lse):
    """Requests of one token, as in padded graph rows: everything is on rank 0."""
    o[1:], lse[1:] = np.nan, -np.inf


def _empty_rows(rng, o, lse):
    """Some rows are empty on every rank, with NaN and infinite payloads."""
    empty = rng.random(lse.shape[1:]) < 0.4
    empty[:1] = True
    o[:, empty] = np.where(rng.random(o[:, empty].shape) < 0.5, np.nan, np.inf)
    lse[:, empty] = -np.inf


def _all_empty(rng, o, lse):
    o[:], lse[:] = np.nan, -np.inf


def _not_finite(rng, o, lse):
    """NaN, +inf and -inf LSEs strewn over all ranks, NaN and infinite payloads below them."""
    kind = rng.integers(0, 6, lse.shape)
    lse[kind == 0], lse[kind == 1], lse[kind == 2] = np.nan, np.inf, -np.inf
    o[kind == 0], o[kind == 1], o[kind == 2] = np.inf, np.nan, -np.inf


def _far_apart(rng, o, lse):
    """LSEs of +-100: one source has all the weight."""
    lse[:] = np.where(rng.random(lse.shape) < 0.5, 100, -100) + lse / 4


def _huge(rng, o, lse):
    """Finite LSEs near the end of float32's range."""
    lse[:] = np.where(rng.random(lse.shape) < 0.5, 3e38, -3e38)


def _equal(rng, o, lse):
    """Equal LSEs: the plain mean."""
    lse[:] = 3.25


def _odd_bits(rng, o, lse):
    """LSEs whose 16-bit halves look like signalling NaNs, infinities and subnormals of bfloat16 and float16."""
    halves = np.array([0x7F81, 0xFF82, 0x7C01, 0xFC03, 0x7F80, 0x0001, 0x8000, 0x7FFF], np.uint32)
    high = rng.integers(0x3F80, 0x4120, lse.shape).astype(np.uint32)  # 1 to 10
    lse[:] = (high << 16 | halves[rng.integers(0, len(halves), lse.shape)]).view(np.float32)


_FILLINGS = {
    "random": _nothing, "empty_shard": _empty_shard, "one_owner": _one_owner, "empty_rows": _empty_rows,
    "all_empty": _all_empty, "not_finite": _not_finite, "far_apart": _far_apart, "huge": _huge, "equal": _equal,
    "odd_bits": _odd_bits,
}  # fmt: skip

MAX_ELEMENTS = 3 << 20
"""Larger partials cost seconds per case on a CPU."""

BF16, F16, F32 = "bfloat16", "float16", "float32"
TWO, E = LogBase.TWO, LogBase.E

# Every pair of values of two columns occurs that fits in MAX_ELEMENTS elements (test_exchange.py checks it).
COVERING = (
    Case(1, 1, 128, 1, E, F16, "empty_shard"),
    Case(1, 1, 512, 128, TWO, BF16, "one_owner", True),
    Case(1, 9, 64, 0, E, BF16, "random", True),
    Case(1, 9, 64, 3, E, F32, "empty_shard", True),
    Case(1, 16, 512, 7, TWO, F16, "one_owner"),
    Case(1, 16, 512, 128, E, F32, "empty_rows"),
    Case(1, 128, 128, 49, TWO, BF16, "not_finite"),
    Case(2, 1, 64, 3, TWO, F16, "random"),
    Case(2, 1, 64, 7, TWO, F16, "not_finite", True),
    Case(2, 9, 128, 7, TWO, F32, "random"),
    Case(2, 9, 512, 128, E, BF16, "random", True),
    Case(2, 16, 64, 1, TWO, F32, "one_owner"),
    Case(2, 16, 128, 49, E, F16, "empty_shard", True),
    Case(2, 128, 512, 0, E, BF16, "empty_rows"),
    Case(3, 1, 64, 49, TWO, BF16, "random"),
    Case(3, 1, 128, 0, E, F32, "not_finite", True),
    Case(3, 9, 512, 1, E, F32, "empty_rows"),
    Case(3, 16, 64, 3, E, BF16, "not_finite", True),
    Case(3, 128, 64, 128, E, F32, "random"),
    Case(3, 128, 128, 3, E, F16, "one_owner"),
    Case(3, 128, 512, 7, TWO, BF16, "empty_shard", True),
    Case(4, 1, 128, 3, TWO, F32, "empty_rows", True),
    Case(4, 1, 512, 49, E, BF16, "empty_rows"),
    Case(4, 9, 64, 7, E, F16, "empty_rows", True),
    Case(4, 9, 64, 128, TWO, BF16, "empty_shard", True),
    Case(4, 9, 512, 0, E, F16, "one_owner", True),
    Case(4, 16, 512, 0, TWO, F16, "random"),
    Case(4, 128, 128, 1, E, F32, "not_finite"),
    Case(8, 1, 128, 128, E, F16, "not_finite"),
    Case(8, 9, 512, 0, TWO, F32, "empty_shard", True),
    Case(8, 9, 512, 3, TWO, BF16, "empty_rows"),
    Case(8, 9, 512, 7, TWO, F32, "not_finite", True),
    Case(8, 9, 512, 49, E, F32, "one_owner"),
    Case(8, 16, 512, 1, E, BF16, "random", True),
    Case(8, 128, 64, 1, TWO, F32, "empty_shard", True),
)

# What pairs do not reach.
SPECIAL = (
    Case(8, 128, 512, 3, filling="far_apart"),
    Case(4, 8, 512, 2, filling="far_apart", base=E),
    Case(4, 9, 64, 33, filling="huge"),
    Case(4, 13, 64, 1, filling="huge", base=E),
    Case(3, 9, 512, 2, filling="not_finite", base=E),
    Case(3, 9, 128, 4, filling="equal"),
    Case(8, 16, 64, 49, filling="equal", base=E, dtype=F16),
    Case(8, 9, 64, 7, filling="odd_bits"),
    Case(3, 16, 128, 3, filling="odd_bits", dtype=F16, base=E),
    Case(2, 16, 64, 3, filling="odd_bits", dtype=F32),
    Case(2, 8, 64, 1, filling="all_empty"),
    Case(8, 9, 64, 7, filling="all_empty", base=E, dtype=F32),
    Case(1, 9, 64, 3, filling="all_empty"),
)

EXCHANGE = COVERING + SPECIAL
