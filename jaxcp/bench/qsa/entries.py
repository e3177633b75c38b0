"""What is measured of a case: programs, the checks of their results, their floors, their places in the record."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any

import jax

from jaxcp.bench._measure import Program
from jaxcp.bench.qsa import checks, floors, peers, programs
from jaxcp.bench.qsa.cases import Inputs

OWN = "own"
"""The selection that the layer makes itself; the others are models."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One program of a case.

    Attributes:
      part: "select" (scoring included), "attend", "mixer", "projections" or "layer".
      name: implementation or peer.
      program: to measure.
      check: raises JaxcpError if the program's result is wrong.
      floors: µs by name.
      selection: that attention is over; None where it does not matter.
      peer: whether it is something else than an implementation of the part.
    """

    part: str
    name: str
    program: Program
    check: Callable[[Any], None]
    floors: Mapping[str, float]
    selection: str | None = None
    peer: bool = False


def selecting(inputs: Inputs, functions: Mapping[str, Callable], copy_rate: float) -> list[Entry]:
    """Scoring and selection by every implementation."""
    bounds = _floors(inputs, copy_rate)["select"]
    return [
        Entry("select", name, programs.select(f, inputs), bind(checks.selection, name, inputs), bounds)
        for name, f in functions.items()
    ]


def ranking(inputs: Inputs) -> list[Entry]:
    """The peer of the selection that everybody has; it gets the scores."""
    program = peers.top_k(peers.all_scores(inputs), _most_blocks(inputs))
    return [Entry("select", "lax.top_k", program, bind(checks.ranked, "lax.top_k", inputs), {}, peer=True)]


def flashinfer(inputs: Inputs) -> list[Entry]:
    """FlashInfer's selection, of scores that it gets."""
    name, visible = "FlashInfer top-k", peers.visible_blocks(inputs)
    program = peers.flashinfer_top_k(peers.all_scores(inputs), visible, _most_blocks(inputs))
    return [Entry("select", name, program, bind(checks.selection, name, inputs), {}, peer=True)]


def attending(
    inputs: Inputs, functions: Mapping[str, Callable], chosen: Mapping[str, jax.Array], copy_rate: float
) -> list[Entry]:
    """Attention by every implementation over every selection; XLA's, whose time does not depend on it, over the own."""
    bounds = _floors(inputs, copy_rate)["attend"]
    entries = []
    for name, f in functions.items():
        make = programs.attend(f, inputs)
        for selection, blocks in chosen.items():
            if name != "xla" or selection == OWN:
                check = bind(checks.attention, name, inputs, blocks)
                entries.append(Entry("attend", name, make(blocks), check, bounds, selection))
    return entries


def gathering(inputs: Inputs, chosen: Mapping[str, jax.Array]) -> list[Entry]:
    """Peers that gather row by row: a kernel written for it, and ours told that rows have no neighbours."""
    make = peers.gather(inputs, peers.tuned(inputs, chosen[OWN]))
    entries = [
        _attending("row gather", make(blocks), inputs, blocks, selection) for selection, blocks in chosen.items()
    ]
    if inputs.case.each > 1:
        alone = peers.alone(inputs, chosen[OWN])
        entries.append(_attending("cuda, rows alone", alone, inputs, chosen[OWN], OWN))
    return entries


def _attending(name: str, program: Program, inputs: Inputs, blocks: jax.Array, selection: str) -> Entry:
    return Entry("attend", name, program, bind(checks.attention, name, inputs, blocks), {}, selection, peer=True)


def dense(inputs: Inputs) -> list[Entry]:
    """cuDNN over all keys."""
    bounds = floors.dense(inputs.case, inputs.config)
    check = bind(checks.dense, "cuDNN dense", inputs)
    return [Entry("attend", "cuDNN dense", peers.dense(inputs), check, bounds, peer=True)]


def masked(inputs: Inputs, chosen: Mapping[str, jax.Array]) -> list[Entry]:
    """cuDNN over all keys with the selection as its mask; its time does not depend on the selection."""
    return [_attending("cuDNN masked", peers.masked(inputs)(chosen[OWN]), inputs, chosen[OWN], OWN)]


def whole(inputs: Inputs, copy_rate: float) -> list[Entry]:
    """What contains the parts: mixer, projections, layer."""
    bounds = _floors(inputs, copy_rate)
    products = floors.projections(inputs.case.rows, inputs.config)
    return [
        Entry("mixer", "auto", programs.mixer(inputs), bind(checks.mixer, "mixer", inputs), bounds["mixer"], OWN),
        Entry("projections", "xla", programs.projections(inputs), lambda _: None, products),
        Entry("layer", "auto", programs.layer(inputs), bind(checks.layer, "layer", inputs), {}, OWN),
    ]


def _most_blocks(inputs: Inputs) -> int:
    return min(inputs.config.selected_blocks, inputs.case.keys // inputs.config.ratio)


def _floors(inputs: Inputs, copy_rate: float) -> dict[str, dict[str, float]]:
    """Floors of selection, attention and both: reads where each request has a row or a few, work otherwise."""
    case, config, itemsize = inputs.case, inputs.config, inputs.params.dtype.itemsize
    if case.each <= inputs.cache.max_query_tokens:
        return {part: {"read once": us} for part, us in floors.reads(case, config, itemsize, copy_rate).items()}
    return {
        "select": floors.scoring(case, config), "attend": floors.attention(case, config, itemsize), "mixer": {},
    }  # fmt: skip
