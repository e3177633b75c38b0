"""What levelling the ranks' costs gains: a forward takes as long as its slowest rank, so all ranks' shares are timed.

Each runs alone, its peers' rows there already (`jaxcp.bench.prefill.share`), in one program for all ranks and all cuts:
cuts are data, and by whatever cost a batch is cut, its ranks hold as many rows.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxcp import qsa
from jaxcp.bench.prefill import checks, share
from jaxcp.bench.prefill.clocks import Forward
from jaxcp.bench.prefill.options import Options, clocked
from jaxcp.bench.prefill.share import OWN, Share
from jaxcp.bench.prefill.whole import Whole
from jaxcp.bench.qsa import selections
from jaxcp.layout import Zigzag
from jaxcp.qsa.balance import cuts

EVEN, FLOP, MEASURED = "even", "FLOP", "measured"
"""Cuts: into blocks of equal length, and by cost: FLOP, or what the even shares' kernels took."""


def measured(whole: Whole, cp: int, selected: Sequence[str], options: Options) -> dict[str, Any]:
    """Figures of every cut over every selection; every rank's first layer is checked before.

    A cut by measured cost needs kernel times; without them it is left out.
    """
    config, plan = options.config, whole.case.plan(whole.cache, cp)
    flop = qsa.Cost.of(config)
    shares = {EVEN: _shares(whole, plan, None, options), FLOP: _shares(whole, plan, flop, options)}
    forward, runs = None, []
    for name in selected:
        blocks = whole.blocks if name == OWN else selections.model(name, whole.case.positions, config)
        forward = forward or Forward(share.stack(shares[EVEN][0], share.dealt(shares[EVEN][0], blocks)))
        even = _run(shares[EVEN], name, EVEN, flop, blocks, forward, options)
        of_selection = [even, _run(shares[FLOP], name, FLOP, flop, blocks, forward, options)]
        if (cost := fitted(config, even["ranks"])) is not None:
            own = _shares(whole, plan, cost, options)
            of_selection.append(_run(own, name, MEASURED, cost, blocks, forward, options))
        runs += [run | gains(run, even) for run in of_selection]
    assert forward is not None
    return {
        "case": whole.case.name, "lengths": whole.case.lengths, "prefix": whole.case.prefix, "cp": cp,
        "layers": options.layers, "rows": plan.local_rows, "compile_s": round(forward.compile_s, 1), "runs": runs,
    }  # fmt: skip


def cut(whole: Whole, plan: qsa.Plan, cost: qsa.Cost | None) -> qsa.Plan:
    """An even plan of the case cut by a cost, or evenly; all such plans are of one program."""
    lengths, prefix = np.array(whole.case.lengths), np.array(whole.case.prefix)
    starts = Zigzag(plan.cp).split(lengths).starts if cost is None else cuts(cost, lengths, prefix, plan.cp)
    padded = np.pad(starts.astype(np.int32), [(0, plan.table.shape[1] - len(starts)), (0, 0)])
    return dataclasses.replace(plan, starts=jax.device_put(padded))


def fitted(config: qsa.QSAConfig, ranks: Sequence[Mapping[str, Any]]) -> qsa.Cost | None:
    """Cost in µs of a layer, by least squares of ranks' kernel times; None without such times.

    Args:
      config: geometry.
      ranks: each with "tokens" and "blocks", what its rows attend to and score, and "layer_ms" by part.
    """
    if not all("layer_ms" in rank for rank in ranks):
        return None

    def slope(count: str, part: str) -> float:
        return sum(1e3 * r["layer_ms"][part] * r[count] for r in ranks) / sum(r[count] ** 2 for r in ranks)

    return qsa.Cost(slope("tokens", "attention"), slope("blocks", "indexer"), config.budget, config.ratio)


def gains(run: Mapping[str, Any], even: Mapping[str, Any]) -> dict[str, Any]:
    """The slowest rank's ms, the ranks' mean, slowest over mean, and slowest of the even cuts over slowest.

    Of a layer's mixer and the forward, by kernel times where every rank has them, and of the forward's wall time.
    """
    found, ranks = {}, [*run["ranks"], *even["ranks"]]
    for what, clock in (("mixer", "mixer_ms"), ("forward", "device_ms"), ("wall", "wall_ms")):
        if all(clock in rank for rank in ranks):
            times, before = ([rank[clock] for rank in of["ranks"]] for of in (run, even))
            slowest, mean = max(times), statistics.mean(times)
            found[what] = {
                "max_ms": slowest, "mean_ms": round(mean, 4), "imbalance": round(slowest / mean, 4),
                "gain": round(max(before) / slowest, 4),
            }  # fmt: skip
    return found


def _shares(whole: Whole, plan: qsa.Plan, cost: qsa.Cost | None, options: Options) -> list[Share]:
    """All ranks' shares of a cut, checked."""
    shares = share.make_shares(whole, cut(whole, plan, cost))
    agreements = [checks.first_layer_agrees(of) for of in shares]
    exact, rows = (sum(counts) for counts in zip(*((a.rows - a.other_rows, a.rows) for a in agreements), strict=True))
    options.say(f"  {exact} of {rows} rows select exactly what one device selects")
    return shares


def _run(
    shares: Sequence[Share], name: str, way: str, cost: qsa.Cost, blocks: Array, forward: Forward, options: Options
) -> dict[str, Any]:
    """Every rank's times over a selection [tokens, k], and what it has to do."""
    case, plan = shares[0].whole.case, shares[0].plan
    work = {
        count: case.costs(dataclasses.replace(cost, token=token, block=1 - token), plan)
        for count, token in (("tokens", 1), ("blocks", 0))
    }
    ranks = []
    for mine in shares:
        forward.arguments(share.stack(mine, share.dealt(mine, blocks)))
        counts = {count: int(of_ranks[mine.rank]) for count, of_ranks in work.items()}
        ranks.append({"rank": mine.rank, "rows": mine.rows} | counts | clocked(forward, options))
    slowest = max(rank["wall_ms"] for rank in ranks)
    options.say(f"  {name}, cut {way}: {slowest:.3f} ms a forward of the slowest rank")
    costs = case.costs(cost, plan)
    return {
        "selection": name, "cut": way, "cost": {"token": cost.token, "block": cost.block},
        "modelled_imbalance": round(float(costs.max() / costs.mean()), 4), "ranks": ranks,
    }  # fmt: skip
