"""Context-parallel attention for JAX on NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcp import decode as decode
    from jaxcp import layout as layout
    from jaxcp import lse as lse
    from jaxcp import overlap as overlap
    from jaxcp import qsa as qsa
    from jaxcp.errors import BackendError as BackendError
    from jaxcp.errors import BuildError as BuildError
    from jaxcp.errors import CacheOverflowError as CacheOverflowError
    from jaxcp.errors import JaxcpError as JaxcpError
    from jaxcp.errors import PeerTimeoutError as PeerTimeoutError
    from jaxcp.errors import StaleCacheError as StaleCacheError
    from jaxcp.errors import TopologyError as TopologyError
    from jaxcp.exchange import Exchange as Exchange
    from jaxcp.exchange import explain as explain
    from jaxcp.lse import LogBase as LogBase
    from jaxcp.lse import Partial as Partial

_EXPORTS = {
    "Exchange": "jaxcp.exchange", "explain": "jaxcp.exchange",
    "LogBase": "jaxcp.lse", "Partial": "jaxcp.lse",
    "layout": None, "lse": None, "decode": None, "overlap": None, "qsa": None,
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
    if module is None:
        return importlib.import_module(f"jaxcp.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
