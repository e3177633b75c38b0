"""Gathers by copy engines: options for XLA under which a gather takes no multiprocessors from what it runs behind.

NCCL's gather is a kernel, and while it runs the indexer has fewer multiprocessors. With buffers registered as symmetric
memory NCCL can leave the copies to copy engines ("zero CTA" policy, NCCL 2.28), and XLA has a gather of its own over
such memory. Both are experimental in XLA, hence options to ask for rather than defaults.
"""

import ctypes
import functools
import importlib.metadata
from typing import Any

import jax

from jaxcp.errors import BackendError, invalid

WAYS = {
    "nccl": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    "one_sided": {"xla_gpu_all_gather_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
}
"""XLA's options for each way."""

LEAST_NCCL = (2, 28)


def sm_free(way: str = "nccl") -> dict[str, Any]:
    """Compiler options of a program whose gathers shall use copy engines.

        step = jax.jit(jax.shard_map(...), compiler_options=jaxcp.overlap.sm_free())

    Args:
      way: "nccl", NCCL over symmetric buffers; "one_sided", XLA's own gather over them.

    Raises:
      ValueError: no such way.
      BackendError: this installation cannot do it; the message says why.
    """
    if way not in WAYS:
        raise invalid("way", repr(way), f"one of {sorted(WAYS)}", "It chooses who copies.")
    if why := blocker(way):
        raise BackendError(f"sm_free({way!r}): {why}")
    return dict(WAYS[way])


def blocker(way: str) -> str | None:
    """Why this installation cannot gather that way, or None; looks at versions, not at devices."""
    for option, value in WAYS[way].items():
        if not _known(option, value):
            return f"this jaxlib's XLA has no option {option}; expected a jaxlib of 0.11.2 or newer. Upgrade jax."
    version = nccl_version()
    least = ".".join(map(str, LEAST_NCCL))
    if version is None:
        return f"NCCL was not found; expected NCCL >= {least}. Install jax[cuda13]."
    if version < LEAST_NCCL:
        return f"NCCL is {'.'.join(map(str, version))}; expected >= {least}. Upgrade nvidia-nccl-cu13."
    return None


@functools.cache
def _known(option: str, value: Any) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def nccl_version() -> tuple[int, ...] | None:
    """(major, minor, patch) of the NCCL that jax's CUDA plugin loads: its wheel, else the system's library."""
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return tuple(int(part) for part in importlib.metadata.version(wheel).split(".")[:3])
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100
