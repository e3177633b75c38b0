"""What a prefill is about to do: per-forward metadata from host lengths.

One int32 array [4, segments] goes to the device per forward, and three static bucket sizes decide which compiled
program serves it. Lengths within the same buckets never retrace: rows and context grow in steps of a quarter octave
(at most 25 % padding), segments in powers of two. `jaxcp.qsa.traces()` counts what was traced.

Under context parallelism the same array is all there is: which rows a rank holds, where a token's row lies among the
gathered ones and every other map is made from it on the device (`jaxcp.layout`, `jaxcp.qsa.view`).
"""

import dataclasses
from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcp.errors import invalid
from jaxcp.layout import Ints, PackedInterleave, Split, Zigzag, positive_int
from jaxcp.qsa.balance import Cost, cuts
from jaxcp.qsa.batch import Batch, check_blocks, check_capacity, checked_batch, checked_positions
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.segments import Segments

LAYOUTS = {"zigzag": Zigzag, "interleave": PackedInterleave}
"""Layouts of context-parallel prefill by name."""


def bucket(n: int, least: int) -> int:
    """Smallest bucket >= n: `least`, or 4, 5, 6 or 7 times a power of two."""
    if n <= least:
        return least
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return -(-n // step) * step


_ARRAYS = ("table", "rope_positions", "starts")
_STATIC = ("rows", "context", "layout", "index_block", "fits", "balance")


@bind(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True)
class Plan:
    """One forward's metadata; made by `plan`.

    Attributes:
      table: int32 [4, segments], the rows of `Segments`: new tokens in packed order, a segment per request.
      rope_positions: int32 [3, rows] in packed order, or None where they equal the logical positions (text).
      starts: int32 [segments, 2 cp + 1], where each request is cut if not evenly; None otherwise.
      rows: static; query rows of the program over all ranks, tokens and padding.
      context: static; bound of every request's total length, in tokens.
      layout: static; which rank holds which rows, None on one device.
      index_block: static; tokens per index key that ranks send each other: 1 (raw keys) or the ratio (compressed ones).
      fits: static; (requests, capacity) of the cache the lengths were checked against, or None.
      balance: static; cost by which requests are cut, or None: evenly.
    """

    table: Any
    rope_positions: Any
    starts: Any
    rows: int
    context: int
    layout: Zigzag | PackedInterleave | None = None
    index_block: int = 1
    fits: tuple[int, int] | None = None
    balance: Cost | None = None

    @property
    def segments(self) -> Segments:
        """The table by name."""
        return Segments(*self.table)

    @property
    def cp(self) -> int:
        """Ranks that share the rows."""
        return 1 if self.layout is None else self.layout.cp

    @property
    def local_rows(self) -> int:
        """Rows of one rank's arrays, padding included."""
        return self.rows // self.cp

    def split(self) -> Split:
        """The batch dealt out to the ranks; traceable."""
        if self.layout is None:
            raise invalid(
                "plan.layout", None, "a layout", "Plan with cp > 1; one device holds all rows in packed order."
            )
        return _split(self.layout, self.table[1], self.starts)

    def replan(
        self,
        lengths: Ints,
        prefix_lengths: Ints | None = None,
        *,
        requests: Ints | None = None,
        rope_positions: Any = None,
    ) -> "Plan":
        """The plan of another batch for the program that serves this one: same options, buckets and cache.

        Arguments and errors are those of `plan`.

        Raises:
          ValueError: also for a batch beyond a bucket, and for rope positions where this plan has none or the reverse.
        """
        batch = checked_batch(lengths, prefix_lengths, requests)
        if (rope_positions is None) != (self.rope_positions is None):
            got = "None" if rope_positions is None else "positions"
            raise invalid("rope_positions", got, "the like of this plan's", "Text and images are two programs.")
        place = self.table.sharding if isinstance(self.table.sharding, NamedSharding) else None
        buckets = _Buckets(self.rows, self.context, self.table.shape[-1])
        made = _assemble(batch, rope_positions, self, buckets, place)
        for name, needed, bound in (
            ("lengths", made.rows, self.rows),
            ("lengths + prefix_lengths", made.context, self.context),
            ("lengths", made.table.shape[-1], self.table.shape[-1]),
        ):
            if needed > bound:
                raise invalid(name, f"a bucket of {needed}", f"{bound}, this plan's", "Split the batch, or plan anew.")
        return made

    def pad(self, x: Any) -> jax.Array:
        """Packed tokens [tokens, ...] with zero rows appended up to `rows`."""
        if len(x) > self.rows:
            raise invalid(
                "x", f"{len(x)} rows", f"at most {self.rows}, the rows of this plan", "Plan for these tokens."
            )
        return jnp.pad(jnp.asarray(x), [(0, self.rows - len(x))] + [(0, 0)] * (x.ndim - 1))

    def shard(self, x: Any) -> jax.Array:
        """Packed tokens [tokens, ...] as all ranks' rows, one rank after another: [rows, ...], to be sharded on axis 0.

        Padding rows are 0. On one device it is `pad`.
        """
        x = self.pad(x)
        return x if self.layout is None else _shard(self, x)

    def unshard(self, y: Any) -> jax.Array:
        """All ranks' rows [rows, ...] in packed order; rows behind the last token mean nothing."""
        if len(y) != self.rows:
            raise invalid("y", f"{len(y)} rows", f"{self.rows}, the rows of this plan", "Give all ranks' rows.")
        return y if self.layout is None else _unshard(self, y)


@jax.jit
def _shard(plan: Plan, x: Any):
    split = plan.split()
    token = jax.vmap(lambda rank: split.tokens(rank, plan.local_rows))(jnp.arange(plan.cp)).reshape(-1)
    real = (token >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real, x.at[token].get(mode="clip"), 0)


@jax.jit
def _unshard(plan: Plan, y: Any):
    return y.at[plan.split().gathered(jnp.arange(plan.rows), plan.local_rows)].get(mode="clip")


def plan(
    lengths: Ints,
    prefix_lengths: Ints | None = None,
    *,
    requests: Ints | None = None,
    rope_positions: Any = None,
    cache: Cache | None = None,
    cp: int = 1,
    layout: str = "zigzag",
    index_keys: str = "raw",
    balance: Cost | None = None,
    mesh: Mesh | None = None,
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
      cp: ranks of the context-parallel axis; 1 is the plain program.
      layout: which rank holds which rows: "zigzag" or "interleave" (see `jaxcp.layout`).
      index_keys: what ranks gather of their index keys: "raw", or "compressed", a `ratio`-th of the bytes. That needs
        the zigzag layout, the cache, and requests whose 2 cp blocks and prefixes are all multiples of the ratio.
      balance: cuts requests so that ranks' rows cost the same (`qsa.Cost`), equally many as before; zigzag layout only.
      mesh: on whose devices the arrays are put; a call over a mesh would otherwise copy them there every time.
      min_rows, min_context: least bucket of rows (of all ranks) and of tokens per request. A server with chunks of at
        most n tokens compiles one program if it passes min_rows=n (plus 2 cp per request where cp > 1) and
        min_context=cache.capacity; `Plan.replan` holds it to that.

    Raises:
      TypeError: not integers.
      ValueError: arguments of different lengths, negative or beyond the cache, a request named twice,
        positions that decrease, a layout that is not there, boundaries that do not allow compressed index keys.
    """
    batch = checked_batch(lengths, prefix_lengths, requests)
    dealt = None if positive_int("cp", cp) == 1 else _layout(layout, cp)
    if index_keys not in ("raw", "compressed"):
        raise invalid("index_keys", repr(index_keys), "'raw' or 'compressed'", "It chooses what ranks gather.")
    block = 1 if index_keys == "raw" else _ratio(dealt, cache)
    if balance is not None and not isinstance(dealt, Zigzag):
        raise invalid("balance", f"a cost with layout {dealt}", "the zigzag layout over cp > 1 ranks", "Leave it out.")
    fits = None if cache is None else (cache.requests, cache.capacity)
    least = _Buckets(positive_int("min_rows", min_rows), positive_int("min_context", min_context), 1)
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    options = Plan(None, None, None, 0, 0, dealt, block, fits, balance)
    return _assemble(batch, rope_positions, options, least, place)


class _Buckets(NamedTuple):
    """Static sizes of a program, or the least of them."""

    rows: int
    context: int
    segments: int


def _assemble(batch: Batch, rope_positions: Any, options: Plan, least: _Buckets, place: Any) -> Plan:
    """The plan of a batch with the static options of another; `place` is the sharding of its arrays."""
    layout, block = options.layout, options.index_block
    if options.fits is not None:
        check_capacity(*options.fits, batch)
    starts, rows = None, bucket(int(batch.lengths.sum()), least.rows)
    segments = max(1 << (len(batch.lengths) - 1).bit_length(), least.segments)
    if layout is not None:
        if options.balance is not None:
            starts = cuts(options.balance, batch.lengths, batch.prefix, layout.cp, block)
        split = _split(layout, batch.lengths, starts)
        check_blocks(batch, block, 2 * layout.cp if starts is None else 1)
        needed = -(-int(split.counts().max()) // block)
        rows = layout.cp * block * bucket(needed, -(-least.rows // (layout.cp * block)))
    if starts is not None:
        starts = jax.device_put(np.pad(starts.astype(np.int32), [(0, segments - len(starts)), (0, 0)]), place)
    if rope_positions is not None:
        rope_positions = jax.device_put(checked_positions(rope_positions, batch.lengths, rows), place)
    return dataclasses.replace(
        options,
        table=jax.device_put(batch.table(segments), place),
        rope_positions=rope_positions,
        starts=starts,
        rows=rows,
        context=bucket(int(batch.totals.max()), least.context),
    )


def _split(layout: Zigzag | PackedInterleave, lengths: Any, starts: Any) -> Split:
    return layout.split(lengths, starts) if isinstance(layout, Zigzag) else layout.split(lengths)


def _layout(name: str, cp: int) -> Zigzag | PackedInterleave:
    if name not in LAYOUTS:
        raise invalid("layout", repr(name), f"one of {sorted(LAYOUTS)}", "Layouts of decode do not serve prefill.")
    return LAYOUTS[name](cp)


def _ratio(layout: Any, cache: Cache | None) -> int:
    """The cache's ratio, if ranks can hold whole blocks of the indexer."""
    if not isinstance(layout, Zigzag) or cache is None:
        got = "no cache" if cache is None else "cp = 1" if layout is None else "the interleaved layout"
        raise invalid(
            "index_keys",
            f"'compressed' with {got}",
            "the zigzag layout over cp > 1 ranks, and cache=",
            "Ranks compress whole blocks of their own; gather raw keys otherwise.",
        )
    return cache.page_size // cache.blocks_per_page
