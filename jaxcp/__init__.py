"""Context-parallel attention for JAX on NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcp import decode as decode
    from jaxcp import layout as layout
    from jaxcp import lse as lse
    from jaxcp import qsa as qsa
    from jaxcp.errors import (
        BackendError as BackendError,
        BuildError as BuildError,
        CacheOverflowError as CacheOverflowError,
        JaxcpError as JaxcpError,
        PeerTimeoutError as PeerTimeoutError,
        StaleCacheError as StaleCacheError,
        TopologyError as TopologyError,
    )
    from jaxcp.exchange import Exchange as Exchange, explain as explain
    from jaxcp.lse import LogBase as LogBase, Partial as Partial

_EXPORTS = {
    "Exchange": "jaxcp.exchange", "explain": "jaxcp.exchange",
    "LogBase": "jaxcp.lse", "Partial": "jaxcp.lse",
    "layout": None, "lse": None, "decode": None, "qsa": None,
    "BackendError": "jaxcp.errors", "BuildError": "jaxcp.errors", "CacheOverflowError": "jaxcp.errors",
    "JaxcpError": "jaxcp.errors", "PeerTimeoutError": "jaxcp.errors", "StaleCacheError": "jaxcp.errors",
    "TopologyError": "jaxcp.errors",
}  # fmt: skip

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import jaxcp` and `jaxcp --help` stay fast."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxcp' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = _EXPORTS[name]
    return importlib.import_module(f"jaxcp.{name}") if module is None else getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
