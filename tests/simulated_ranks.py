"""The CUDA library with a handler more, for tests on one GPU: all ranks of an exchange in one call.

The handler (tests/native/ffi_simulated.cc) is no part of what users build, and goes into a library of its own.
"""

import functools
import hashlib

from native_programs import NATIVE

from jaxcp import native
from jaxcp.native import builder, registry

SOURCE, TARGET = NATIVE / "ffi_simulated.cc", "jaxcp_fused_simulated"


def recipe(**options) -> builder.Recipe:
    """What would be built; `options` as those of `builder.recipe`."""
    _declare()
    return builder.recipe("simulated", stamp=_stamp(), **options)


def load() -> native.WorkspaceLibrary:
    """The library, built if need be, its handler registered."""
    _declare()
    return native.load_exchange("simulated", stamp=_stamp())


@functools.cache
def _declare() -> None:
    builder.SOURCES["simulated"] = (*builder.SOURCES["cuda"], str(SOURCE))
    registry.HANDLERS["simulated"] = (TARGET,)


def _stamp() -> str:
    """Describes the source that is not among the library's own."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()
