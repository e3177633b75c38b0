"""FlashInfer's top-k over rows of scores: a second opinion on selections and a peer in benchmarks, by name only."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxcp import native
from jaxcp.errors import BuildError
from jaxcp.exchange.flashinfer import include_folder, stamp
from jaxcp.native import registry
from jaxcp.qsa import library
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig

TARGET = "jaxcp_qsa_flashinfer_topk"
HEADER = Path("flashinfer", "topk.cuh")
MOST_BLOCKS = 2048
"""Most blocks that it selects with ties by id."""


def header_blocker() -> str | None:
    """Why nothing can be compiled, or None."""
    folder = include_folder()
    if folder is None:
        return "flashinfer-python is not installed, nor does JAXCP_FLASHINFER_INCLUDE name its headers"
    if not (folder / HEADER).is_file() or "enum class TopKTieBreak" not in (folder / HEADER).read_text():
        return f"{folder} has no {HEADER} with ties by id (it came with 0.7.4)"
    return None


def blocker(config: QSAConfig, cache: Cache, platform: str) -> str | None:
    """Why FlashInfer's kernels cannot serve this cache, or None; host facts only."""
    if why := library.blocker(platform) or header_blocker():
        return why
    if jnp.finfo(cache.dtype).bits > 32:
        return f"it ranks float32 scores, not {cache.dtype}"
    if config.selected_blocks > MOST_BLOCKS:
        return f"{config.selected_blocks} blocks to select exceed its {MOST_BLOCKS}"
    return None


def load(**options) -> native.Library:
    """The library with FlashInfer's kernels; see `native.load`.

    Raises:
      BuildError: it does not compile against the headers found.
    """
    folder = include_folder()
    if folder is None or (why := header_blocker()):
        raise BuildError(f"flashinfer: {why}. Install it, or name the folder of its headers.")
    return native.load("flashinfer_topk", include=(folder,), stamp=stamp(folder, HEADER), **options)


def top_blocks(score: Float[Array, "rows blocks"], visible: Int[Array, " rows"], k: int) -> Int32[Array, "rows k"]:
    """As `selection.top_blocks`, of float32 scores without -0, for k <= blocks."""
    if jax.default_backend() == "gpu":
        load()
    else:
        registry.register_compile_only()
    rows, blocks = score.shape
    score = jnp.pad(score, [(0, 0), (0, -blocks % 4)])
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((rows, k), jnp.int32), vmap_method="broadcast_all")
    visible = jnp.minimum(visible, blocks).astype(jnp.int32)
    return call(score, visible, jnp.zeros_like(visible))
