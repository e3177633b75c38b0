"""Reads the fused exchanges and what lies around them out of a compiled program's text."""

import re

INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, .*)?$")


def instructions(hlo: str) -> dict[str, tuple[str, str, list[str], str]]:
    """name -> (shape, opcode, operands, the rest), in the order of the text."""
    found = {}
    for line in hlo.splitlines():
        if match := INSTRUCTION.match(line):
            name, shape, opcode, operands, rest = match.groups()
            found[name] = (shape, opcode, re.findall(r"%([\w.\-]+)", operands), rest or "")
    return found


def exchanges(hlo: str, target: str = "jaxcp_fused") -> list[str]:
    """Names of the custom calls to `target`, in the order of the text: of the schedule, where it is scheduled."""
    return [
        name
        for name, (_, opcode, _, rest) in instructions(hlo).items()
        if opcode == "custom-call" and f'custom_call_target="{target}"' in rest
    ]


def token_sources(hlo: str, target: str = "jaxcp_fused") -> list[str | None]:
    """For each exchange, the exchange whose token it takes; None for the first of a chain."""
    table, calls = instructions(hlo), exchanges(hlo, target)
    sources = []
    for call in calls:
        token = table[call][2][2]
        shape, opcode, operands, rest = table[token]
        linked = opcode == "get-tuple-element" and operands[0] in calls and "index=1" in rest
        assert shape.startswith("u32[1]"), f"{call} takes a token of {shape}"
        sources.append(operands[0] if linked else None)
    return sources


def assert_one_chain(hlo: str, calls: int, target: str = "jaxcp_fused") -> None:
    """Each of `calls` exchanges takes the token that the exchange before it made."""
    names = exchanges(hlo, target)
    assert len(names) == calls
    assert token_sources(hlo, target) == [None, *names[:-1]]
