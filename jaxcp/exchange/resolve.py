"""Which backend can work for a mesh, and which one `auto` takes.

A backend is a module of this package with two names: `blocker(topology, spec)`, which says on the host, without
touching a device, why it cannot work here (or None), and `Engine`. Processes may differ in what they find (a compiler),
so an `Exchange` asks all of them, see `resolve_together`. Nothing falls back after this point.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxcp.errors import BackendError, invalid
from jaxcp.exchange import agree
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.topology import Topology

BACKENDS = ("fused", "a2a", "ag_rs", "flashinfer", "allgather")
"""All backends; `explain` lists them in this order."""

PREFERENCE = {"gpu": ("fused", "a2a", "ag_rs")}
"""What `auto` tries, by platform. The oracle and the baseline are taken only by name."""

ELSEWHERE = ("a2a", "ag_rs")
"""What `auto` tries on other platforms. `fused` has a host twin there, for tests, that is taken only by name."""

log = logging.getLogger("jaxcp")


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The decision about a backend, as data; `str()` gives it as a table.

    Attributes:
      chosen: name of the backend.
      reason: why.
      blockers: every backend's blocker, or None where it can be used.
      topology: what was decided for.
      spec: what was decided for.
    """

    chosen: str
    reason: str
    blockers: dict[str, str | None]
    topology: Topology
    spec: ExchangeSpec

    def __str__(self) -> str:
        width = max(map(len, self.blockers))
        rows = [
            f"{'*' if name == self.chosen else ' '} {name:<{width}}  {why or 'usable'}"
            for name, why in self.blockers.items()
        ]
        return "\n".join([str(self.topology), *rows, f"chosen: {self.chosen} ({self.reason})"])


def explain(
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    heads: int,
    head_dim: int,
    dtype: Any,
    max_tokens: int = 128,
    backend: str = "auto",
) -> Resolution:
    """Every backend's blocker for an exchange over `axis_name`, and the one that `backend` resolves to.

    Args:
      mesh: concrete, compile-only or abstract.
      axis_name: the context-parallel axis.
      heads: query heads of the group.
      head_dim: width of a row.
      dtype: of the rows.
      max_tokens: rows of one call.
      backend: "auto" or a name.

    Raises:
      ValueError, TypeError: bad arguments, an unknown backend.
      BackendError: `backend` names one that is blocked.
    """
    topology = Topology.of(mesh, axis_name)
    spec = ExchangeSpec.of(topology, heads=heads, head_dim=head_dim, dtype=dtype, max_tokens=max_tokens)
    return resolve(topology, spec, backend)


def resolve(topology: Topology, spec: ExchangeSpec, backend: str) -> Resolution:
    """`backend`, or the best one without a blocker for "auto". A name never falls back."""
    if backend != "auto" and backend not in BACKENDS:
        raise invalid("backend", repr(backend), f"'auto' or one of {', '.join(BACKENDS)}", "jaxcp.explain lists them.")
    blockers = {name: find_blocker(name, topology, spec) for name in BACKENDS}
    if backend == "auto":
        return _automatic(topology, spec, blockers)
    if why := blockers[backend]:
        raise BackendError(
            f"backend={backend!r} cannot be used on {topology}: {why}. "
            f"Usable here: {', '.join(n for n in BACKENDS if not blockers[n])}."
        )
    return Resolution(backend, "asked for by name", blockers, topology, spec)


def resolve_together(topology: Topology, spec: ExchangeSpec, backend: str) -> Resolution:
    """`resolve` in all processes of the job, where backends that own memory are in question: they meet in set-up.

    Raises:
      BackendError: also if a backend is blocked in some processes only, or "auto" finds another one there; in all.
    """
    mine = functools.partial(resolve, topology, spec, backend)
    spans_the_job = jax.process_count() > 1 and topology.processes == tuple(range(jax.process_count()))
    if spans_the_job and backend in ("auto", "fused", "flashinfer"):
        chosen = agree.together("choosing a backend", lambda: {"backend": mine().chosen})
        agree.the_same("backends", chosen)
    return mine()


def find_blocker(name: str, topology: Topology, spec: ExchangeSpec) -> str | None:
    """Why backend `name` cannot be used, or None."""
    if importlib.util.find_spec(f"jaxcp.exchange.{name}") is None:
        return "not built"
    return module(name).blocker(topology, spec)


def module(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    return importlib.import_module(f"jaxcp.exchange.{name}")


def _automatic(topology: Topology, spec: ExchangeSpec, blockers: dict[str, str | None]) -> Resolution:
    preference = PREFERENCE.get(topology.platform, ELSEWHERE)
    chosen = next(name for name in preference if not blockers[name])  # ag_rs has no blocker anywhere
    passed_over = [f"{name}: {blockers[name]}" for name in preference[: preference.index(chosen)]]
    reason = "; ".join(passed_over) or f"first choice on {topology.platform}"
    _log_once(f"exchange over {topology}: backend {chosen} ({reason})")
    return Resolution(chosen, reason, blockers, topology, spec)


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)
