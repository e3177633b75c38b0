"""Backend "fused": one kernel per exchange sends, waits and merges (kernels/csrc/exchange.cuh; on CPU, its host twin).

The kernel reads [tokens, heads, dim] in place and writes the merged rows of this rank's heads. Its call number and
slots live in the workspace, so a captured call can be replayed without its host; `order` keeps the calls of a program
in one order on all ranks.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxcp import lse as lse_lib
from jaxcp import native, varying
from jaxcp.errors import BuildError
from jaxcp.exchange import order
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.exchange.workspace import Workspace, absent_processes, hosts_of
from jaxcp.lse import LogBase, Partial
from jaxcp.native import compiler
from jaxcp.native.library import register_compile_only
from jaxcp.topology import Topology

MAX_RANKS = 64
UNIT_BYTES = 16
MAX_ROWS = 1 << 24
MAX_SENDS = 1 << 26
MAX_SOURCE_BYTES = 1 << 32
DTYPES = ("bfloat16", "float16", "float32")
BASES = {LogBase.TWO: 0, LogBase.E: 1}
TARGET = "jaxcp_fused"


def blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """Why the kernel cannot serve this mesh and spec, or None; host facts only."""
    return placement_blocker(topology, spec) or shape_blocker(spec) or build_blocker(topology)


def placement_blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """What stands against sharing memory between the ranks."""
    if topology.platform not in ("cpu", "gpu"):
        return f"it needs NVIDIA GPUs (or the CPU twin), not platform {topology.platform}"
    if topology.compute_capability and topology.compute_capability < (9, 0):
        return f"it needs compute capability 9.0 or newer, not {'.'.join(map(str, topology.compute_capability))}"
    if spec.cp > MAX_RANKS:
        return f"{spec.cp} ranks exceed its {MAX_RANKS}"
    if topology.runnable and (why := absent_processes(topology)):
        return why
    if (hosts := hosts_of(topology)) > 1:
        return f"a group's devices are on {hosts} hosts; mapping another host's memory (fabric handles) is not built"
    return None


def shape_blocker(spec: ExchangeSpec) -> str | None:
    """What stands against the rows."""
    if spec.dtype.name not in DTYPES:
        return f"dtype {spec.dtype.name} is not one of {', '.join(DTYPES)}"
    row_bytes, rows = spec.head_dim * spec.dtype.itemsize, spec.max_tokens * spec.heads_per_rank
    if row_bytes % UNIT_BYTES:
        return f"rows of head_dim = {spec.head_dim} x {spec.dtype.name} are not whole {UNIT_BYTES}-byte units"
    if rows >= MAX_ROWS:
        return f"max_tokens x heads_per_rank = {rows} rows exceed its {MAX_ROWS - 1}"
    if rows * (spec.cp - 1) >= MAX_SENDS:
        return f"{rows} rows for each of {spec.cp - 1} peers exceed the {MAX_SENDS - 1} rows that it sends per call"
    if rows * row_bytes >= MAX_SOURCE_BYTES:
        return f"{rows} rows of {row_bytes} bytes exceed its {MAX_SOURCE_BYTES - 1} bytes per source"
    return None


def build_blocker(topology: Topology) -> str | None:
    """What stands against building the library; nothing where programs are only compiled for GPUs."""
    if not topology.runnable:
        return None
    find = compiler.nvcc if topology.platform == "gpu" else compiler.cxx
    try:
        find()
    except BuildError as error:
        return f"its library cannot be built: {error}"
    return None


class Engine:
    """The fused kernel over a workspace of its own. On a compile-only mesh: the program without a workspace."""

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float):
        self.spec, self.workspace, self.sites = spec, None, itertools.count()
        if spec.cp == 1:
            return
        if topology.runnable:
            library = native.load("cpu" if topology.platform == "cpu" else "cuda")
            self.workspace = Workspace(topology, spec, library, timeout_s, name="fused")
        else:
            register_compile_only()

    def __call__(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """See `spec.Engine`."""
        self.check()
        if self.spec.cp == 1:  # one source still merges: an empty row's payload must become 0
            merged = lse_lib.merge(Partial(partial.o[None], partial.lse[None], partial.base))
            return merged.o, merged.lse if return_lse else None
        rows = (partial.o.shape[0], self.spec.heads_per_rank)
        results = [((*rows, self.spec.head_dim), partial.o.dtype), (rows, jnp.float32)][: 1 + return_lse]
        number = self.workspace.number if self.workspace else -1
        merged = custom_call(TARGET, results, (partial.o, partial.lse), number, next(self.sites), partial.base)
        return merged[0], merged[1] if return_lse else None

    def check(self) -> None:
        """Raises PeerTimeoutError once a rank of this process has waited in vain."""
        if self.workspace:
            self.workspace.check()

    def reset(self) -> None:
        """Collective: revives a dead workspace."""
        if self.workspace:
            self.workspace.reset()

    def close(self) -> None:
        """Collective: gives the memory back."""
        if self.workspace:
            self.workspace.close()

    def describe(self) -> dict[str, Any]:
        """Bytes sent per call, and the workspace."""
        spec = self.spec
        row = spec.head_dim * spec.dtype.itemsize + 4
        sent = {"bytes_sent_per_call": (spec.cp - 1) * spec.max_tokens * spec.heads_per_rank * row}
        return sent | (self.workspace.describe() if self.workspace else {})


def custom_call(
    target: str, results: list[tuple[tuple[int, ...], Any]], operands: tuple[Array, Array], number: int, site: int,
    base: LogBase,
) -> tuple[Array, ...]:
    """Results of one call of `target`, in the program's order of exchanges.

    JAX is not told of a side effect: that would cost each dispatch of the program some 200 us (no fast path), and what
    it protects from is ruled out otherwise. No two calls are alike (`site`), the token orders them, and a call whose
    results nobody wants is dropped on all ranks alike, because all ranks run one program.

    Args:
      target: FFI target.
      results: (shape, dtype) of the arrays it makes, without the token.
      operands: o and lse.
      number: of the exchange in this process; -1 for a program that is only compiled.
      site: of the call among those of the exchange. Counted per exchange: processes that traced other things besides
        must get the same program.
      base: of lse.
    """
    first, *others = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)
    call = jax.ffi.ffi_call(target, [first, jax.ShapeDtypeStruct((1,), jnp.uint32), *others])
    attributes = {"exchange": np.int64(number), "site": np.int64(site), "base": np.int64(BASES[base])}
    # Barriers: XLA:GPU fuses a call with slices of its operands or results, after which jax 0.11's runs the call twice.
    operands = lax.optimization_barrier(operands)
    first, token, *others = call(*operands, order.current(), **attributes)
    order.enter(token)
    # shard_map takes an FFI call's results for the same on all ranks; they differ wherever one of the partials does.
    return varying.over(varying.axes(*operands), *lax.optimization_barrier((first, *others)))
