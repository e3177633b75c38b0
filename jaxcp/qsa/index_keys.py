"""What ranks gather of their index keys, and how the index is written from it: raw keys, or compressed ones.

Raw keys suit any boundaries: blocks of the indexer are put together after the gather, on every rank. Where every rank
holds whole blocks only (the plan checks it), they are compressed before, and a `ratio`-th of the bytes travels; the raw
keys that the requests' rings keep, a few per request, travel in the same collective.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcp.lse import accumulation_dtype
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.indexing import quotient, remainder, take
from jaxcp.qsa.layer import compress
from jaxcp.qsa.params import Params
from jaxcp.qsa.rope import table
from jaxcp.qsa.update import finished_blocks, put_blocks, put_ring, ring_slots
from jaxcp.qsa.view import View


def pack_raw(params: Params, cache: Cache, index_k: Float[Array, "local index_dim"], view: View):
    """What this rank sends: its rows' keys."""
    return index_k


def write_raw(
    params: Params, cache: Cache, layer, gathered: Float[Array, "rows index_dim"], view: View, write_index: Callable
) -> Cache:
    """The cache with the index of all new tokens, from all ranks' raw keys."""
    return write_index(params, cache, layer, take(gathered, view.place), view.rope, view.segments)


def pack_compressed(params: Params, cache: Cache, index_k: Float[Array, "local index_dim"], view: View):
    """What this rank sends: its blocks' compressed keys, then a raw key per ring slot, of which some are its own."""
    ratio, local = params.config.ratio, len(index_k)
    angles = table(params.config, view.own_rope[:, ::ratio], accumulation_dtype(index_k.dtype))
    keys = compress(params, index_k.reshape(-1, ratio, index_k.shape[1]), angles)
    place = take(view.place, ring_slots(cache, view.segments).row.reshape(-1))
    return jnp.concatenate([keys, take(index_k, remainder(place, local))])


def write_compressed(
    params: Params, cache: Cache, layer, gathered: Float[Array, "items index_dim"], view: View, write_index: Callable
) -> Cache:
    """The cache with the index of all new tokens, from all ranks' compressed keys; none is left to compress."""
    ratio, local = params.config.ratio, len(view.own.rows.position)
    slots = ring_slots(cache, view.segments)
    blocks = finished_blocks(ratio, cache, view.segments, len(view.rows.position))
    sent = local // ratio + slots.row.size
    place = take(view.place, blocks.row[:, 0])
    keys = take(gathered, quotient(place, local) * sent + quotient(remainder(place, local), ratio))
    cache = put_blocks(cache, layer, keys, blocks, view.segments)
    owner = quotient(take(view.place, slots.row), local)
    slot = jnp.arange(slots.row.size, dtype=jnp.int32).reshape(slots.row.shape)
    return put_ring(cache, layer, take(gathered, owner * sent + local // ratio + slot), slots, view.rope)


WAYS = {False: (pack_raw, write_raw), True: (pack_compressed, write_compressed)}
"""(pack, write), by whether keys are compressed before they travel."""
