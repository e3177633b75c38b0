"""Backend "flashinfer": FlashInfer's fused kernel, compiled unmodified from the user's copy, over our workspace.

A second opinion on results and the peer in benchmarks, taken only by name. It reads [rows, cp, dim], contiguous, so XLA
copies the partials first; it multiplies by zero weights, so that copy also zeroes empty rows. Its waits have no end: a
rank that does not come leaves the others spinning, and `check` has nothing to report.
"""

import importlib.util
import os
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcp import lse as lse_lib
from jaxcp import native
from jaxcp.errors import BuildError
from jaxcp.exchange import fused
from jaxcp.exchange.collective import pad_heads
from jaxcp.exchange.resident import WorkspaceEngine
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.exchange.workspace import Workspace
from jaxcp.lse import Partial
from jaxcp.native.registry import register_compile_only
from jaxcp.topology import Topology

TARGET = "jaxcp_flashinfer"
HEADER = Path("flashinfer", "comm", "dcp_lse_reduce.cuh")
VERSION = "0.7.4"
"""Release whose kernel and workspace layout kernels/csrc/flashinfer.h describes."""
DTYPES = ("bfloat16", "float16")


def include_folder() -> Path | None:
    """FlashInfer's include folder: $JAXCP_FLASHINFER_INCLUDE, or that of the installed package, without import."""
    if folder := os.environ.get("JAXCP_FLASHINFER_INCLUDE"):
        return Path(folder)
    spec = importlib.util.find_spec("flashinfer")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(root, "data", "include") for root in roots if Path(root, "data", "include").is_dir()), None)


def header_blocker() -> str | None:
    """Why no kernel can be compiled, or None."""
    folder = include_folder()
    if folder is None:
        return f"flashinfer-python {VERSION} is not installed, nor does JAXCP_FLASHINFER_INCLUDE name its headers"
    if not (folder / HEADER).is_file():
        return f"{folder} has no {HEADER} (decode_cp_a2a_lse_reduce came with {VERSION})"
    if "FusedKernel" not in (folder / HEADER).read_text():
        return f"{folder / HEADER} is of another release than {VERSION}, with another kernel"
    return None


def blocker(topology: Topology, spec: ExchangeSpec) -> str | None:
    """Why FlashInfer's kernel cannot serve this mesh and spec, or None; host facts only."""
    if topology.platform != "gpu":
        return f"it needs NVIDIA GPUs, not platform {topology.platform}"
    if spec.dtype.name not in DTYPES:
        return f"dtype {spec.dtype.name} is not one of {', '.join(DTYPES)}"
    why = fused.placement_blocker(topology, spec) or fused.shape_blocker(spec) or header_blocker()
    return why or fused.build_blocker(topology)


class Engine(WorkspaceEngine):
    """FlashInfer's kernel over a workspace of its own. On a compile-only mesh: the program without a workspace."""

    def __init__(self, topology: Topology, spec: ExchangeSpec, timeout_s: float):
        workspace = None
        if topology.runnable:
            workspace = Workspace(topology, spec, load, timeout_s, name="flashinfer")
        else:
            register_compile_only()
        super().__init__(spec, workspace)

    def __call__(self, partial: Partial, return_lse: bool) -> tuple[Array, None]:
        """See `spec.Engine`.

        Raises:
          NotImplementedError: the merged LSE is asked for; the kernel does not write it.
        """
        if return_lse:
            raise NotImplementedError("return_lse: FlashInfer's kernel writes no merged LSE. Use backend='fused'.")
        spec = self.spec
        tokens, rows = partial.o.shape[0], partial.o.shape[0] * spec.heads_per_rank
        partial = pad_heads(partial, spec)
        lse = lse_lib.sanitize(partial.lse)
        o = jnp.where(lse[..., None] > -jnp.inf, partial.o, 0)  # an empty row's payload may be NaN
        operands = (self._by_row(o).reshape(rows, spec.cp, spec.head_dim), self._by_row(lse).reshape(rows, spec.cp))
        results = [((rows, spec.head_dim), partial.o.dtype)]
        base = np.int64(fused.BASES[partial.base])
        (out,) = fused.custom_call(TARGET, results, operands, self.number, next(self.sites), base=base)
        return out.reshape(tokens, spec.heads_per_rank, spec.head_dim), None

    def _by_row(self, x: Array) -> Array:
        """[tokens, cp * h, ...] as [tokens, h, cp, ...]."""
        spec = self.spec
        return x.reshape(x.shape[0], spec.cp, spec.heads_per_rank, *x.shape[2:]).swapaxes(1, 2)

    def check(self) -> None:
        """Nothing to check: the kernel's waits do not end."""


def load(**options) -> native.WorkspaceLibrary:
    """The library with FlashInfer's kernel; see `native.load`.

    Raises:
      BuildError: it does not compile against the headers found.
    """
    if why := header_blocker():
        raise BuildError(f"flashinfer: {why}. Install it, or name the folder of its headers.")
    folder = include_folder()
    assert folder is not None  # header_blocker has looked
    include = (native.source_folder() / "flashinfer_shim", folder)
    return native.load_exchange("flashinfer", include=include, stamp=stamp(folder), **options)


def stamp(folder: Path, header: Path = HEADER) -> str:
    """What the include folder holds, for the cache key: a path does not say when a wheel was replaced."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return str((folder / header).stat().st_mtime_ns)
