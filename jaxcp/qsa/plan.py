"""What a prefill is about to do: per-forward metadata from host lengths.

One int32 array [4, segments] goes to the device per forward, and three static bucket sizes decide which compiled
program serves it. Lengths within the same buckets never retrace: rows and context grow in steps of a quarter octave
(at most 25 % padding), segments in powers of two. `jaxcp.qsa.traces()` counts what was traced.
"""

import dataclasses
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout import INT32_MAX, Ints, positive_int
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.segments import Segments


def bucket(n: int, least: int) -> int:
    """Smallest bucket >= n: `least`, or 4, 5, 6 or 7 times a power of two."""
    if n <= least:
        return least
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return -(-n // step) * step


@bind(jax.tree_util.register_dataclass, data_fields=["table", "rope_positions"], meta_fields=["rows", "context"])
@dataclasses.dataclass(frozen=True)
class Plan:
    """One forward's metadata; made by `plan`.

    Attributes:
      table: int32 [4, segments], the rows of `Segments`.
      rope_positions: int32 [3, rows], or None where they equal the logical positions (text).
      rows: static; query rows of the program, tokens and padding.
      context: static; bound of every request's total length, in tokens.
    """

    table: Any
    rope_positions: Any
    rows: int
    context: int

    @property
    def segments(self) -> Segments:
        """The table by name."""
        return Segments(*self.table)

    def pad(self, x: Any) -> jax.Array:
        """Packed tokens [tokens, ...] with zero rows appended up to `rows`."""
        if len(x) > self.rows:
            raise invalid(
                "x", f"{len(x)} rows", f"at most {self.rows}, the rows of this plan", "Plan for these tokens."
            )
        return jnp.pad(jnp.asarray(x), [(0, self.rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def plan(
    lengths: Ints,
    prefix_lengths: Ints | None = None,
    *,
    requests: Ints | None = None,
    rope_positions: Any = None,
    cache: Cache | None = None,
    min_rows: int = 16,
    min_context: int = 256,
) -> Plan:
    """Metadata of one prefill over a packed batch: new tokens of the requests, one request after another.

    Args:
      lengths: new tokens of each request, >= 0.
      prefix_lengths: tokens of each request that the cache holds already, any number; 0 if None.
      requests: row of each request in the cache; 0, 1, ... if None.
      rope_positions: [3, tokens] host integers (temporal, height, width), packed like the tokens; None for text. The
        temporal position never decreases inside a request.
      cache: the cache to be written; its capacity is then checked here. Without it, rows that do not fit are dropped on
        the device and `qsa.check` raises.
      min_rows, min_context: least bucket of rows and of tokens per request. A server with chunks of at most n tokens
        compiles one program if it passes min_rows=n and min_context=cache.capacity.

    Raises:
      TypeError: not integers.
      ValueError: arguments of different lengths, negative or beyond the cache, a request named twice, positions that
        decrease.
    """
    lengths = _integers("lengths", lengths)
    if not lengths.size:
        raise invalid("lengths", "no request", "at least one", "A forward needs a request; its length may be 0.")
    prefix = _like(lengths, "prefix_lengths", prefix_lengths, np.zeros_like(lengths))
    requests = _like(lengths, "requests", requests, np.arange(lengths.size))
    _check_requests(requests)
    totals, tokens = lengths + prefix, int(lengths.sum())
    for name, value in (("lengths", tokens), ("lengths + prefix_lengths", int(totals.max()))):
        if value > INT32_MAX:
            raise invalid(name, value, f"at most {INT32_MAX} tokens", "Split the batch.")
    if cache is not None:
        check_capacity(cache, totals, requests)
    rows = bucket(tokens, positive_int("min_rows", min_rows))
    segments = 1 << (lengths.size - 1).bit_length()
    table = np.zeros((4, segments), np.int32)
    table[0] = tokens  # unused segments start after the last token
    table[:, : lengths.size] = np.cumsum(lengths) - lengths, lengths, prefix, requests
    if rope_positions is not None:
        rope_positions = jax.device_put(_checked_positions(rope_positions, lengths, rows))
    return Plan(
        jax.device_put(table), rope_positions, rows, bucket(int(totals.max()), positive_int("min_context", min_context))
    )


def check_capacity(cache: Cache, totals: np.ndarray, requests: np.ndarray) -> None:
    """Raises if a request has no row in the cache, or more tokens than a row's pages hold."""
    if requests.max() >= cache.requests:
        raise invalid(
            "requests",
            requests.max(),
            f"rows below {cache.requests}, those of the cache",
            "Make the cache with more requests, or reuse the row of a finished one.",
        )
    if totals.max() > cache.capacity:
        raise invalid(
            "lengths + prefix_lengths",
            totals.max(),
            f"at most {cache.capacity} tokens, the cache's capacity",
            "Give the cache more pages per request, or shorten the request.",
        )


def _check_requests(requests: np.ndarray) -> None:
    unique, times = np.unique(requests, return_counts=True)
    if times.max() > 1:
        raise invalid(
            "requests", f"{unique[times.argmax()]} twice", "every request once", "Join its new tokens into one entry."
        )


def _integers(name: str, values: Any) -> np.ndarray:
    """`values` as int64 [n], each in [0, 2^31)."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise invalid(
            name,
            f"dtype {array.dtype}, shape {array.shape}",
            "a flat sequence of integers",
            "Lengths are host integers, one per request.",
            TypeError,
        )
    outside = (array < 0) | (array > INT32_MAX)
    if outside.any():
        raise invalid(name, array[outside][0], f"0 <= {name} <= {INT32_MAX}", "Lengths and rows are counts.")
    return array.astype(np.int64)


def _like(lengths: np.ndarray, name: str, values: Any, default: np.ndarray) -> np.ndarray:
    array = default if values is None else _integers(name, values)
    if array.shape != lengths.shape:
        raise invalid(
            name, f"{array.size} entries", f"{lengths.size}, one per request", "Give one entry for each of `lengths`."
        )
    return array


def _checked_positions(positions: Any, lengths: np.ndarray, rows: int) -> np.ndarray:
    """int32 [3, rows], zero padded."""
    array = np.asarray(positions)
    tokens = int(lengths.sum())
    if array.shape != (3, tokens) or array.dtype.kind not in "iu":
        raise invalid(
            "rope_positions",
            f"{array.dtype} {array.shape}",
            f"integers (3, {tokens})",
            "Give (temporal, height, width) of every new token, packed.",
        )
    if array.size and (array.min() < 0 or array.max() > INT32_MAX):
        raise invalid(
            "rope_positions", f"{array.min()} … {array.max()}", "0 … 2^31 - 1", "Rope positions are int32 counts."
        )
    request = np.repeat(np.arange(lengths.size), lengths)
    falls = (np.diff(array[0].astype(np.int64)) < 0) & (np.diff(request) == 0)
    if falls.any():
        at = int(falls.argmax())
        raise invalid(
            "rope_positions[0]",
            f"{array[0, at]} then {array[0, at + 1]} at token {at + 1}",
            "temporal positions that never decrease inside a request",
            "Are the tokens packed in order?",
        )
    return np.pad(array.astype(np.int32), [(0, 0), (0, rows - tokens)])
