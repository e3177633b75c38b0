"""`jaxcp plot record`: the picture of a record that a benchmark wrote before."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxcp.bench import plot, ranks_plot
from jaxcp.bench.prefill import plot as shares_plot
from jaxcp.bench.prefill import ranks_plot as prefill_ranks_plot
from jaxcp.bench.qsa import plot as qsa_plot
from jaxcp.errors import invalid

PICTURES: dict[str, Callable[[dict[str, Any], str | os.PathLike[str]], None]] = {
    "exchange": ranks_plot.draw,
    "prefill_ranks": prefill_ranks_plot.draw,
    "prefill_share": shares_plot.draw,
    "qsa": qsa_plot.draw,
}
"""Kind of record -> what draws it into a file."""


def draw(record: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draws the record in a JSON file into the file `path`.

    Raises:
      ValueError: no record of a kind that is drawn, or as `plot.check` does.
      OSError: the file cannot be read.
    """
    plot.check(path)
    try:
        read = json.loads(pathlib.Path(record).read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid("record", record, "a JSON file of a benchmark", str(error)) from error
    kind = read.get("benchmark") if isinstance(read, dict) else None
    if kind not in PICTURES:
        got = f"{record}, benchmark = {kind!r}"
        raise invalid("record", got, f"one of {sorted(PICTURES)}", "`jaxcp bench ... --output FILE` writes one.")
    PICTURES[kind](read, path)
