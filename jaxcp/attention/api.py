"""One rank's attention over its own keys: validation and the choice of an implementation."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcp import lse
from jaxcp.attention.checks import axes, layer_index, query_tokens, request_ints
from jaxcp.attention.paged import paged_attention
from jaxcp.errors import BackendError, invalid
from jaxcp.layout import Interleave, Ints
from jaxcp.lse import LogBase, Partial
from jaxcp.storage import PAGE_DTYPES, QUERY_DTYPES

logger = logging.getLogger("jaxcp")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts by which an implementation says whether it can serve a call."""

    dtype: np.dtype
    cache_dtype: np.dtype
    requests: int
    query_tokens: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool
    page_size: int


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute the partial.

    Attributes:
      blocker: why it cannot serve a problem, or None. Host only.
      run: takes the arguments of `paged_attention`.
      note: what it is, for the log.
    """

    blocker: Callable[[Problem], str | None]
    run: Callable[..., Partial]
    note: str


IMPLEMENTATIONS: dict[str, Implementation] = {
    "xla": Implementation(lambda problem: None, paged_attention, "plain XLA, works everywhere"),
}
"""Best first: "auto" takes the first one without a blocker."""


def attention(
    q: Array,
    k_pages: Array,
    v_pages: Array | None,
    page_table: Ints,
    lengths: Ints,
    *,
    layer: Any,
    layout: Interleave,
    rank: Any,
    scale: float,
    base: LogBase,
    counts: Ints | None = None,
    value_dim: int | None = None,
    implementation: str = "auto",
) -> Partial:
    """Attention of the newest tokens of each request over the keys that `rank` owns, all heads of the group.

        o = sum_n e^(scale q.k_n) v_n / Z      l = log_base Z      Z = sum_n e^(scale q.k_n)

    over the rank's keys n below the token's *global* position: token t of the last k = `counts` of a request of L
    tokens sees n_r(L - k + t + 1) of them (`Interleave.visible_lengths`). A token without a visible key is (0, -inf).

    Args:
      q: [tokens, heads, key_dim], bfloat16, float16 or float32 (float64 for checks); tokens = requests * query_tokens,
        request by request. Softmax is in float32; float32 queries use the highest matmul precision.
      k_pages: [layers, pages, page_size, kv_heads, key_dim]; a query's dtype, or uint8: the bits of float8_e4m3fn. Head
        j uses KV head j // (heads / kv_heads).
      v_pages: [layers, pages, page_size, kv_heads, value_dim], or None where values are the first `value_dim` columns
        of the keys (MLA's latent row).
      page_table: [requests, table], int32 page ids in token order; an id outside [1, pages) ends the request's keys.
      lengths: [requests], int32 *global* lengths that include the query tokens. Host integers are checked.
      layer: index into axis 0 of the pages; may be traced.
      layout: who owns which token.
      rank: this rank along the context-parallel axis; may be traced.
      scale: factor of the logits.
      base: base of the returned LSE.
      counts: [requests], int32: how many of the query tokens are real; all by default. Rows after them are (0, -inf).
      value_dim: width of a value; needed where `v_pages` is None.
      implementation: "auto" or a name of `IMPLEMENTATIONS`; a name never falls back.

    Returns:
      o [tokens, heads, value_dim] in the dtype of `q`, lse [tokens, heads] float32.

    Raises:
      TypeError, ValueError: bad arguments.
      BackendError: the named implementation cannot serve the call.
    """
    problem = _problem(q, k_pages, v_pages, page_table, lengths, counts, value_dim)
    if not q.shape[0]:
        return lse.neutral((0, problem.heads, problem.value_dim), q.dtype, base)
    table, allocated = usable_pages(jnp.asarray(page_table, jnp.int32), k_pages.shape[1])
    visible = _visible(lengths, counts, problem.query_tokens, layout, rank)
    visible = jnp.minimum(visible, allocated[:, None] * problem.page_size)
    return choose(problem, implementation).run(
        q,
        k_pages,
        v_pages,
        table,
        visible,
        layer=layer_index(layer, k_pages.shape[0]),
        value_dim=problem.value_dim,
        scale=float(scale),
        base=base,
    )


def choose(problem: Problem, name: str = "auto") -> Implementation:
    """The implementation called `name`, or the best one that can serve `problem`."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise invalid(
            "implementation",
            repr(name),
            f"'auto' or one of {sorted(IMPLEMENTATIONS)}",
            "'auto' takes the best that works.",
        )
    if name != "auto":
        if reason := IMPLEMENTATIONS[name].blocker(problem):
            raise BackendError(f"implementation={name!r} cannot serve this call: {reason}. Use 'auto' to take another.")
        return IMPLEMENTATIONS[name]
    blockers = {n: i.blocker(problem) for n, i in IMPLEMENTATIONS.items()}
    chosen = next(n for n, reason in blockers.items() if reason is None)
    passed = "; ".join(f"{n}: {reason}" for n, reason in blockers.items() if reason)
    _log_choice(chosen, passed)
    return IMPLEMENTATIONS[chosen]


@functools.cache
def _log_choice(chosen: str, passed: str) -> None:
    logger.info("attention: %s (%s)%s", chosen, IMPLEMENTATIONS[chosen].note, f"; not {passed}" if passed else "")


def usable_pages(page_table: Array, pages: int) -> tuple[Array, Array]:
    """(table with every id in range, how many leading entries of each request are pages it owns)."""
    owned = (page_table > 0) & (page_table < pages)
    return jnp.where(owned, page_table, 0), jnp.sum(jnp.cumprod(owned, axis=1), axis=1, dtype=jnp.int32)


def _problem(q, k_pages, v_pages, page_table, lengths, counts, value_dim) -> Problem:
    axes("q", q, QUERY_DTYPES, "tokens", "heads", "key_dim")
    axes("k_pages", k_pages, PAGE_DTYPES, "layers", "pages", "page_size", "kv_heads", "key_dim")
    if q.shape[2] != k_pages.shape[4]:
        raise invalid(
            "q.shape", q.shape, f"[tokens, heads, key_dim={k_pages.shape[4]}]", "Queries and keys share a width."
        )
    if v_pages is None:
        width = -1 if value_dim is None else int(value_dim)
        if not 0 < width <= k_pages.shape[4]:
            raise invalid(
                "value_dim",
                value_dim,
                f"an integer in [1, key_dim={k_pages.shape[4]}]",
                "Without v_pages a value is the head of its key row; say how wide it is.",
            )
    else:
        axes("v_pages", v_pages, PAGE_DTYPES, "layers", "pages", "page_size", "kv_heads", "value_dim")
        if v_pages.shape[:4] != k_pages.shape[:4] or value_dim not in (None, v_pages.shape[4]):
            raise invalid(
                "v_pages.shape",
                v_pages.shape,
                f"{(*k_pages.shape[:4], value_dim or 'value_dim')}",
                "Keys and values are paged alike.",
            )
        width = v_pages.shape[4]
    requests = request_ints("lengths", lengths, None).shape[0]
    if counts is not None:
        request_ints("counts", counts, requests)
    if np.ndim(page_table) != 2 or np.shape(page_table)[0] != requests:
        raise invalid(
            "page_table.shape", np.shape(page_table), f"[requests={requests}, table]", "Give one row per request."
        )
    kv_heads = k_pages.shape[3]
    if not kv_heads or q.shape[1] % kv_heads:
        raise invalid(
            "q.shape", q.shape, f"heads divisible by kv_heads = {kv_heads}", "Every KV head serves as many query heads."
        )
    return Problem(
        q.dtype,
        k_pages.dtype,
        requests,
        query_tokens(q.shape[0], requests),
        q.shape[1],
        kv_heads,
        q.shape[2],
        width,
        v_pages is None,
        k_pages.shape[2],
    )


def _visible(lengths: Ints, counts: Ints | None, k: int, layout: Interleave, rank: Any) -> Array:
    """Keys on `rank` that each query token sees, int32 [requests, k]; 0 for the rows that are padding."""
    lengths = jnp.asarray(lengths, jnp.int32)
    if counts is None:
        return layout.visible_lengths(lengths, k, rank)
    counts = jnp.clip(jnp.asarray(counts, jnp.int32), 0, k)
    real = jnp.arange(k) < counts[:, None]
    return jnp.where(real, layout.visible_lengths(lengths + k - counts, k, rank), 0)
