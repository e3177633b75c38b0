"""`jaxcp bench exchange`: the merge kernel on one GPU beside XLA's fusions of the same maths and the copy rate.

What one rank does after an all-to-all is simulated: `sources` partials of its heads, in packed blocks or in separate
arrays, are merged. Results are checked against a float64 merge outside the timed loop.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxcp import lse as lse_lib
from jaxcp.bench import _measure
from jaxcp.bench._measure import DeviceTime, Program
from jaxcp.errors import JaxcpError
from jaxcp.exchange import packing
from jaxcp.layout import positive_int
from jaxcp.lse import LogBase, Partial

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
LARGE = {2: 4096, 4: 2048, 8: 1024}
"""Tokens for which about 150 MB or more are moved (16 heads of 512, 16 bits), by number of sources."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is merged: `sources` partials of [tokens, heads, dim]."""

    sources: int
    tokens: int
    heads: int
    dim: int
    dtype: str
    base: LogBase

    def __post_init__(self):
        for name in ("sources", "tokens", "heads", "dim"):
            positive_int(name, getattr(self, name))

    @property
    def rows(self) -> int:
        """Rows of one source."""
        return self.tokens * self.heads

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through memory: every row and LSE read once, every merged row written once."""
        row = self.dim * jnp.dtype(self.dtype).itemsize
        return self.rows * (self.sources * (row + 4) + row)

    def partials(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Random o [sources, rows, dim] and lse [sources, rows]."""
        keys = jax.random.split(jax.random.key(seed))
        o = jax.random.normal(keys[0], (self.sources, self.rows, self.dim), jnp.float32).astype(self.dtype)
        return o, 4 * jax.random.normal(keys[1], (self.sources, self.rows), jnp.float32)

    def implementations(self) -> dict[str, Program]:
        """Every way to merge, by name."""
        from jaxcp.kernels import lse_merge

        o, lse = self.partials()
        packed = _pack(o, lse)
        facts = {"rows": self.rows, "dim": self.dim, "dtype": self.dtype, "base": self.base}
        merge = lambda o, lse: lse_lib.merge(Partial(o, lse, self.base)).o  # noqa: E731
        fusable = lambda o, lse: _fusable_merge(o, lse, self.base)  # noqa: E731
        return {
            "packed": Program(lambda x: lse_merge.merge_packed(x, **facts)[0], (packed,)),
            "separate": Program(lambda o, lse: lse_merge.merge_separate(o, lse, base=self.base)[0], (o, lse)),
            "xla": Program(merge, (o, lse)),
            "xla_fusable": Program(fusable, (o, lse)),
            "xla_packed": Program(lambda x: fusable(*packing.unpack(x, self.rows, self.dim, o.dtype)), (packed,)),
        }


def _fusable_merge(o: jax.Array, lse: jax.Array, base: LogBase) -> jax.Array:
    """`jaxcp.lse.merge` written so that XLA fuses most: sources unrolled, one division at the end."""
    lses = list(lse_lib.sanitize(lse))
    m = functools.reduce(jnp.maximum, lses)
    m = jnp.where(m == -jnp.inf, 0, m)
    weights = [base.exp(x - m) for x in lses]
    total = sum(lse_lib.select(w, rows) for w, rows in zip(weights, o, strict=True))
    return (total / jnp.maximum(sum(weights), 1)[:, None]).astype(o.dtype)


def run(
    *,
    sources: Iterable[int] = (2, 4, 8),
    tokens: Iterable[int] = TOKENS,
    large: bool = True,
    heads: int = 16,
    dim: int = 512,
    dtype: str = "bfloat16",
    base: LogBase = LogBase.TWO,
    repeat: int = 50,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures the merge for every number of sources and tokens; returns the record that `output` also gets.

    Args:
      sources: ranks simulated.
      tokens: of the merged batch.
      large: also measure a size of about 150 MB or more for each number of sources.
      heads: rows per token that one rank keeps.
      dim: of a row.
      dtype: of the rows.
      base: of the LSEs.
      repeat: runs per measurement; medians are reported.
      output: JSON file to write.
      console: where to print the table; none if None.

    Raises:
      ValueError: a count that is not positive.
      BackendError: no GPU.
      JaxcpError: a result is wrong.
    """
    positive_int("repeat", repeat)
    shapes = [
        Shape(c, t, heads, dim, dtype, base)
        for c in sources
        for t in [*tokens, *([LARGE[c]] if large and c in LARGE else [])]
    ]
    rate, shortest = _measure.copy_rate(), _measure.shortest_kernel_us()
    implementations = [shape.implementations() for shape in shapes]
    times = iter(_measure.device_times([p for programs in implementations for p in programs.values()], repeat=repeat))
    rows = [
        _row(shape, {name: next(times) for name in programs}, rate)
        for shape, programs in zip(shapes, implementations, strict=True)
    ]
    figures = {"benchmark": "lse_merge", "heads": heads, "dim": dim, "dtype": dtype, "base": base.value,
               "copy_rate_tb_s": rate / 1e12, "shortest_kernel_us": shortest, "rows": rows}  # fmt: skip
    recorded = _measure.record(figures)
    if output is not None:
        _measure.write(output, recorded)
    if console is not None:
        console.print(table(recorded))
    return recorded


def _row(shape: Shape, times: dict[str, DeviceTime], rate: float) -> dict[str, Any]:
    """One row of figures, once its results are found right."""
    for name, time in times.items():
        _check(shape, name, time.result)
    packed, floor = times["packed"].us, shape.bytes_moved / rate * 1e6
    best_xla = min((times[name] for name in ("xla", "xla_fusable", "xla_packed")), key=lambda time: time.us)
    return {
        "sources": shape.sources, "tokens": shape.tokens, "bytes": shape.bytes_moved, "floor_us": round(floor, 3),
        **{f"{name}_us": round(time.us, 3) for name, time in times.items()},
        "xla_best_us": round(best_xla.us, 3), "xla_best_kernels": best_xla.launches,
        "of_copy_rate": round(floor / packed, 4), "ratio_to_xla": round(packed / best_xla.us, 4),
        "packed_to_separate": round(packed / times["separate"].us, 4),
        "kernels": {name: _kernels(time) for name, time in times.items()},
    }  # fmt: skip


def _kernels(time: DeviceTime) -> list[str]:
    return [f"{count:g} x {name}: {us:.3f} us" for name, count, us in time.kernels]


@jax.jit
def _pack(o: jax.Array, lse: jax.Array) -> jax.Array:
    """The blocks in which the partials of all sources arrive, [sources, words]."""
    return jax.vmap(lambda o, lse: packing.pack(o[:, None], lse[:, None], 1)[0])(o, lse)


def _check(shape: Shape, name: str, merged: jax.Array, sample: int = 256) -> None:
    """First and last rows against a merge in float64: two units of the dtype at the largest value."""
    o, lse = shape.partials()
    rows = np.unique(np.r_[: min(sample, shape.rows), max(0, shape.rows - sample) : shape.rows])
    with jax.enable_x64(True):
        exact_o, exact_lse = (jnp.asarray(np.asarray(x[:, rows], np.float64)) for x in (o, lse))
        want = np.asarray(lse_lib.merge(Partial(exact_o, exact_lse, shape.base)).o)
    error = np.abs(np.asarray(merged.reshape(shape.rows, shape.dim)[rows], np.float64) - want).max()
    bound = 2 * float(jnp.finfo(shape.dtype).eps) * np.abs(want).max()
    if not error <= bound:
        raise JaxcpError(f"bench exchange: {name} is wrong for {shape}: error {error:.3g}; expected <= {bound:.3g}.")


def table(recorded: dict[str, Any]) -> Table:
    """The record as a table for people."""
    environment = recorded["environment"]
    out = Table(
        title=f"lse_merge on {environment['device_kind']}, jax {environment['versions']['jax']}, "
        f"copy rate {recorded['copy_rate_tb_s']:.2f} TB/s, "
        f"shortest kernel {recorded['shortest_kernel_us']:.2f} us"
    )
    for heading in (
        "sources",
        "tokens",
        "MB",
        "packed us",
        "separate us",
        "best XLA us",
        "its kernels",
        "XLA packed us",
        "packed / XLA",
        "of copy rate",
    ):
        out.add_column(heading, justify="right")
    for row in recorded["rows"]:
        out.add_row(
            str(row["sources"]),
            str(row["tokens"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['packed_us']:.2f}",
            f"{row['separate_us']:.2f}",
            f"{row['xla_best_us']:.2f}",
            f"{row['xla_best_kernels']:g}",
            f"{row['xla_packed_us']:.2f}",
            f"{row['ratio_to_xla']:.2f}",
            f"{row['of_copy_rate']:.0%}",
        )
    return out
