"""What runs behind the gathers of context-parallel prefill, or of any compiled program: a table of `overlap.report`."""

import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxcp import overlap
from jaxcp.bench.prefill import ranks
from jaxcp.bench.prefill.cases import CASES, SMALL, SMALL_CASES
from jaxcp.bench.prefill.whole import make_whole
from jaxcp.errors import BackendError, invalid
from jaxcp.qsa import QSAConfig


def main(
    *, text: Path | None, cp: int | None, schedules: Sequence[str] | None, layers: int, small: bool, as_json: bool
) -> None:
    """Prints the report of a program's text; or of prefill on the devices here, one for each schedule.

    Raises:
      ValueError: no text of a compiled program, unknown schedules.
      BackendError: no GPU for the model's sizes.
    """
    reports = {text.name: overlap.report(text.read_text())} if text else prefill_reports(cp, schedules, layers, small)
    if as_json:
        print(json.dumps({name: facts(report) for name, report in reports.items()}))
    else:
        console = Console()
        console.print(table(reports))


def prefill_reports(
    cp: int | None, schedules: Sequence[str] | None, layers: int, small: bool
) -> dict[str, overlap.Report]:
    """Reports of `layers` layers of prefill over `cp` devices, by schedule; the 8K batch, or a small one."""
    if (platform := jax.default_backend()) != "gpu" and not small:
        raise BackendError(
            f"bench overlap: the layers are those of a model, for GPUs, and jax runs on {platform!r} here. --small "
            "takes sizes that suit it; a compiled program's text can be read anywhere."
        )
    if unknown := set(schedules or ()) - overlap.SCHEDULES.keys():
        raise invalid("schedules", sorted(unknown), f"some of {list(overlap.SCHEDULES)}", "They order the gathers.")
    config, case = (SMALL, SMALL_CASES["96"]) if small else (QSAConfig.flash_next(), CASES["8K"])
    dealt = ranks.make_ranks(make_whole(case, config, layers, "bfloat16"), cp or min(8, jax.device_count()))
    found = {}
    for schedule in schedules or overlap.SCHEDULES:
        program = ranks.program(dealt, schedule)
        found[schedule] = overlap.report(jax.jit(program.fn, donate_argnums=0).lower(*program.args).compile())
    return found


def facts(report: overlap.Report) -> list[dict[str, Any]]:
    """Every collective of a schedule for programs; `behind` counts operations by kind."""
    return [
        {
            "kind": c.kind, "shape": c.shape, "times": c.times, "asynchronous": c.asynchronous,
            "behind": dict(collections.Counter(operation.kind for operation in c.behind)),
        }
        for c in report.collectives
    ]  # fmt: skip


def table(reports: Mapping[str, overlap.Report]) -> Table:
    """Every collective of every program, in the order of its schedule."""
    shown = Table("program", "collective", "result", "times", "runs")
    for name, report in reports.items():
        for c in report.collectives:
            work = ", ".join(f"{count} {kind}" for kind, count in collections.Counter(o.kind for o in c.behind).items())
            how = f"behind {work or 'nothing'}" if c.asynchronous else "waited for"
            shown.add_row(name, c.kind, c.shape, "?" if c.times is None else str(c.times), how)
        if not report.collectives:
            shown.add_row(name, "none", "", "", "")
    return shown
