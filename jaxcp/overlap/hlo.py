"""Scheduled HLO as text, parsed as far as schedules need it: the operations of every computation, in order.

XLA fixes the order of operations when it compiles, and prints it: the text of a computation is its schedule.
"""

import dataclasses
import re
from typing import Any

from jaxcp.errors import invalid

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a schedule.

    Attributes:
      name: in the program's text.
      kind: its opcode: "fusion", "custom-call", "while", ...
      what: where it comes from: a custom call's target, otherwise the end of the traced name ("dot_general").
      traced: the traced name, `jax.named_scope`s included ("jit(f)/indexer/dot_general"); "" if it has none.
    """

    name: str
    kind: str
    what: str
    traced: str = ""


@dataclasses.dataclass
class Instruction:
    """An operation with its place in the program.

    Attributes:
      operation: what it is.
      shape: of its result, layouts included.
      operands: names of the operations that it reads.
      text: of the line, from the operands on.
    """

    operation: Operation
    shape: str
    operands: list[str]
    text: str

    @property
    def costs(self) -> bool:
        """Whether it takes time where it stands: neither a view nor the start or end of something asynchronous."""
        kind = self.operation.kind
        return kind not in _FREE and not kind.endswith(("-start", "-done"))


Program = dict[str, list[Instruction]]
"""Computation -> its instructions, in the order of the schedule; those it calls come before it."""


def scheduled_text(compiled: Any) -> str:
    """The text of a compiled program, or of what is one already.

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
    return text


def parsed(text: str) -> Program:
    """The instructions of every computation, in order."""
    program: Program = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = program.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            name, shape, kind, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest[: _closing(rest)])
            current.append(Instruction(_operation(name, kind, rest), shape, operands, rest))
    return program


def _closing(rest: str) -> int:
    """Where the parenthesis closes that was open before `rest`."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(rest)


def _operation(name: str, kind: str, rest: str) -> Operation:
    found = re.search(r'op_name="([^"]*)"', rest)
    traced = found[1] if found else ""
    if target := re.search(r'custom_call_target="([^"]*)"', rest):
        return Operation(name, kind, target[1], traced)
    return Operation(name, kind, traced.rsplit("/", 1)[-1] or kind, traced)


def executed(text: str, program: Program) -> list[str]:
    """The computations whose instructions a program runs one by one: its entry, and the bodies of its loops."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    found = [entry[1]] if entry else []
    for name in found:  # grows as loops are found
        for instruction in program[name]:
            if instruction.operation.kind == "while":
                found += re.findall(r"body=%?([\w.\-]+)", instruction.text)
    return found
