"""One layer of a context-parallel prefill, inside shard_map: a rank computes its rows and keeps the whole cache.

    1 project my rows, with my rope positions
    2 gather index keys (inline); K and V start travelling behind them
    3 compress, update the index and the rings: all new tokens, the same on every rank
    4 score and select for my rows                                    <- K and V travel until here
    5 write K and V of all new tokens into the cache
    6 attend with my rows, gate, project; padding rows are 0

K and V are needed by step 5 alone, and that they travel meanwhile is the schedule's doing (`jaxcp.overlap`). They are
gathered in one collective, as the cache stores them (float8 where it is float8), and written in the order in which they
arrive. Attention reads the cache in place, cached prefix and new tokens alike.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Shaped

from jaxcp import storage
from jaxcp.lse import accumulation_dtype
from jaxcp.overlap import SCHEDULES
from jaxcp.qsa import index_keys
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.forward import resolve
from jaxcp.qsa.layer import Products, Projected, gated, output, prepare, products
from jaxcp.qsa.params import Params
from jaxcp.qsa.plan import Plan
from jaxcp.qsa.rope import table
from jaxcp.qsa.segments import Rows
from jaxcp.qsa.selection import SELECT
from jaxcp.qsa.sparse import ATTEND
from jaxcp.qsa.update import count_dropped, with_room, write_kv
from jaxcp.qsa.view import view_of


def forward(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    plan: Plan,
    layer: Int[Array, ""],
    *,
    axis_name: str,
    schedule: str,
    implementation: str,
) -> tuple[Float[Array, "rows hidden"], Cache, Int32[Array, "rows k"]]:
    """y of this rank's rows (0 for padding), the cache after all new tokens, and the selection of this rank's rows."""
    ways = {"axis_name": axis_name, "schedule": schedule, "implementation": implementation}
    mixed, rows, cache, blocks = mix(params, products(params, x), cache, plan, layer, **ways)
    return output(params, mixed, rows.real), cache, blocks


def mix(
    params: Params,
    of: Products,
    cache: Cache,
    plan: Plan,
    layer: Int[Array, ""],
    *,
    axis_name: str,
    schedule: str,
    implementation: str,
) -> tuple[Float[Array, "rows features"], Rows, Cache, Int32[Array, "rows k"]]:
    """The layer between its products with weights: this rank's gated rows, what they are, cache, selection."""
    config, view = params.config, view_of(plan, lax.axis_index(axis_name), cache.capacity)
    projected = prepare(params, of, table(config, view.own_rope, accumulation_dtype(of.k.dtype)))
    cache = count_dropped(cache, with_room(cache, view.rows), view.segments)
    queries = view.own._replace(rows=with_room(cache, view.own.rows))
    pack, write = index_keys.WAYS[plan.index_block > 1]
    sent = pack(params, cache, projected.index_k, view)
    index, finish = SCHEDULES[schedule](sent, packed_kv(cache, projected), axis_name)
    cache = write(params, cache, layer, index, view)
    blocks = resolve("selection", SELECT, implementation)(projected.index_q, cache, layer, queries, config)
    k, v = unpacked_kv(finish(blocks), projected)
    cache = write_kv(cache, layer, k, v, view.gathered.request, view.gathered.position)
    attended = resolve("sparse attention", ATTEND, implementation)(projected.q, blocks, cache, layer, queries, config)
    return gated(attended.o, projected.gate), queries.rows, cache, blocks


def packed_kv(cache: Cache, projected: Projected) -> Shaped[Array, "rows features"]:
    """K and V of every row side by side, as stored."""
    k, v = (x.reshape(len(x), -1) for x in (projected.k, projected.v))
    return storage.encode(jnp.concatenate([k, v], 1), cache.kv_dtype)


def unpacked_kv(kv: Shaped[Array, "rows features"], projected: Projected):
    """K and V [rows, kv_heads, head_dim] from `packed_kv`'s rows."""
    heads = projected.k.shape[1:]
    return (half.reshape(-1, *heads) for half in jnp.split(kv, 2, axis=1))
