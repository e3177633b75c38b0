"""Selections to measure attention with: models of how much neighbouring rows share, and how much a selection does."""

from functools import partial as bind

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from jaxcp.qsa import QSAConfig
from jaxcp.qsa.selection import top_blocks

MODELS = {"shared": (1, 0.05), "drift": (1, 0.15), "loose": (1, 0.5), "random": (0, 1)}
"""Scores by model: a times uniform scores that runs of RUN rows share, plus b times uniform noise of each row."""

RUN = 32
TILE = 4
"""Rows whose union is counted."""

SCRATCH_BYTES = 256 << 20


def model(name: str, positions: np.ndarray, config: QSAConfig, seed: int = 1) -> Int32[Array, "rows k"]:
    """The `name` model's selection of rows at these positions: of the visible blocks those of the largest scores.

    Args:
      name: key of `MODELS`.
      positions: of each row in its request; -1 for a row that sees nothing.
      config: geometry.
      seed: of the scores.
    """
    rows, blocks = len(positions), (int(positions.max()) + 1) // config.ratio
    runs = -(-rows // RUN)
    visible = np.pad((positions + 1) // config.ratio, (0, runs * RUN - rows)).reshape(runs, RUN)
    shape = {"blocks": blocks, "k": min(config.selected_blocks, blocks)}
    keys = jax.random.split(jax.random.key(seed), runs)
    chosen = _model(keys, jax.device_put(visible.astype(np.int32)), *MODELS[name], **shape)
    return chosen[:rows]


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
