"""The parts of a QSA layer that operations and kernels belong to."""

import re
from collections.abc import Mapping

from jaxcp.bench.trace import Launch
from jaxcp.overlap.hlo import Operation, Program
from jaxcp.overlap.schedule import COLLECTIVES
from jaxcp.qsa import scopes

PARTS = {
    "projections": "projections",
    "indexer": "scoring + selection",
    "attention": "attention",
    "gathers": "gathers",
    "rest": "the rest",
}
"""Part -> what it is called; the rest is norms, rotations, compression and cache."""

_SCOPES = {
    scopes.PROJECTIONS: "projections",
    scopes.INDEXER: "indexer",
    scopes.ATTENTION: "attention",
    scopes.GATHERS: "gathers",
}
_KERNELS = {
    "gathers": ("nccl", "AllGather"),
    "indexer": ("store_scores", "stream_blocks", "top_blocks"),
    "attention": ("attend_", "build_lists", "merge_parts"),  # and prepare_heads for queries, by its scope only
    "projections": ("nvjet", "gemm", "cutlass"),
}
"""Parts of names of kernels: what is left where a profile says nothing about operations."""


def of_operation(operation: Operation) -> str:
    """The part by the scope in which it was traced, or by its being a collective."""
    if operation.kind.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return "gathers"
    return next((part for scope, part in _SCOPES.items() if scope in operation.traced), "rest")


def of_program(program: Program) -> dict[str, str]:
    """Operation -> part, of all operations of a compiled program.

    XLA does not say where the fusions come from by which a product reads a slice in place: their contents do.
    """
    found = {i.operation.name: of_operation(i.operation) for each in program.values() for i in each}
    for instruction in (i for each in program.values() for i in each if not i.operation.traced):
        called = re.search(r"calls=%?([\w.\-]+)", instruction.text)
        inside = {found[i.operation.name] for i in program.get(called[1], [])} - {"rest"} if called else set()
        if len(inside) == 1:
            found[instruction.operation.name] = inside.pop()
    return found


def of_launch(launch: Launch, program: Mapping[str, str] | None = None) -> str:
    """The part of a kernel: that of its operation in `program`; else by its traced name; else by its own name."""
    if program and launch.operation in program:
        return program[launch.operation]
    for scope, part in _SCOPES.items():
        if scope in launch.traced:
            return part
    return next((part for part, words in _KERNELS.items() if any(w in launch.name for w in words)), "rest")
