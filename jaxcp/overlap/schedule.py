"""What a compiled program does while its collectives are under way, read from its scheduled HLO.

XLA fixes the order of operations when it compiles, and prints it: the text of a computation is its schedule. A
collective that runs behind other work stands there as a start and a done with that work between them.
"""

import dataclasses
import itertools
import re
from typing import Any

from jaxcp.errors import invalid

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a schedule.

    Attributes:
      name: in the program's text.
      kind: its opcode: "fusion", "custom-call", "while", ...
      what: where it comes from: a custom call's target, otherwise the end of the traced name ("dot_general").
    """

    name: str
    kind: str
    what: str


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


@dataclasses.dataclass
class _Instruction:
    operation: Operation
    shape: str
    operands: list[str]
    text: str


def report(compiled: Any) -> Report:
    """Which collectives of a compiled program run behind what.

        print(jaxcp.overlap.report(jax.jit(step).lower(*arguments).compile()))

    Args:
      compiled: a compiled JAX program, or its text.

    Raises:
      TypeError, ValueError: no text, or one without a schedule.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() if hasattr(compiled, "as_text") else None
    if text is None:
        raise invalid(
            "compiled", type(compiled).__name__, "jit(f).lower(...).compile()", "Compile it first.", TypeError
        )
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise invalid("compiled", "HLO without a schedule", "a compiled program", "Lowered programs have no order yet.")
    program = _parsed(text)
    times = _times(program)
    found = []
    for name, instructions in program.items():
        found += [c for i in range(len(instructions)) if (c := _collective(name, instructions, i, times[name]))]
    return Report(tuple(found))


def _parsed(text: str) -> dict[str, list[_Instruction]]:
    """The instructions of every computation, in order."""
    program: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = program.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            name, shape, kind, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest[: _closing(rest)])
            current.append(_Instruction(Operation(name, kind, _what(kind, rest)), shape, operands, rest))
    return program


def _closing(rest: str) -> int:
    """Where the parenthesis closes that was open before `rest`."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(rest)


def _what(kind: str, rest: str) -> str:
    if target := re.search(r'custom_call_target="([^"]*)"', rest):
        return target[1]
    traced = re.search(r'op_name="([^"]*)"', rest)
    return traced[1].rsplit("/", 1)[-1] if traced else kind


def _times(program: dict[str, list[_Instruction]]) -> dict[str, int | None]:
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


def _collective(computation: str, instructions: list[_Instruction], at: int, times: int | None) -> Collective | None:
    """The collective that instruction `at` is or starts."""
    first = instructions[at]
    kind = first.operation.kind.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    end = at
    if first.operation.kind != kind:
        ends = (i for i in range(at, len(instructions)) if first.operation.name in instructions[i].operands)
        end = next(i for i in ends if instructions[i].operation.kind.endswith("-done"))
    work = [i.operation for i in instructions[at + 1 : end] if _costs(i)]
    following = next((i.operation for i in instructions[end + 1 :] if _costs(i)), None)
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


def _costs(instruction: _Instruction) -> bool:
    return instruction.operation.kind not in _FREE and not instruction.operation.kind.endswith(("-start", "-done"))


def _readers(instructions: list[_Instruction], at: int):
    """The operations that read instruction `at`, directly or through a view of it."""
    names = {instructions[at].operation.name}
    for instruction in instructions[at + 1 :]:
        if names.intersection(instruction.operands):
            if _costs(instruction):
                yield instruction.operation
            else:
                names.add(instruction.operation.name)


def _summary(operations: tuple[Operation, ...]) -> str:
    """Their origins in order, repeated ones counted."""
    runs = [(what, len(list(group))) for what, group in itertools.groupby(o.what for o in operations)]
    return ", ".join(what if n == 1 else f"{what} x {n}" for what, n in runs)
