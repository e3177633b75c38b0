"""The benchmark as the command line runs it: sizes, what the devices here allow, pictures, progress on stderr."""

import os
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from jaxcp.bench import plot as picture
from jaxcp.bench.prefill import plot as share_picture
from jaxcp.bench.prefill import ranks, ranks_plot, run
from jaxcp.bench.prefill.cases import CASES, SMALL, SMALL_CASES, named
from jaxcp.bench.prefill.options import Options
from jaxcp.errors import BackendError, invalid
from jaxcp.qsa import QSAConfig

FILE_WIDTH = 220
"""Columns of a table that is not for a terminal."""


def main(
    *,
    cases: Sequence[str] | None,
    cp: Sequence[int] | None,
    share: bool,
    balance: bool,
    selected: Sequence[str] | None,
    ways: Sequence[str] | None,
    output: str | os.PathLike[str] | None,
    plot: str | os.PathLike[str] | None,
    small: bool,
    **options: Any,
) -> None:
    """All ranks where there are devices for them, unless only shares are asked for; lists left out are whole.

    Raises:
      BackendError: no GPU for the model's sizes.
      ValueError: a picture of what is not drawn.
    """
    if plot is not None and balance:
        raise invalid("plot", plot, "no --balance with it", "What levelling gains is a table, and not drawn.")
    if plot is not None:
        picture.check(plot)
    if (platform := jax.default_backend()) != "gpu" and not small:
        raise BackendError(
            f"bench prefill: the layers are those of a model, for GPUs, and jax runs on {platform!r} here. "
            "--small shows the benchmark at work on sizes that suit it."
        )
    errors, out = Console(stderr=True), Console()
    if not out.is_terminal:
        out.width = FILE_WIDTH
    config = SMALL if small else QSAConfig.flash_next()
    how = Options(config, say=lambda line: errors.print(line, highlight=False, markup=False), **options)
    wanted, places = named(cases, SMALL_CASES if small else CASES), {"output": output, "console": out}
    if balance:
        selected = selected or run.BALANCED_SELECTIONS
        record = run.run_balance(wanted, options=how, cp=cp or run.BALANCED_RANKS, selected=selected, **places)
    elif share or jax.device_count() == 1:
        record = run.run_shares(wanted, options=how, cp=cp or run.RANKS, selected=selected or run.SELECTIONS, **places)
    else:
        count = [min(8, jax.device_count())]
        record = run.run_ranks(wanted, options=how, cp=cp or count, ways=ways or ranks.WAYS, **places)
    if plot is not None:
        (share_picture if record["benchmark"] == "prefill_share" else ranks_plot).draw(record, plot)
