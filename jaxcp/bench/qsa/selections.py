"""Selections to measure attention with: models of how much neighbouring rows share, and how much a selection does."""

from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from jaxcp.bench.qsa.cases import Inputs
from jaxcp.qsa.selection import top_blocks

MODELS = {"shared": (1, 0.05), "drift": (1, 0.15), "loose": (1, 0.5), "random": (0, 1)}
"""Scores by model: a times uniform scores that runs of RUN rows share, plus b times uniform noise of each row."""

RUN = 32
TILE = 4
"""Rows whose union is counted."""

SCRATCH_BYTES = 256 << 20


def model(name: str, inputs: Inputs, seed: int = 1) -> Int32[Array, "rows k"]:
    """The `name` model's selection: of each row's visible blocks those of the largest scores."""
    case, config = inputs.case, inputs.config
    runs = -(-case.rows // RUN)
    visible = np.pad((case.positions + 1) // config.ratio, (0, runs * RUN - case.rows)).reshape(runs, RUN)
    shape = {"blocks": case.keys // config.ratio, "k": min(config.selected_blocks, case.keys // config.ratio)}
    keys = jax.random.split(jax.random.key(seed), runs)
    chosen = _model(keys, jax.device_put(visible.astype(np.int32)), *MODELS[name], **shape)
    return chosen[: case.rows]


@bind(jax.jit, static_argnames=("blocks", "k"))
def _model(keys, visible, a, b, *, blocks: int, k: int):
    def of_run(run):
        key, visible = run
        own, shared = jax.random.split(key)
        score = a * jax.random.uniform(shared, (blocks,)) + b * jax.random.uniform(own, (RUN, blocks))
        return top_blocks(score, visible, k)

    at_once = max(1, SCRATCH_BYTES // (RUN * blocks * 8))
    return lax.map(of_run, (keys, visible), batch_size=at_once).reshape(-1, k)


def union_tokens(blocks: Int32[Array, "rows k"], ratio: int) -> float:
    """Mean over rows of the tokens that TILE neighbouring rows select together, per row, tails left out."""
    return float(_union_blocks(blocks[: len(blocks) // TILE * TILE])) * ratio


@jax.jit
def _union_blocks(blocks):
    together = jnp.sort(blocks.reshape(len(blocks) // TILE, -1), axis=1)
    first = jnp.concatenate([jnp.ones_like(together[:, :1], bool), together[:, 1:] != together[:, :-1]], 1)
    return jnp.sum(first & (together >= 0), dtype=jnp.float32) / len(blocks)
