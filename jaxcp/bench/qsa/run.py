"""Runs the benchmark case by case and keeps its record."""

import os
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from jaxcp.bench import _measure
from jaxcp.bench.qsa import floors, selections
from jaxcp.bench.qsa.cases import Case
from jaxcp.bench.qsa.figures import Options, Session
from jaxcp.bench.qsa.table import table
from jaxcp.errors import JaxcpError, invalid
from jaxcp.layout import positive_int
from jaxcp.qsa import QSAConfig

SHARES = (Case(2048, 8192), Case(8192, 32768), Case(32768, 131072))
"""Prefill: a rank's share of context parallelism over four."""

WHOLE = Case(8192, 8192)
"""Prefill of a whole request on one device."""

STEPS = tuple(Case(requests, 131072, requests) for requests in (1, 16, 32))
"""Decode at 128K tokens."""

LIMIT_S = 0.3
"""Seconds, about, that the timed runs of one program take at most."""


def cases(rows: Iterable[int] | None = None, quick: bool = False) -> list[Case]:
    """The cases to measure: all, those of so many rows, or two small ones.

    Raises:
      ValueError: no case has so many rows.
    """
    known = [SHARES[0], STEPS[1]] if quick else [SHARES[1], *STEPS, SHARES[0], WHOLE, SHARES[2]]
    if rows is None:
        return known
    wanted = set(rows)
    if unknown := wanted - {case.rows for case in known}:
        raise invalid(
            "rows", sorted(unknown), f"some of {sorted({case.rows for case in known})}", "Each case has its rows."
        )
    return [case for case in known if case.rows in wanted]


def run(
    wanted: Sequence[Case] | None = None,
    *,
    config: QSAConfig | None = None,
    dtype: str = "bfloat16",
    models: Sequence[str] = tuple(selections.MODELS),
    repeat: int = 20,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures every case; returns the record that `output` also gets, after each case.

    Args:
      wanted: cases; all if None.
      config: geometry; the model's if None.
      dtype: of the layer.
      models: selections that attention is measured over, besides the layer's own.
      repeat: runs per measurement; medians are reported. Slow programs run less often.
      output: JSON file to write.
      console: where to print progress and the table; none if None.

    Raises:
      ValueError: a count that is not positive, an unknown model.
      BackendError: no GPU.
      JaxcpError: a result is wrong, or a case failed; such figures are not in the record, all others are.
    """
    positive_int("repeat", repeat)
    if unknown := set(models) - selections.MODELS.keys():
        raise invalid("models", sorted(unknown), f"some of {list(selections.MODELS)}", "Name models of selections.")
    config = config or QSAConfig.flash_next()
    console = console or Console(quiet=True)
    rate = _measure.copy_rate()
    options = Options(config, dtype, models, repeat, LIMIT_S, rate, console.print)
    recorded = _measure.record(_facts(config, dtype, rate))
    failures = []
    for case in cases() if wanted is None else wanted:
        console.print(f"{time.strftime('%T')} {case}")
        try:
            session = Session(case, options)
            recorded["cases"].append(_measured(session))
            recorded["cases"].sort(key=lambda c: (c["requests"] > 1 or c["rows"] == 1, c["rows"], c["keys"]))
            failures += session.failures
        except (RuntimeError, ValueError) as error:  # the other cases may still be had
            failures.append(f"bench qsa: {case} could not be measured: {error}")
        if output is not None:
            _measure.write(output, recorded)
    console.print(table(recorded))
    if failures:
        raise JaxcpError(" ".join(failures))
    return recorded


def _measured(session: Session) -> dict[str, Any]:
    with warnings.catch_warnings():  # the row gather is what such kernels are written in; jax will drop it some day
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return session.measure()


def _facts(config: QSAConfig, dtype: str, copy_rate: float) -> dict[str, Any]:
    return {
        "benchmark": "qsa", "dtype": dtype, "heads": config.heads, "kv_heads": config.kv_heads,
        "head_dim": config.head_dim, "index_heads": config.index_heads, "index_dim": config.index_dim,
        "hidden": config.hidden, "budget": config.budget, "ratio": config.ratio,
        "products_tflop_s": floors.PRODUCTS_PER_S / 1e12, "gather_tb_s": floors.GATHER_BYTES_PER_S / 1e12,
        "copy_rate_tb_s": copy_rate / 1e12, "cases": [],
    }  # fmt: skip
