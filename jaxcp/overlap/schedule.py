"""What a compiled program does while its collectives are under way, read from its scheduled HLO.

XLA fixes the order of operations when it compiles, and prints it: the text of a computation is its schedule. A
collective that runs behind other work stands there as a start and a done with that work between them.
"""

import dataclasses
import itertools
import re
from typing import Any

from jaxcp.overlap.hlo import Instruction, Operation, Program, parsed, scheduled_text

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a schedule.

    Attributes:
      name: in the program's text; of the start, if there is one.
      kind: "all-gather", ...
      shape: of the result, such as "bf16[8192,1024]".
      key: its combiner key, or None.
      computation: in which it stands.
      times: how often a run executes it: the trip counts of the loops around it; None if one is unknown.
      asynchronous: whether it starts and ends at different places.
      behind: the operations between start and end, in order; () if it is waited for.
      consumers: the operations that read the result, in order.
      following: the operation after the end; None if it is the last.
    """

    name: str
    kind: str
    shape: str
    key: str | None
    computation: str
    times: int | None
    asynchronous: bool
    behind: tuple[Operation, ...]
    consumers: tuple[Operation, ...]
    following: Operation | None

    def __str__(self):
        loop = "" if self.times == 1 else f"{'?' if self.times is None else self.times} x "
        work = "nothing" if not self.behind else _summary(self.behind)
        how = f"behind {work}" if self.asynchronous else "waited for"
        return f"{loop}{self.kind} {self.shape}: {how}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of a program, in the order of its schedule.

    Attributes:
      collectives: loops' bodies before the computation that runs them, as in the text.
    """

    collectives: tuple[Collective, ...]

    def __str__(self):
        return "\n".join(str(c) for c in self.collectives) or "no collective"


def report(compiled: Any) -> Report:
    """Which collectives of a compiled program run behind what.

        print(jaxcp.overlap.report(jax.jit(step).lower(*arguments).compile()))

    Args:
      compiled: a compiled JAX program, or its text.

    Raises:
      TypeError, ValueError: no text, or one without a schedule.
    """
    program = parsed(scheduled_text(compiled))
    times = _times(program)
    found = []
    for name, instructions in program.items():
        found += [c for i in range(len(instructions)) if (c := _collective(name, instructions, i, times[name]))]
    return Report(tuple(found))


def _times(program: Program) -> dict[str, int | None]:
    """How often each computation runs: the product of the trip counts of the loops around it."""
    loops = {}
    for name, instructions in program.items():
        for instruction in instructions:
            if instruction.operation.kind == "while":
                count = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', instruction.text)
                for body in re.findall(r"body=%?([\w.\-]+)", instruction.text):
                    loops[body] = name, int(count[1]) if count else None

    def of(name):
        if name not in loops:
            return 1
        outer, count = loops[name]
        around = of(outer)
        return None if count is None or around is None else count * around

    return {name: of(name) for name in program}


def _collective(computation: str, instructions: list[Instruction], at: int, times: int | None) -> Collective | None:
    """The collective that instruction `at` is or starts."""
    first = instructions[at]
    kind = first.operation.kind.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    end = at
    if first.operation.kind != kind:
        ends = (i for i in range(at, len(instructions)) if first.operation.name in instructions[i].operands)
        end = next(i for i in ends if instructions[i].operation.kind.endswith("-done"))
    work = [i.operation for i in instructions[at + 1 : end] if i.costs]
    following = next((i.operation for i in instructions[end + 1 :] if i.costs), None)
    key = re.search(r'combiner_key="([^"]*)"', first.text)
    return Collective(
        first.operation.name,
        kind,
        re.sub(r"\{[^}]*\}", "", instructions[end].shape),
        key and key[1],
        computation,
        times,
        end != at and bool(work),
        tuple(work),
        tuple(_readers(instructions, end)),
        following,
    )


def _readers(instructions: list[Instruction], at: int):
    """The operations that read instruction `at`, directly or through a view of it."""
    held: dict[str, set[int] | None] = {instructions[at].operation.name: None}  # None: it; else a tuple's elements
    for instruction in instructions[at + 1 :]:
        name, kind = instruction.operation.name, instruction.operation.kind
        read = [operand for operand in instruction.operands if operand in held]
        if not read:
            continue
        if instruction.costs:
            yield instruction.operation
        elif kind == "tuple":
            held[name] = {i for i, operand in enumerate(instruction.operands) if operand in held}
        elif kind == "get-tuple-element" and (elements := held[read[0]]) is not None:
            index = re.search(r"index=(\d+)", instruction.text)
            if index is None or int(index[1]) in elements:
                held[name] = None
        else:
            held[name] = held[read[0]]


def _summary(operations: tuple[Operation, ...]) -> str:
    """Their origins in order, repeated ones counted."""
    runs = [(what, len(list(group))) for what, group in itertools.groupby(o.what for o in operations)]
    return ", ".join(what if n == 1 else f"{what} x {n}" for what, n in runs)
