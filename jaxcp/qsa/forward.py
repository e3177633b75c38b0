"""One layer over a set of query rows, prefill and decode alike; and the count of what was traced."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxcp.errors import invalid
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.cache import Cache, check_cache
from jaxcp.qsa.layer import Products, output, products
from jaxcp.qsa.operations import operations
from jaxcp.qsa.params import Params, check_params
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.rope import table
from jaxcp.qsa.scopes import INDEXER
from jaxcp.qsa.segments import Rows, Segments, rows_of
from jaxcp.qsa.update import update

_traces: collections.Counter[str] = collections.Counter()


def forward(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    segments: Segments,
    rope: Int[Array, "3 rows"] | None,
    layer: Int[Array, ""],
    *,
    context: int,
    longest: int,
    implementation: str,
) -> tuple[Float[Array, "rows hidden"], Cache, Int32[Array, "rows k"]]:
    """y of every row (0 for padding), the cache after the rows' tokens, and the selection.

    Args:
      rope: rope positions; None: the logical ones.
      context: bound of every request's tokens.
      longest: bound of a segment's rows.
    """
    bounds = {"context": context, "longest": longest}
    mixed, rows, cache, blocks = mix(
        params, products(params, x), cache, segments, rope, layer, **bounds, implementation=implementation
    )
    return output(params, mixed, rows.real), cache, blocks


def mix(
    params: Params,
    of: Products,
    cache: Cache,
    segments: Segments,
    rope: Int[Array, "3 rows"] | None,
    layer: Int[Array, ""],
    *,
    context: int,
    longest: int,
    implementation: str,
) -> tuple[Float[Array, "rows features"], Rows, Cache, Int32[Array, "rows k"]]:
    """The layer between its input products and its output product: gated rows, what they are, cache, selection."""
    config, total = params.config, len(of.k)
    do = operations(implementation, config, cache)
    rows = rows_of(segments, total)
    if rope is None:
        rope = jnp.broadcast_to(jnp.maximum(rows.position, 0), (3, total))
    angles = table(config, rope, accumulation_dtype(of.k.dtype))
    projected = do.prepare(params, of, angles)
    cache, rows = update(params, cache, layer, projected, rope, rows, segments, do.write_index, do.write_kv)
    queries = Queries(segments, rows, min(context, cache.capacity), longest)
    with jax.named_scope(INDEXER):
        blocks = do.select(projected.index_q, cache, layer, queries, config)
    return do.attended(params, of.q_gate, angles, blocks, cache, layer, queries), rows, cache, blocks


def check_arguments(params: Params, x: Array, cache: Cache, rows: int, remedy: str) -> None:
    """Raises unless params, x [rows, hidden] and cache belong together; looks at shapes and dtypes while tracing."""
    check_params(params)
    check_cache(cache, params.config)
    if x.shape != (rows, params.config.hidden):
        raise invalid("x.shape", x.shape, f"{(rows, params.config.hidden)}, [rows, hidden]", remedy)
    for name, dtype in (("x.dtype", x.dtype), ("cache.dtype", cache.dtype)):
        if dtype != params.dtype:
            raise invalid(
                name, dtype, f"{params.dtype}, the dtype of params", "Use one dtype for the layer.", TypeError
            )


def check_layer(layer, cache: Cache) -> None:
    """Raises unless `layer` is an array or a host integer that counts one of the cache's."""
    if not isinstance(layer, Array) and not (isinstance(layer, int | np.integer) and 0 <= layer < cache.layers):
        raise invalid("layer", layer, f"0 <= layer < {cache.layers}", "The cache has that many layers.")


def count_trace(name: str) -> None:
    """Notes that the program `name` is being traced."""
    _traces[name] += 1


def traces() -> dict[str, int]:
    """How often each program was traced in this process, by name: {"prefill": ..., "decode": ...}."""
    return dict(_traces)
