"""A record of the benchmark as lines for people, in a terminal or a README."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table

PARTS = {
    "select": "scoring + selection",
    "attend": "attention",
    "mixer": "mixer",
    "projections": "projections",
    "layer": "whole layer",
}
HEADING = ("rows / keys", "part", "selection", "ms", "by", "beside it, ms", "to floor", "MiB")


class Line(NamedTuple):
    """One part of one case, best implementation in front.

    Attributes:
      case: rows and keys.
      part: of `PARTS`.
      selection: that attention is over.
      ms: of the fastest implementation.
      name: of the fastest implementation.
      beside: other implementations and peers.
      floor: quotients of `ms` and each floor.
      mib: temporary memory.
    """

    case: str
    part: str
    selection: str
    ms: str
    name: str
    beside: str
    floor: str
    mib: str


def lines(record: dict[str, Any]) -> Iterator[Line]:
    """Lines of every case, in the order of `PARTS` and of the measurement."""
    for case in record["cases"]:
        for part in PARTS:
            own = [f for f in case["figures"] if f["part"] == part and not f["peer"]]
            for selection in dict.fromkeys(f["selection"] for f in own):
                yield _line(case, part, selection, own)


def table(record: dict[str, Any]) -> Table:
    """The record for a terminal, and what was left out."""
    environment = record["environment"]
    out = Table(
        *HEADING,
        title=f"QSA layer on {environment['device_kind']}, jax {environment['versions']['jax']}",
        caption=left_out(record) or None,
    )
    for line in lines(record):
        out.add_row(*line)
    return out


def left_out(record: dict[str, Any]) -> str:
    """What could not be measured and why; "" if nothing."""
    reasons = {name: why for case in record["cases"] for name, why in case["left_out"].items()}
    return "; ".join(f"left out: {name} ({why})" for name, why in reasons.items())


def _line(case: dict[str, Any], part: str, selection: str | None, own: list[dict[str, Any]]) -> Line:
    ranked = sorted((f for f in own if f["selection"] == selection), key=lambda f: f["us"])
    best, others = ranked[0], ranked[1:]
    peers = [f for f in case["figures"] if f["part"] == part and f["peer"] and f["selection"] in (None, selection)]
    return Line(
        case_name(case), PARTS[part], _selection(case, selection), _ms(best["us"]), best["name"],
        ", ".join(f"{f['name']} {_ms(f['us'])}" for f in (*others, *peers)),
        ", ".join(f"{ratio:.2f} {name}" for name, ratio in best["of_floor"].items()),
        f"{best['temporary_bytes'] / 2**20:.0f}",
    )  # fmt: skip


def case_name(case: dict[str, Any]) -> str:
    """rows / keys, or what is decoded."""
    if case["requests"] > 1 or case["rows"] == 1:
        return f"decode {case['requests']} x {case['keys']}"
    return f"{case['rows']} / {case['keys']}"


def _selection(case: dict[str, Any], selection: str | None) -> str:
    if selection is None:
        return ""
    union = case["union_tokens"].get(selection)
    return selection if union is None else f"{selection} ({union:.0f})"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g}"
