"""What `jaxcp demo` shows of context-parallel QSA: a prefill over 8 ranks gives what one device gives, in every layout.

In float32, where ranks may round otherwise than one device: their products have other numbers of rows. Selections are
compared row by row, and outputs where the selections are equal. A row may select other blocks only if these score
within NEAR of the last block selected on one device; such rows are counted apart.
"""

import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxcp import overlap, qsa
from jaxcp.qsa.demo import SMALL, TOKENS, token_rows
from jaxcp.qsa.layer import prepare, products
from jaxcp.qsa.plan import LAYOUTS
from jaxcp.qsa.rope import table
from jaxcp.qsa.selection import scores
from jaxcp.topology import make_mesh

RANKS = 8
NEAR = 1e-4
"""Relative distance of scores below which float32 may order them either way."""

TOLERANCE = 2e-5
"""Relative to the largest output: some hundred roundings of 6e-8."""


class Comparison(NamedTuple):
    """One layout's prefill beside one device's.

    Attributes:
      layout: name of the layout.
      rows: token rows compared.
      wrong: of them, those whose selection differs by a block that is not near the cut.
      near: those whose selection differs, by blocks near the cut only.
      error: largest difference of outputs where the selections are equal, relative to the largest output.
      report: schedule of the compiled program.
    """

    layout: str
    rows: int
    wrong: int
    near: int
    error: float
    report: overlap.Report

    @property
    def equal(self) -> bool:
        """Whether they are equal; NaN is not."""
        return not self.wrong and self.error <= TOLERANCE


class Answer(NamedTuple):
    """A prefill's output [tokens, hidden] and selected blocks [tokens, k], in packed order."""

    y: np.ndarray
    blocks: np.ndarray


def run(config: qsa.QSAConfig = SMALL, tokens: int = TOKENS) -> bool:
    """Prefills on one device and over the ranks in every layout, prints a table; whether all are equal."""
    from rich.console import Console

    console, start = Console(file=sys.stdout), time.perf_counter()
    ranks = min(RANKS, jax.device_count())
    if ranks == 1:
        console.print(f"context-parallel QSA left out: 1 {jax.default_backend()} device here")
        return True
    comparisons = compare(config, tokens, ranks)
    _show(console, config, comparisons, f"QSA prefill of {tokens} tokens over {ranks} ranks, float32")
    console.print(f"{time.perf_counter() - start:.0f} s.")
    return all(c.equal for c in comparisons)


def _show(console, config: qsa.QSAConfig, comparisons: list[Comparison], title: str) -> None:
    from rich.table import Table

    shown = Table("layout", "rows", "selected alike", "near the cut", "largest error", "equal", title=title)
    for c in comparisons:
        alike, equal = c.rows - c.wrong - c.near, "yes" if c.equal else "[bold red]NO[/]"
        shown.add_row(c.layout, str(c.rows), str(alike), str(c.near), f"{c.error:.1e}", equal)
    console.print(shown)
    console.print(
        f"Equal: every row selects what it selects on one device, and outputs differ by at most {TOLERANCE:g} of the "
        f"largest. Rows that differ only in blocks that score within {NEAR:g} of the last one selected are counted "
        "apart. What the layer gathers, in the order of the compiled schedule:"
    )
    for c in comparisons:
        for place, gather in enumerate(c.report.collectives, 1):
            console.print(f"  {c.layout} {place}. {_content(gather, config)}: {gather}", soft_wrap=True)
    if not any(gather.asynchronous for c in comparisons for gather in c.report.collectives):
        console.print(f"On {jax.default_backend()} nothing runs behind a gather; on GPUs see docs/prefill.md.")


def _content(gather: overlap.Collective, config: qsa.QSAConfig) -> str:
    """What a gather holds, by the width of its rows."""
    widths = {"index keys": config.index_dim, "K and V": 2 * config.kv_heads * config.head_dim}
    return next((name for name, width in widths.items() if gather.shape.endswith(f",{width}]")), "unexpected")


def compare(config: qsa.QSAConfig, tokens: int, ranks: int = RANKS, schedule: str = "overlapped") -> list[Comparison]:
    """One request prefilled on one device and over the ranks, in every layout."""
    params = qsa.init_params(config, jax.random.key(0), "float32")
    x, mesh = token_rows(tokens, config.hidden).astype("float32"), make_mesh(ranks)
    alone, keys = on_one_device(params, x)
    found = []
    for layout in LAYOUTS:
        got, report = over_ranks(params, x, mesh, layout, schedule)
        differ = np.flatnonzero((got.blocks != alone.blocks).any(1))
        score = np.asarray(row_scores(params, x, keys, differ))
        pairs = zip(score, differ, alone.blocks[differ], got.blocks[differ], strict=True)
        near = sum(differ_at_the_cut(s[: (p + 1) // config.ratio], a, b) for s, p, a, b in pairs)
        same = np.delete(np.arange(tokens), differ)
        error = np.abs(got.y[same] - alone.y[same]).max(initial=0) / np.abs(alone.y).max()
        found.append(Comparison(layout, tokens, len(differ) - near, near, float(error), report))
    return found


def on_one_device(params: qsa.Params, x: Float[Array, "tokens hidden"]) -> tuple[Answer, Float[Array, "blocks dim"]]:
    """What one device gives, and the compressed index keys that it leaves in the cache."""
    cache = _cache(params.config, len(x))
    plan = qsa.plan([len(x)], cache=cache)
    result = qsa.prefill(params, plan.pad(x), cache, plan, return_selection=True)
    y, cache, blocks = result  # pyright: ignore[reportAssignmentType]
    qsa.check(cache)
    keys = cache.index[0, cache.page_table[0]].reshape(-1, params.config.index_dim)
    return _answer(y[: len(x)], blocks[: len(x)]), keys


def over_ranks(
    params: qsa.Params, x: Float[Array, "tokens hidden"], mesh: Mesh, layout: str, schedule: str
) -> tuple[Answer, overlap.Report]:
    """What the ranks of a mesh give together, and the schedule of the program."""

    def step(params, x, cache, plan):
        return qsa.prefill(params, x, cache, plan, axis_name="cp", schedule=schedule, return_selection=True)

    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("cp"))
    params, cache = jax.device_put((params, _cache(params.config, len(x))), everywhere)
    plan = qsa.plan([len(x)], cache=cache, cp=mesh.size, layout=layout, mesh=mesh)
    specs = {"in_specs": (P(), P("cp"), P(), P()), "out_specs": (P("cp"), P(), P("cp"))}
    program = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=2)
    arguments = params, jax.device_put(plan.shard(x), rows), cache, plan
    compiled = program.lower(*arguments).compile()
    y, cache, blocks = compiled(*arguments)
    qsa.check(cache)
    return _answer(*(plan.unshard(a)[: len(x)] for a in (y, blocks))), overlap.report(compiled)


def row_scores(params: qsa.Params, x: Array, keys: Array, rows: np.ndarray) -> Float[Array, "rows blocks"]:
    """Scores of all blocks, visible or not, for the given tokens."""
    angles = table(params.config, jnp.broadcast_to(jnp.asarray(rows, jnp.int32), (3, len(rows))), x.dtype)
    return scores(prepare(params, products(params, x[rows]), angles).index_q, keys)


def differ_at_the_cut(score: np.ndarray, want: np.ndarray, got: np.ndarray) -> bool:
    """Whether two selections of a row differ only by blocks that score within NEAR of the last one wanted.

    Args:
      score: [visible blocks].
      want, got: block ids, -1 behind.
    """
    gained, lost = np.setdiff1d(got, want), np.setdiff1d(want, got)
    differing = np.concatenate([gained, lost])
    if len(gained) != len(lost) or differing.min() < 0 or differing.max() >= len(score):
        return False
    cut = score[want[want >= 0]].min()
    return bool((np.abs(score[differing] - cut) <= NEAR * cut).all())


def _cache(config: qsa.QSAConfig, tokens: int) -> qsa.Cache:
    """An empty cache for one request of so many tokens."""
    return qsa.init_cache(config, requests=1, pages=1 + -(-tokens // 64), dtype="float32")


def _answer(y: Array, blocks: Array) -> Answer:
    return Answer(np.asarray(y), np.asarray(blocks))
