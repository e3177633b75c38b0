"""Backend "fused": one kernel per exchange sends, waits and merges (kernels/csrc/exchange.cuh; on CPU, its host twin).

The kernel reads [tokens, heads, dim] in place and writes the merged rows of this rank's heads. Its call number and
slots live in the workspace, so a captured call can be replayed without its host; `order` keeps the calls of a program
in one order on all ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, UInt32

from jaxcp import native, varying
from jaxcp.errors import BuildError
from jaxcp.exchange import order
from jaxcp.exchange.collective import merge_alone
from jaxcp.exchange.resident import WorkspaceEngine
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.exchange.workspace import Workspace, absent_processes, several_domains
from jaxcp.lse import LogBase, Partial
from jaxcp.native import compiler
from jaxcp.native.registry import register_compile_only
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
    return several_domains(topology)


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


class Engine(WorkspaceEngine):
    """The fused kernel over a workspace of its own. On a compile-only mesh: the program without a workspace."""

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float):
        workspace = None
        if spec.cp > 1 and topology.runnable:
            load = functools.partial(native.load_exchange, "cpu" if topology.platform == "cpu" else "cuda")
            workspace = Workspace(topology, spec, load, timeout_s, name="fused")
        elif spec.cp > 1:
            register_compile_only()
        super().__init__(spec, workspace)
        self.strides = topology.strides

    def __call__(self, partial: Partial, return_lse: bool) -> tuple[Array, Array | None]:
        """See `spec.Engine`."""
        self.check()
        if self.spec.cp == 1:
            return merge_alone(partial, return_lse)
        rows = (partial.o.shape[0], self.spec.heads_per_rank)
        results = [((*rows, self.spec.head_dim), partial.o.dtype), (rows, jnp.float32)][: 1 + return_lse]
        place, axes = self._place()
        operands, attributes = (partial.o, partial.lse), {"base": np.int64(BASES[partial.base]), "axes": axes}
        merged = custom_call(TARGET, results, operands, self.number, next(self.sites), (place,), **attributes)
        return merged[0], merged[1] if return_lse else None

    def _place(self) -> tuple[UInt32[Array, "1"], np.ndarray]:
        """The device's place in the program's mesh over its manual axes, and their (stride, size), flat int64.

        The handler compares it with the device's place in the exchange's mesh: only on the device do they meet.
        """
        manual = {name: axis for name, axis in self.strides.items() if name in get_abstract_mesh().manual_axes}
        place = sum(lax.axis_index(name) * stride for name, (stride, _) in manual.items())
        return jnp.reshape(place, 1).astype(jnp.uint32), np.array(list(manual.values()), np.int64).ravel()


def custom_call(
    target: str,
    results: list[tuple[tuple[int, ...], Any]],
    operands: tuple[Array, Array],
    number: int,
    site: int,
    more: tuple[Array, ...] = (),
    **attributes: Any,
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
      more: operands behind the token; they decide nothing about where results differ.
      attributes: of the call besides exchange and site; numpy int64.
    """
    first, *others = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)
    call = jax.ffi.ffi_call(target, [first, jax.ShapeDtypeStruct((1,), jnp.uint32), *others])
    attributes |= {"exchange": np.int64(number), "site": np.int64(site)}
    # Barriers: XLA:GPU fuses a call with slices of its operands or results, after which jax 0.11's runs the call twice.
    operands = lax.optimization_barrier(operands)
    first, token, *others = call(*operands, order.current(), *more, **attributes)
    order.enter(token)
    # shard_map takes an FFI call's results for the same on all ranks; they differ wherever one of the partials does.
    return varying.over(varying.axes(*operands), *lax.optimization_barrier((first, *others)))
