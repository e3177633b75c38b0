"""What the tables of QSA cases share: rows of several requests, caches in shuffled pages, and who serves a case.

A table's test file only names implementations:

    @pytest.mark.parametrize("case", attention.CASES, ids=str)
    def test_matches_oracle(case):
        problem = case.problem("bfloat16")
        attention.check(problem, attention.run(ATTEND["xla"], problem))
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import qsa
from jaxcp.qsa import resolve
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import Segments, rows_of

LAYERS = 2
"""Layers of every cache, with different contents; the layer is traced."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """The query rows of a forward: segments of requests, padding after each one and at the end.

    Attributes:
      name: in a case's.
      lengths, prefixes: tokens of each segment, and of its request before them.
      longest: bound of the lengths.
      rows: of the forward.
      gap: padding rows after each segment.
    """

    name: str
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    longest: int
    rows: int
    gap: int = 0

    @property
    def segments(self) -> Segments:
        """As device code takes them; the last segment is of the cache's first request."""
        lengths = np.int32(self.lengths)
        first = np.cumsum(lengths + self.gap) - lengths - self.gap
        requests = np.arange(len(lengths))[::-1]
        return Segments(*(np.asarray(a, np.int32) for a in (first, lengths, self.prefixes, requests)))

    @functools.cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """(row, request, position) of every row that is no padding."""
        return [
            (first + i, request, prefix + i)
            for first, count, prefix, request in np.stack(self.segments, 1).tolist()
            for i in range(count)
        ]

    def page_table(self, page_size: int) -> np.ndarray:
        """int32 [requests, pages]: distinct pages in random order, with room for `longest` tokens; 0 behind them."""
        needed = -(-(np.int32(self.prefixes[::-1]) + self.longest) // page_size)
        exists = np.arange(needed.max()) < needed[:, None]
        table = np.zeros(exists.shape, np.int32)
        table[exists] = 1 + np.random.default_rng(needed.sum()).permutation(needed.sum())
        return table


def cache(config: qsa.QSAConfig, requests: Requests, page_size: int, dtype: str, **options) -> qsa.Cache:
    """An empty cache on the host, the requests' pages dealt out."""
    table = requests.page_table(page_size)
    sizes = {"requests": len(table), "pages": 1 + int(table.max()), "layers": LAYERS, "page_size": page_size}
    empty = jax.eval_shape(lambda: qsa.init_cache(config, dtype=dtype, **sizes, **options))
    return dataclasses.replace(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), empty), page_table=table)


def cache_of(config: qsa.QSAConfig, **options) -> qsa.Cache:
    """A cache of one request, as shapes; bfloat16 unless `options` of `qsa.init_cache` say otherwise."""
    shape = lambda: qsa.init_cache(config, requests=1, pages=9, **({"dtype": "bfloat16"} | options))  # noqa: E731
    return jax.eval_shape(shape)


def serve_or_skip(implementation: resolve.Implementation, config: qsa.QSAConfig, cache: qsa.Cache) -> Callable:
    """The implementation's function; the test is skipped, in the blocker's words, if it cannot serve."""
    if why := implementation.blocker(config, cache, resolve.platform()):
        pytest.skip(why)
    return implementation.run


def every_layer(call: Callable, run: Callable, config: qsa.QSAConfig, requests: Requests, cache: qsa.Cache, *inputs):
    """call(run, *inputs, cache, layer, queries, config) of each layer, by one program; stacked on axis 0."""
    static = {"call": call, "run": run, "config": config, **_bounds(requests, cache)}
    inputs, cache = jax.device_put((inputs, cache))
    results = [_one(np.int32(layer), inputs, cache, requests.segments, **static) for layer in range(LAYERS)]
    return jax.tree.map(lambda *of_layers: np.stack(of_layers), *results)


def scanned(call: Callable, run: Callable, config: qsa.QSAConfig, requests: Requests, cache: qsa.Cache, *inputs):
    """As `every_layer`, by a scan over the layers; a function without arguments, to be called again and again."""
    static = {"call": call, "run": run, "config": config, **_bounds(requests, cache)}
    arguments = jax.device_put((inputs, cache, requests.segments))

    @jax.jit
    def program(arguments):
        step = lambda carry, layer: (carry, _one(layer, *arguments, **static))  # noqa: E731
        return jax.lax.scan(step, (), jnp.arange(LAYERS, dtype=jnp.int32))[1]

    return lambda: jax.tree.map(np.asarray, program(arguments))


def _bounds(requests: Requests, cache: qsa.Cache) -> dict:
    return {"rows": requests.rows, "context": cache.capacity, "longest": requests.longest}


@functools.partial(jax.jit, static_argnames=("call", "run", "config", "rows", "context", "longest"))
def _one(layer, inputs, cache, segments, *, call, run, config, rows, context, longest):
    """Bounds are static and what they bound is not, so that cases of one shape share a program."""
    queries = Queries(segments, rows_of(segments, rows), context, longest)
    return call(run, *inputs, cache, layer, queries, config)


def accumulation(dtype) -> np.dtype:
    """The dtype that sums are made in."""
    return np.dtype(np.float64 if jnp.dtype(dtype) == np.float64 else np.float32)
