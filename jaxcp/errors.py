"""Exceptions of jaxcp. Every message says which argument, what was got, what was expected and what to do.

`ValueError` and `TypeError` are for arguments, `NotImplementedError` for what is not built; the classes here are for
what the machine refuses.
"""

from typing import Any


class JaxcpError(RuntimeError):
    """Base of the errors that concern the machine rather than an argument."""


class BackendError(JaxcpError):
    """A backend or implementation asked for by name cannot work here; the message names the blocker."""


class TopologyError(JaxcpError):
    """The mesh's devices cannot be used together as asked."""


class BuildError(JaxcpError):
    """The native library could not be built or loaded."""


class PeerTimeoutError(JaxcpError):
    """A rank waited longer than its time-out for a peer; the message names both and the call."""


class CacheOverflowError(JaxcpError):
    """A length known only on the device exceeded the cache; the rows were dropped, not written elsewhere."""


class StaleCacheError(JaxcpError):
    """A forward continued from a length of which the cache does not hold the pending state."""


def invalid[E: Exception](argument: str, got: Any, expected: str, remedy: str, kind: type[E] = ValueError) -> E:
    """The exception for a bad argument, worded the same everywhere.

    Args:
      argument: name of the argument as the caller wrote it.
      got: the offending value, or a description of it.
      expected: what would have been accepted.
      remedy: what the caller can do.
      kind: exception class.
    """
    return kind(f"{argument}: got {got}; expected {expected}. {remedy}")
