"""A model on the ranks of a mesh axis: weights and cache in place, one program per kind of step.

Everything a step needs lives on the devices, in one donated `State`: a step is one dispatch, transfers nothing and
never retraces. The host reads what was emitted while the next step already runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcp import decode
from jaxcp.errors import invalid
from jaxcp.exchange import Exchange
from jaxcp.layout import Interleave, positive_int
from jaxcp.models import llama
from jaxcp.models.checkpoint import Checkpoint

Leaf = Any
"""An array, or its PartitionSpec."""

PAGE_SIZE = 16
PREFILL_ROWS = (16, 64, 128, 256, 512)
"""Tokens of a prompt per prefill program: the smallest that holds the prompt, else the largest, repeatedly."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "lengths", "filled", "limits", "cache"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class State:
    """Requests in flight.

    Attributes:
      tokens: int32 [requests, capacity], prompt and what was generated.
      lengths: int32 [requests], tokens known.
      filled: int32 [requests], tokens whose rows are in the cache; `lengths` - 1 once the prompt is prefilled.
      limits: int32 [requests], length at which a request ends.
      cache: keys and values, sharded over the axis; everything else is the same on all ranks.
    """

    tokens: Leaf
    lengths: Leaf
    filled: Leaf
    limits: Leaf
    cache: Any


class Runtime:
    """Weights and cache geometry of one model on one mesh axis.

    Args:
      checkpoint: the model.
      mesh: whose axis weights and cache are split over.
      requests: sequences decoded together.
      capacity: tokens of each, prompt, new and drafted ones included.
      axis_name: that axis.
    """

    def __init__(self, checkpoint: Checkpoint, mesh: Mesh, *, requests: int, capacity: int, axis_name: str = "cp"):
        self.config, self.mesh, self.axis_name = checkpoint.config, mesh, axis_name
        self.requests, self.capacity = positive_int("requests", requests), positive_int("capacity", capacity)
        self.cp = mesh.shape[axis_name]
        self.layout = Interleave(self.cp)
        self._host_weights = checkpoint.weights
        self._prefills: dict[int, Callable[..., Any]] = {}

    @functools.cached_property
    def weights(self) -> llama.Weights:
        """The model's weights on the devices; placed on first use, after everything else has been checked."""
        return llama.place(self._host_weights, self.config, self.mesh, self.axis_name)

    def exchange(self, backend: str, rows: int) -> Exchange:
        """The exchange of this model's partials for steps of `rows` query tokens per request."""
        return Exchange(
            self.mesh,
            self.axis_name,
            max_tokens=self.requests * rows,
            heads=self.config.heads,
            head_dim=self.config.head_dim,
            dtype=jnp.float32,
            backend=backend,
        )

    def state(self, prompts: Sequence[Sequence[int]], max_new: int, overhang: int = 0) -> State:
        """Prompts on the devices, nothing computed yet; `overhang` drafted tokens must fit behind the limits.

        Raises:
          ValueError: no prompt token, a token outside the vocabulary, too long for the context or the capacity.
        """
        lengths = self._checked(prompts, max_new, overhang)
        tokens = np.zeros((self.requests, self.capacity), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        cache = decode.init_cache(
            self._cache_config(),
            self.layout,
            pages=self._pages(),
            requests=self.requests,
            mesh=self.mesh,
            axis_name=self.axis_name,
        )
        everywhere = NamedSharding(self.mesh, P())

        def put(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

        return State(put(tokens), put(lengths), put(np.zeros_like(lengths)), put(lengths + np.int32(max_new)), cache)

    def prefill(
        self, state: State, longest: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> State:
        """Fills the cache with all prompts but their last tokens, in chunks.

        Args:
          state: donated.
          longest: tokens of the longest prompt.
          progress: called with (tokens done, tokens in all) after each chunk.
        """
        total = longest - 1
        rows = next((rows for rows in PREFILL_ROWS if rows >= total), PREFILL_ROWS[-1])
        for done in range(0, total, rows):
            state = self._prefill_program(rows, state)(self.weights, state)
            jax.block_until_ready(state.filled)  # so that progress tells the truth; a chunk is long against a dispatch
            progress(min(done + rows, total), total)
        return state

    def compiled(self, step: Callable[[Any, State], Any], state: State, outputs: Any = None) -> Callable[..., Any]:
        """`step(weights, state)` over the mesh, compiled for the shapes of `state`, which it donates.

        float32 products are exact to float32 on every platform: tokens are compared, and a GPU's default is TF32.
        """
        specs = State(P(), P(), P(), P(), state.cache.partition_specs(self.axis_name))
        out_specs = specs if outputs is None else (specs, outputs)
        in_specs = (llama.partition_specs(self.weights, self.axis_name), specs)
        # check_vma would refuse that results which every rank computes alike from gathered values are declared P().
        body = jax.shard_map(step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        with jax.default_matmul_precision("highest"):
            return jax.jit(body, donate_argnums=1).lower(self.weights, state).compile()

    def _prefill_program(self, rows: int, state: State) -> Callable[..., Any]:
        if rows not in self._prefills:
            self._prefills[rows] = self.compiled(self._prefill_step(rows), state)
        return self._prefills[rows]

    def _prefill_step(self, rows: int) -> Callable[[Any, State], State]:
        exchange = self.exchange(
            "allgather", rows
        )  # prefill gathers keys; it only asks an exchange for the heads' layout

        def step(weights, state: State) -> State:
            counts = jnp.clip(state.lengths - 1 - state.filled, 0, rows)
            positions = state.filled[:, None] + jnp.arange(rows)
            tokens = jnp.take_along_axis(state.tokens, jnp.minimum(positions, self.capacity - 1), axis=1)

            def attend(q, k, v, cache, layer):
                return decode.prefill(
                    q, k, v, cache, state.filled + counts, exchange=exchange, layer=layer, counts=counts
                )

            _, cache = llama.hidden(
                weights, tokens.reshape(-1), positions.reshape(-1), state.cache, attend, self.config, self.axis_name
            )
            return dataclasses.replace(state, filled=state.filled + counts, cache=cache)

        return step

    def _cache_config(self) -> decode.CacheConfig:
        c = self.config
        return decode.CacheConfig.gqa(
            layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=jnp.float32, page_size=PAGE_SIZE
        )

    def _pages(self) -> int:
        """Pages of a rank: what all requests need, and the reserved one."""
        return self.requests * -(-self.capacity // self.layout.widened(PAGE_SIZE)) + 1

    def _checked(self, prompts: Sequence[Sequence[int]], max_new: int, overhang: int) -> np.ndarray:
        positive_int("max_new", max_new)
        if len(prompts) != self.requests:
            raise invalid(
                "prompts", f"{len(prompts)} prompts", f"{self.requests}, as declared", "Build a Runtime for this many."
            )
        for prompt in prompts:
            if not len(prompt):
                raise invalid("prompt", "no token", "at least one token", "No start token is added; give some text.")
            if min(prompt) < 0 or max(prompt) >= self.config.vocabulary:
                raise invalid(
                    "prompt",
                    f"token ids {min(prompt)} to {max(prompt)}",
                    f"ids below {self.config.vocabulary}",
                    "Encode with the model's own tokenizer.",
                )
        longest = max(map(len, prompts))
        check_context(longest, max_new, self.config.context)
        if longest + max_new + overhang > self.capacity:
            raise invalid(
                "capacity",
                f"{longest} prompt + {max_new} new + {overhang} drafted tokens",
                f"at most {self.capacity}",
                "Build a Runtime with more capacity.",
            )
        return np.array([len(prompt) for prompt in prompts], np.int32)


def check_context(prompt: int, max_new: int, context: int) -> None:
    """Raises ValueError if `prompt` + `max_new` tokens exceed the model's `context`."""
    if prompt + max_new > context:
        raise invalid(
            "prompt",
            f"{prompt} tokens and max_new = {max_new}",
            f"at most {context} together, the model's context",
            "Shorten the prompt or ask for fewer tokens.",
        )
