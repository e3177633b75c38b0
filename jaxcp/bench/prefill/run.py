"""Runs the benchmark case by case and keeps its record: one rank's share of every case, or all ranks."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxcp.bench import _measure
from jaxcp.bench.prefill import balance, balance_table, ranks, ranks_table, shares, table
from jaxcp.bench.prefill.cases import CASES, Case
from jaxcp.bench.prefill.options import Options
from jaxcp.bench.prefill.share import OWN
from jaxcp.bench.prefill.whole import Whole, make_whole
from jaxcp.bench.qsa import selections
from jaxcp.errors import JaxcpError, invalid
from jaxcp.layout import positive_int

RANKS = (4, 8)
SELECTIONS = (OWN, "random", "shared")
BALANCED_RANKS = (4,)
BALANCED_SELECTIONS = ("random", "shared")


def run_shares(
    wanted: Iterable[Case] | None = None,
    *,
    options: Options,
    cp: Sequence[int] = RANKS,
    selected: Sequence[str] = SELECTIONS,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures one rank's share of every case on one device; returns the record.

    On anything but a GPU there are no kernel times, and what is left says nothing about one.

    Args:
      wanted: cases; all if None.
      options: how to measure.
      cp: numbers of ranks.
      selected: what attention reads: "own", what the first layer selects, or models of `jaxcp bench qsa`.
      output: JSON file, written after each number of ranks of a case.
      console: where to print the table; none if None.

    Raises:
      ValueError: a count that is not positive, an unknown selection.
      JaxcpError: a result is wrong, or a case failed; such figures are not in the record, all others are.
    """
    _check_ranks(cp)
    _check_selected(selected)

    def measure(whole: Whole, cp: int) -> dict[str, Any]:
        return shares.measured(whole, cp, selected, options)

    return _run("prefill_share", wanted, cp, measure, options, output, console, table.table)


def run_balance(
    wanted: Iterable[Case] | None = None,
    *,
    options: Options,
    cp: Sequence[int] = BALANCED_RANKS,
    selected: Sequence[str] = BALANCED_SELECTIONS,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures every rank's share of every case on one device, cut evenly and by cost; returns the record.

    Arguments and errors are those of `run_shares`.
    """
    _check_ranks(cp)
    _check_selected(selected)

    def measure(whole: Whole, cp: int) -> dict[str, Any]:
        return balance.measured(whole, cp, selected, options)

    return _run("prefill_balance", wanted, cp, measure, options, output, console, balance_table.table)


def run_ranks(
    wanted: Iterable[Case] | None = None,
    *,
    options: Options,
    cp: Sequence[int],
    ways: Sequence[str] = ranks.WAYS,
    output: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures all ranks of every case, each on a device of its own; returns the record.

    Args:
      wanted: cases; all if None.
      options: how to measure.
      cp: numbers of ranks, none greater than the number of devices.
      ways: when and how K and V travel, some of `ranks.WAYS`.
      output, console: see `run_shares`.

    Raises:
      ValueError: too few devices, an unknown way.
      JaxcpError: a result is wrong, or a case failed; such figures are not in the record, all others are.
    """
    _check_ranks(cp)
    if unknown := set(ways) - set(ranks.WAYS):
        raise invalid("ways", sorted(unknown), f"some of {list(ranks.WAYS)}", "They say when K and V travel.")

    def measure(whole: Whole, cp: int) -> dict[str, Any]:
        return ranks.measured(whole, cp, ways, options)

    return _run("prefill_ranks", wanted, cp, measure, options, output, console, ranks_table.table)


def _run(
    name: str,
    wanted: Iterable[Case] | None,
    cp: Sequence[int],
    measure: Callable[[Whole, int], dict[str, Any]],
    options: Options,
    output: str | os.PathLike[str] | None,
    console: Console | None,
    table_of: Callable[[dict[str, Any]], Table],
) -> dict[str, Any]:
    """One case after another; whatever fails costs only itself."""
    recorded, failures = _measure.record({"benchmark": name} | options.facts()), []
    for case in CASES.values() if wanted is None else wanted:
        try:
            options.say(f"{case.name}: on one device")
            whole = make_whole(case, options.config, options.layers, options.dtype)
        except (RuntimeError, ValueError) as error:
            failures.append(f"bench prefill: {case.name} could not be measured: {error}")
            continue
        for count in cp:
            try:
                options.say(f"{case.name}: {count} ranks")
                recorded["cases"].append(measure(whole, count))
            except (RuntimeError, ValueError) as error:
                failures.append(f"bench prefill: {case.name} with {count} ranks could not be measured: {error}")
            if output is not None:
                _measure.write(output, recorded)
    if console is not None:
        console.print(table_of(recorded))
    if failures:
        raise JaxcpError(" ".join(failures))
    return recorded


def _check_ranks(cp: Sequence[int]) -> None:
    for count in cp:
        if positive_int("cp", count) == 1:
            raise invalid("cp", 1, "two ranks or more", "One rank is the plain program: jaxcp bench qsa.")


def _check_selected(selected: Sequence[str]) -> None:
    if unknown := set(selected) - {OWN, *selections.MODELS}:
        raise invalid("selected", sorted(unknown), f"some of {[OWN, *selections.MODELS]}", "Name selections.")
