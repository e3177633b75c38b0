"""Which implementation of an operation serves a cache, and which one "auto" takes.

Every operation has a table (`jaxcp.qsa.operations` brings them together): name -> `Implementation`, the best first. A
blocker looks at host facts only and says why an implementation cannot serve here. Nothing falls back after this point.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from jaxcp.errors import BackendError, invalid
from jaxcp.qsa.cache import Cache
from jaxcp.qsa.config import QSAConfig

log = logging.getLogger("jaxcp")
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("jaxcp_qsa_platform", default=None)


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
      run: the function; all of a table have one signature.
      blocker: (config, cache, platform) -> why it cannot serve, or None.
      attended: of sparse attention: config -> what takes a layer's products and gates its results itself, to call
        instead of `mixing.attended` around `run`; None where there is no such thing.
    """

    run: Callable
    blocker: Callable[[QSAConfig, Cache, str], str | None] = lambda config, cache, platform: None
    attended: Callable[[QSAConfig], Callable | None] = lambda config: None


def resolve(
    operation: str, table: dict[str, Implementation], implementation: str, config: QSAConfig, cache: Cache
) -> Implementation:
    """The implementation of that name; "auto" takes the first without a blocker, and logs once why.

    Args:
      operation: what the table is for, in errors.
      table: implementations, the best first.
      implementation: "auto" or a name. A name never falls back.
      config, cache: what is to be served; shapes and dtypes only.

    Raises:
      ValueError: no implementation has the name.
      BackendError: the named one is blocked.
    """
    if implementation != "auto" and implementation not in table:
        raise invalid(
            "implementation", repr(implementation), f"'auto' or one of {sorted(table)}", f"It chooses the {operation}."
        )
    blockers = blockers_of(table, config, cache)
    if implementation == "auto":
        chosen = next(name for name, why in blockers.items() if why is None)  # "xla" has no blocker
        passed_over = [f"{name}: {why}" for name, why in blockers.items() if why is not None]
        _log_once(f"QSA {operation}: {chosen} ({'; '.join(passed_over) or 'first choice'})")
        return table[chosen]
    if why := blockers[implementation]:
        usable = ", ".join(name for name, blocked in blockers.items() if blocked is None)
        raise BackendError(
            f"implementation={implementation!r} cannot compute {operation}: {why}. Usable here: {usable}."
        )
    return table[implementation]


def blockers_of(table: dict[str, Implementation], config: QSAConfig, cache: Cache) -> dict[str, str | None]:
    """Every implementation's blocker, or None where it can serve."""
    return {name: entry.blocker(config, cache, platform()) for name, entry in table.items()}


def platform() -> str:
    """Platform that programs traced now are for: that of `lowering_for`, else the default backend's ("gpu", "cpu")."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Programs traced inside are for that platform: to compile for GPUs on a machine that has none."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)
