"""The figures of one case: every implementation, its peers and its floors, from the same run, results checked."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial as bind
from typing import Any

import jax

from jaxcp.bench import _measure
from jaxcp.bench._measure import DeviceTime
from jaxcp.bench.qsa import entries, peers, programs, selections
from jaxcp.bench.qsa.cases import Case, make_inputs
from jaxcp.bench.qsa.entries import OWN, Entry
from jaxcp.errors import JaxcpError
from jaxcp.qsa import QSAConfig, flashinfer_topk
from jaxcp.qsa.resolve import Implementation, platform
from jaxcp.qsa.selection import SELECT
from jaxcp.qsa.sparse import ATTEND

KERNELS = 8
"""Kernels that a figure's record names: the longest."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
      config: geometry.
      dtype: of the layer.
      models: selections of prefill besides the layer's own.
      repeat, limit_s: see `device_times`.
      copy_rate: bytes per second of a large copy on this device.
      say: takes lines of progress.
    """

    config: QSAConfig
    dtype: str
    models: Sequence[str]
    repeat: int
    limit_s: float
    copy_rate: float
    say: Callable[[str], None]


class Session:
    """Measures one case; collects figures, what was left out and why, and what was wrong."""

    def __init__(self, case: Case, options: Options):
        self._options, self._inputs = options, make_inputs(case, options.config, options.dtype)
        self.figures: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self.failures: list[str] = []

    def measure(self) -> dict[str, Any]:
        """The case's record."""
        inputs, rate, case = self._inputs, self._options.copy_rate, self._inputs.case
        usable = self._usable("selection", SELECT)
        best = {name: usable.pop(name) for name in (next(iter(usable)), "xla") if name in usable}
        selecting = entries.selecting(inputs, best, rate)
        right = self._run([*selecting, *entries.whole(inputs, rate), *entries.ranking(inputs)])
        for name, function in usable.items():  # taken by name only: what fails here says nothing about a layer
            make = bind(entries.selecting, inputs, {name: function}, rate)
            self._peer(f"selection by {name}", make, None)
        blocker = flashinfer_topk.blocker(inputs.config, inputs.cache, platform())
        self._peer("FlashInfer top-k", lambda: entries.flashinfer(inputs), blocker)
        own = next((blocks for entry, blocks in right if entry.part == "select" and not entry.peer), None)
        unions = {} if own is None else self._attention(own)
        return {
            "rows": case.rows, "keys": case.keys, "requests": case.requests,
            "union_tokens": unions, "left_out": self.left_out, "figures": self.figures,
        }  # fmt: skip

    def _attention(self, own: jax.Array) -> dict[str, float]:
        """Measures attention over the own selection and the models; how much neighbouring rows share in each."""
        inputs, case = self._inputs, self._inputs.case
        chosen = {OWN: own}
        if case.each >= selections.TILE:  # else there are no neighbours to share with
            chosen |= {name: selections.model(name, case.positions, inputs.config) for name in self._options.models}
        usable = self._usable("attention", ATTEND)
        self._run(entries.attending(inputs, usable, chosen, self._options.copy_rate))
        self._peer("row gather", lambda: entries.gathering(inputs, chosen), peers.blocker())
        if case.requests == 1:
            self._peer("cuDNN dense", lambda: entries.dense(inputs), peers.blocker())
        if case.requests == 1 and peers.is_short(inputs):
            self._peer("cuDNN masked", lambda: entries.masked(inputs, chosen), peers.blocker())
        if case.each < selections.TILE:
            return {}
        ratio = inputs.config.ratio
        return {name: round(selections.union_tokens(blocks, ratio), 1) for name, blocks in chosen.items()}

    def _usable(self, operation: str, table: dict[str, Implementation]) -> dict[str, Callable]:
        usable, blocked = programs.usable(table, self._inputs)
        self.left_out |= {f"{operation} by {name}": why for name, why in blocked.items()}
        return usable

    def _peer(self, name: str, make: Callable[[], list[Entry]], blocker: str | None) -> None:
        """Measures a peer; one that this machine, or this version of it, refuses is left out with its reason."""
        if blocker is None:
            try:
                self._run(make())
            except (RuntimeError, ValueError, NotImplementedError) as error:
                blocker = str(error).strip().split("\n")[0]
        if blocker is not None:
            self.left_out[name] = blocker

    def _run(self, wanted: list[Entry]) -> list[tuple[Entry, Any]]:
        """Measures; adds the figures whose results are right. Returns those results."""
        limits = {"repeat": self._options.repeat, "limit_s": self._options.limit_s}
        right = []
        for entry, time in zip(wanted, _measure.device_times([e.program for e in wanted], **limits), strict=True):
            try:
                entry.check(time.result)
            except JaxcpError as error:
                self.failures.append(str(error))
                continue
            right.append((entry, time.result))
            self.figures.append(_figure(entry, time))
            self._options.say(f"  {_label(entry)}: {time.us / 1e3:.3f} ms")
        return right


def _label(entry: Entry) -> str:
    return f"{entry.part}, {entry.name}" + (f", {entry.selection}" if entry.selection else "")


def _figure(entry: Entry, time: DeviceTime) -> dict[str, Any]:
    longest = sorted(time.kernels, key=lambda kernel: -kernel[1] * kernel[2])[:KERNELS]
    return {
        "part": entry.part, "name": entry.name, "peer": entry.peer, "selection": entry.selection,
        "us": round(time.us, 2), "floors_us": {name: round(us, 2) for name, us in entry.floors.items()},
        "of_floor": {name: round(time.us / us, 3) for name, us in entry.floors.items()},
        "temporary_bytes": time.temporary, "launches": time.launches,
        "kernels": [f"{count:g} x {name}: {us:.3f} us" for name, count, us in longest],
    }  # fmt: skip
