"""The figures of one rank's share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxcp.bench.prefill import checks, share
from jaxcp.bench.prefill.clocks import Forward
from jaxcp.bench.prefill.options import Options, clocked
from jaxcp.bench.prefill.published import beside
from jaxcp.bench.prefill.whole import Whole
from jaxcp.bench.qsa import floors, selections


def measured(whole: Whole, cp: int, selected: Sequence[str], options: Options) -> dict[str, Any]:
    """Figures over every selection; the first layer is checked before."""
    mine, config = share.make_share(whole, cp), options.config
    agreement = checks.first_layer_agrees(mine)
    exact = agreement.rows - agreement.other_rows
    options.say(f"  rank {mine.rank}: {exact} of {agreement.rows} rows select exactly what one device selects")
    forward, runs = None, []
    for name in selected:
        selection = share.selection(mine, name)
        program = share.stack(mine, selection)
        if forward is None:
            forward = Forward(program)
            options.say(f"  compiled in {forward.compile_s:.0f} s")
        else:
            forward.arguments(program)
        runs.append({"selection": name} | clocked(forward, options))
        runs[-1]["union_tokens"] = round(selections.union_tokens(selection, config.ratio), 1)
        options.say(f"  {name}: {runs[-1]['wall_ms']:.3f} ms a forward")
    assert forward is not None
    return {
        "case": whole.case.name, "lengths": whole.case.lengths, "prefix": whole.case.prefix, "cp": cp,
        "layers": options.layers, "rank": mine.rank, "rows": mine.rows, "agreement": dataclasses.asdict(agreement),
        "plan_us": round(share.plan_us(whole, cp), 1), "compile_s": round(forward.compile_s, 1),
        "temporary_bytes": forward.temporary_bytes, "runs": runs,
        "projections_floor_ms": floors.projections(mine.rows, config)["products"] / 1e3,
    } | beside(cp, whole.case.name)  # fmt: skip
