"""The host integers that describe a packed batch, checked."""

from typing import Any, NamedTuple

import numpy as np

from jaxcp.errors import invalid
from jaxcp.layout import INT32_MAX


class Batch(NamedTuple):
    """Checked host integers, int64 [requests] each."""

    lengths: np.ndarray
    prefix: np.ndarray
    requests: np.ndarray

    @property
    def totals(self) -> np.ndarray:
        return self.lengths + self.prefix

    def table(self, segments: int) -> np.ndarray:
        """The rows of `Segments`; unused segments start after the last token."""
        table = np.zeros((4, segments), np.int32)
        table[0] = self.lengths.sum()
        table[:, : len(self.lengths)] = np.cumsum(self.lengths) - self.lengths, *self
        return table


def checked_batch(lengths: Any, prefix: Any, requests: Any) -> Batch:
    lengths = _integers("lengths", lengths)
    if not lengths.size:
        raise invalid("lengths", "no request", "at least one", "A forward needs a request; its length may be 0.")
    prefix = _like(lengths, "prefix_lengths", prefix, np.zeros_like(lengths))
    requests = _like(lengths, "requests", requests, np.arange(lengths.size))
    _check_requests(requests)
    batch = Batch(lengths, prefix, requests)
    for name, value in (("lengths", lengths.sum()), ("lengths + prefix_lengths", batch.totals.max())):
        if value > INT32_MAX:
            raise invalid(name, value, f"at most {INT32_MAX} tokens", "Split the batch.")
    return batch


def check_capacity(requests: int, capacity: int, batch: Batch) -> None:
    """Raises if a request has no row in a cache of so many requests, or more tokens than a row's pages hold."""
    if batch.requests.max() >= requests:
        raise invalid(
            "requests",
            batch.requests.max(),
            f"rows below {requests}, those of the cache",
            "Make the cache with more requests, or reuse the row of a finished one.",
        )
    if batch.totals.max() > capacity:
        raise invalid(
            "lengths + prefix_lengths",
            batch.totals.max(),
            f"at most {capacity} tokens, the cache's capacity",
            "Give the cache more pages per request, or shorten the request.",
        )


def check_blocks(batch: Batch, block: int, parts: int) -> None:
    """Raises unless a request's prefix and each of its `parts` equal parts are multiples of `block` tokens."""
    for name, value, unit in (("lengths", batch.lengths, parts * block), ("prefix_lengths", batch.prefix, block)):
        if block > 1 and (value % unit).any():
            raise invalid(
                name,
                value[value % unit > 0][0],
                f"multiples of {unit} for index_keys='compressed'",
                "A block of the indexer would be cut between ranks; gather raw keys instead.",
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


def checked_positions(positions: Any, lengths: np.ndarray, rows: int) -> np.ndarray:
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
