"""One layer of a context-parallel prefill, inside shard_map: a rank computes its rows and keeps the whole cache.

    1 project my rows, with my rope positions; index keys first       <- raw index keys travel
    2 compress, update the index and the rings: all new tokens, the same on every rank
    3 score and select for my rows                                    <- K and V travel during 2 and 3
    4 write K and V of all new tokens into the cache
    5 attend with my rows, gate, project; padding rows are 0

What travels when is the schedule's doing (`jaxcp.overlap`). K and V are gathered in one collective, as the cache stores
them (float8 where it is float8), and written in the order in which they arrive. Attention reads the cache in place,
cached prefix and new tokens alike.
"""

import jax
from jaxtyping import Array, Float, Int, Int32, Shaped

from jaxcp import storage, varying
from jaxcp.lse import accumulation_dtype
from jaxcp.qsa import index_keys
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.layer import Products, Projected, output, products
from jaxcp.qsa.operations import operations
from jaxcp.qsa.params import Params
from jaxcp.qsa.peers import Peers
from jaxcp.qsa.rope import table
from jaxcp.qsa.scopes import INDEXER
from jaxcp.qsa.update import count_dropped
from jaxcp.qsa.view import View


def forward(
    params: Params,
    x: Float[Array, "rows hidden"],
    cache: Cache,
    view: View,
    layer: Int[Array, ""],
    *,
    compressed: bool,
    peers: Peers,
    implementation: str,
) -> tuple[Float[Array, "rows hidden"], Cache, Int32[Array, "rows k"]]:
    """y of this rank's rows (0 for padding), the cache after all new tokens, and the selection of this rank's rows."""
    ways = {"compressed": compressed, "peers": peers, "implementation": implementation}
    mixed, cache, blocks = mix(params, products(params, x), cache, view, layer, **ways)
    return output(params, mixed, view.own.rows.real), cache, blocks


def mix(
    params: Params,
    of: Products,
    cache: Cache,
    view: View,
    layer: Int[Array, ""],
    *,
    compressed: bool,
    peers: Peers,
    implementation: str,
) -> tuple[Float[Array, "rows features"], Cache, Int32[Array, "rows k"]]:
    """The layer between its products with weights: this rank's gated rows, the cache, the selection.

    Args:
      of: products of this rank's rows.
      view: of this rank.
      compressed: whether index keys are compressed before they travel; every rank then holds whole blocks only.
      peers: give all ranks' index keys, and K and V.
    """
    config = params.config
    do = operations(implementation, config, cache)
    angles = table(config, view.own_rope, accumulation_dtype(of.k.dtype))
    projected = do.prepare(params, of, angles)
    own = varying.axes(of.q_gate, cache.k)  # what no operand of an operation says, e.g. where all blocks are selected
    cache = count_dropped(cache, view.rows, view.segments)
    pack, write = index_keys.WAYS[compressed]
    sent = pack(params, cache, projected.index_k, view), packed_kv(cache, projected)
    index, (q_gate, index_q), finish = peers.gather(*sent, (of.q_gate, projected.index_q), layer)
    cache = write(params, cache, layer, index, view, do.write_index)
    with jax.named_scope(INDEXER):
        (blocks,) = varying.over(own, do.select(index_q, cache, layer, view.own, config))
    kv, blocks = finish(blocks)
    kv = kv.reshape(-1, *projected.kv.shape[1:])
    cache = do.write_kv(cache, layer, kv, view.gathered.request, view.gathered.position)
    (mixed,) = varying.over(own, do.attended(params, q_gate, angles, blocks, cache, layer, view.own))
    return mixed, cache, blocks


def packed_kv(cache: Cache, projected: Projected) -> Shaped[Array, "rows features"]:
    """K and V of every row side by side, as stored."""
    return storage.encode(projected.kv.reshape(len(projected.kv), -1), cache.kv_dtype)
