"""`jaxcp bench exchange --cp N`: the exchange between the ranks of a mesh, every usable backend on the same work.

A program of `LAYERS` exchanges, each after the one before, is what a decode step holds. Two clocks, both named:
*kernel*, the profiler's durations of all kernels of a layer (each kernel's median over its launches, of the slowest
rank), which include waiting for peers; and *cadence*, the wall time that a layer adds to a program, so dispatch cancels
out. *Eager* is a program of one exchange, called again and again: what a step of one layer would pay. On CPU there are
no kernel times, and the host twin says nothing about a GPU.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from jaxcp import lse as lse_lib
from jaxcp.bench import _measure
from jaxcp.errors import JaxcpError
from jaxcp.exchange import agree
from jaxcp.exchange.api import Exchange
from jaxcp.exchange.resolve import explain
from jaxcp.layout import positive_int
from jaxcp.lse import LogBase, Partial
from jaxcp.topology import make_mesh

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024)
BACKENDS = ("fused", "flashinfer", "a2a", "ag_rs")
LAYERS, FEWER_LAYERS = 60, 20
COPY_BYTES = 256 << 20

Step = Callable[[Any, Any], Any]
"""o and lse of all ranks -> the last exchange's merged rows of all ranks."""


def run(
    cp: int,
    *,
    tokens: Iterable[int] = TOKENS,
    heads_per_rank: int = 16,
    dim: int = 512,
    dtype: str = "bfloat16",
    repeat: int = 21,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Measures every usable backend for every number of tokens; returns the record.

    Collective over the processes of the job; each measures its own ranks, and all get the same record.

    Args:
      cp: ranks, on the first `cp` devices.
      tokens: of the batch.
      heads_per_rank: rows per token that a rank keeps; cp times as many heads are exchanged.
      dim: of a row.
      dtype: of the rows.
      repeat: timed runs of a program; medians are reported.
      output: JSON file that gets the record so far after each number of tokens (process 0).
      console: where to print the table; none if None.
      progress: where to say what has been measured, and what cannot be; none if None.

    Raises:
      ValueError: a count that is not positive, or cp exceeds the devices.
      JaxcpError: a result is wrong.
    """
    mesh, tokens = make_mesh(positive_int("cp", cp)), [positive_int("tokens", t) for t in tokens]
    facts: dict[str, Any] = {
        "heads": cp * positive_int("heads_per_rank", heads_per_rank),
        "head_dim": positive_int("dim", dim),
    }
    facts |= {"dtype": dtype, "max_tokens": max(tokens)}
    blockers = explain(mesh, "cp", **facts).blockers
    rate = _peer_copy_rate(mesh)
    figures: dict[str, Any] = {
        "benchmark": "exchange", "cp": cp, "heads": facts["heads"], "dim": dim, "dtype": dtype, "layers": LAYERS,
        "peer_copy_tb_s": rate and rate / 1e12, "blocked": {name: why for name, why in blockers.items() if why},
        "rows": [],
    }  # fmt: skip
    recorded = _measure.record(figures)
    for backend in BACKENDS:
        if why := blockers[backend]:
            _say(progress, f"{backend}: not measured, {why}")
            continue
        for row in _rows(Exchange(mesh, "cp", backend=backend, **facts), tokens, repeat):
            row["floor_us"] = rate and _bytes_per_rank(row, figures) / rate * 1e6
            recorded["rows"].append(row)
            if output is not None and jax.process_index() == 0:
                _measure.write(output, recorded)
            clocks = " / ".join(_cell(row[name]) for name in CLOCKS)
            _say(progress, f"{backend}, {row['tokens']} tokens: kernel / cadence / eager {clocks} us per layer")
    if console is not None:
        console.print(table(recorded))
    return recorded


def _rows(exchange: Exchange, tokens: Iterable[int], repeat: int) -> Iterator[dict[str, Any]]:
    """Figures of one backend for each number of tokens, as they are measured."""
    for count in tokens:
        yield {"backend": exchange.backend, "cp": exchange.cp, "tokens": count} | _measured(exchange, count, repeat)
    exchange.check()
    exchange.close()


def layers(exchange: Exchange, count: int) -> Step:
    """A program of `count` exchanges in a row: o, lse of all ranks -> the last one's merged rows of all ranks.

    XLA would make one of equal collectives and copies, so each layer's LSEs depend on the layer before, which most
    backends fuse into what they do with them anyway. Fused calls are never made one, and have an order of their own.
    """

    def step(o: Any, lse: Any) -> Any:
        o, lse = o[0], lse[0]
        merged: Any = exchange(Partial(o, lse, LogBase.TWO))
        for _ in range(count - 1):
            if exchange.backend != "fused":
                lse = lse + 0 * merged[:1, :1, 0].astype(lse.dtype)
            merged = exchange(Partial(o, lse, LogBase.TWO))
        return merged[None]

    spec = P(exchange.axis_name)
    return jax.jit(jax.shard_map(step, mesh=exchange.mesh, in_specs=spec, out_specs=spec, check_vma=False))


def partials(exchange: Exchange, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Random o [cp, tokens, heads, dim] and lse [cp, tokens, heads], a rank's own on its device."""
    sharding = NamedSharding(exchange.mesh, P(exchange.axis_name))
    shape = (exchange.cp, tokens, exchange.heads)

    def placed(which: int, shape: tuple[int, ...]) -> jax.Array:
        mine = lambda index: _of_rank(exchange, tokens, index[0].start or 0)[which][None]  # noqa: E731
        return jax.make_array_from_callback(shape, sharding, mine)

    return placed(0, (*shape, exchange.head_dim)), placed(1, shape)


def _of_rank(exchange: Exchange, tokens: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What `partials` gives to a rank: o [tokens, heads, dim] in the exchange's dtype, lse [tokens, heads] float32."""
    rng = np.random.default_rng([tokens, rank])
    o = rng.standard_normal((tokens, exchange.heads, exchange.head_dim), np.float32)
    return o.astype(exchange.dtype), 4 * rng.standard_normal((tokens, exchange.heads), np.float32)


def _measured(exchange: Exchange, tokens: int, repeat: int) -> dict[str, Any]:
    """Figures of one backend and batch; the result is checked first, outside the timed loops."""
    o, lse = partials(exchange, tokens)
    many, fewer, single = (layers(exchange, count) for count in (LAYERS, FEWER_LAYERS, 1))
    _check(exchange, single(o, lse), tokens)
    times = {count: _wall_us(program, o, lse, repeat) for count, program in ((LAYERS, many), (FEWER_LAYERS, fewer))}
    mine: dict[str, Any] = {"cadence_us": (times[LAYERS] - times[FEWER_LAYERS]) / (LAYERS - FEWER_LAYERS)}
    mine["eager_us"] = _back_to_back_us(single, o, lse, 10 * repeat)
    mine["ranks"] = _kernel_times(many, o, lse, repeat) if jax.default_backend() == "gpu" else []
    everyone = agree.allgather(mine)
    ranks = [rank for process in everyone for rank in process["ranks"]]
    slowest = max(ranks, key=lambda rank: rank["us"], default=None)
    return {
        "kernel_us": slowest and slowest["us"],
        "own_kernel_us": slowest and slowest["own_us"],
        "kernels": slowest["kernels"] if slowest else [],
        **{name: max(process[name] for process in everyone) for name in ("cadence_us", "eager_us")},
    }


def _wall_us(program: Step, o: jax.Array, lse: jax.Array, repeat: int) -> float:
    """Median wall time of a run, waited for; three runs before, which launch, capture and capture again."""
    times = []
    for i in range(repeat + 3):
        start = time.perf_counter()
        program(o, lse).block_until_ready()
        if i >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _back_to_back_us(program: Step, o: jax.Array, lse: jax.Array, calls: int) -> float:
    """Wall time per call of a program that is called again before it has ended."""
    program(o, lse).block_until_ready()
    start = time.perf_counter()
    for _ in range(calls):
        merged = program(o, lse)
    merged.block_until_ready()
    return (time.perf_counter() - start) / calls * 1e6


def _kernel_times(program: Step, o: jax.Array, lse: jax.Array, repeat: int) -> list[dict[str, Any]]:
    """For each local GPU: µs of all kernels of a layer, of the exchange's own, and every kernel's share."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeat):
                merged = program(o, lse)
            merged.block_until_ready()
        found = []
        for device in o.sharding.addressable_devices:
            # One program runs under the trace, so its modules are one. The plane's name ends with the ordinal.
            events = _measure.kernel_events(folder, f"/device:GPU:{device.local_hardware_id}")
            kernels = [(name, times) for module in events.values() for name, times in module.items()]
            found.append(_of_a_layer(kernels, repeat * LAYERS))
    return found


def _of_a_layer(kernels: list[tuple[str, list[float]]], layers_run: int) -> dict[str, Any]:
    shares = {name: len(times) / layers_run * statistics.median(times) for name, times in sorted(kernels)}
    own = sum(us for name, us in shares.items() if any(word in name.lower() for word in OWN_KERNELS))
    listed = [
        f"{len(times) / layers_run:g} x {name}: {statistics.median(times):.3f} us" for name, times in sorted(kernels)
    ]
    return {"us": sum(shares.values()), "own_us": own, "kernels": listed}


OWN_KERNELS = ("exchange_kernel", "fusedkernel", "fused_kernel", "nccl")
"""Kernels that move data between ranks: ours, FlashInfer's, NCCL's. What else a layer runs is copies and merges."""


def _check(exchange: Exchange, got: jax.Array, tokens: int) -> None:
    """Two units of the dtype at the largest value, against a float64 merge of what the ranks hold."""
    ranks = [_of_rank(exchange, tokens, rank) for rank in range(exchange.cp)]
    o, lse = (np.stack(x) for x in zip(*ranks, strict=True))
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = Partial(jnp.asarray(o, jnp.float64), jnp.asarray(lse, jnp.float64), LogBase.TWO)
        want = np.asarray(lse_lib.merge(exact).o)
    h = exchange.heads_per_rank
    bound = 2 * float(jnp.finfo(exchange.dtype).eps) * np.abs(want).max()
    for shard in got.addressable_shards:
        rank = shard.index[0].start or 0
        error = np.abs(np.asarray(shard.data[0], np.float64) - want[:, rank * h : (rank + 1) * h]).max()
        if not error <= bound:
            raise JaxcpError(
                f"bench exchange: {exchange.backend} is wrong on rank {rank} with {tokens} tokens: error {error:.3g}; "
                f"expected <= {bound:.3g}."
            )


def _peer_copy_rate(mesh: Mesh) -> float | None:
    """Bytes per second of one large copy from a GPU of this process to the next; None where it has but one, or none."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if devices[0].platform != "gpu" or len(devices) < 2:
        return None
    x = jax.device_put(jnp.zeros(COPY_BYTES, jnp.uint8), devices[0])
    best = min(_copied_s(x, devices[1]) for _ in range(10))
    return COPY_BYTES / best


def _copied_s(x: jax.Array, to: Any) -> float:
    start = time.perf_counter()
    jax.device_put(x, to).block_until_ready()
    return time.perf_counter() - start


def _bytes_per_rank(row: dict[str, Any], figures: dict[str, Any]) -> int:
    """Payload that a rank sends in an exchange: the rows and LSEs of the other ranks' heads."""
    heads = figures["heads"] // row["cp"]
    return (row["cp"] - 1) * row["tokens"] * heads * (figures["dim"] * jnp.dtype(figures["dtype"]).itemsize + 4)


def table(recorded: dict[str, Any]) -> Table:
    """The record for people: kernel / cadence / eager in µs, a row per backend, a column per number of tokens."""
    counts = sorted({row["tokens"] for row in recorded["rows"]})
    by_place = {(row["backend"], row["tokens"]): row for row in recorded["rows"]}
    out = Table(title=f"exchange over {recorded['cp']} ranks, {recorded['environment']['device_kind']}: "
                "kernel / cadence / eager, us per layer")  # fmt: skip
    for heading in ("backend", *map(str, counts)):
        out.add_column(heading, justify="right")
    for backend in dict.fromkeys(row["backend"] for row in recorded["rows"]):
        cells = [by_place[backend, count] for count in counts]
        out.add_row(backend, *(" / ".join(_cell(row[name]) for name in CLOCKS) for row in cells))
    if recorded["peer_copy_tb_s"]:
        floors = {row["tokens"]: row["floor_us"] for row in recorded["rows"]}
        out.add_row("payload at copy rate", *(_cell(floors[count]) for count in counts))
    return out


CLOCKS = ("kernel_us", "cadence_us", "eager_us")


def _cell(us: float | None) -> str:
    return "-" if us is None else f"{us:.2f}"


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False)
