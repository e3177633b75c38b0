"""The compiled step: one dispatch without host transfer or retrace, and a cache that is updated in place."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_session import Case, Session
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcp import decode

LAYERS, LONG = 16, 65536


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "lengths", "x"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class State:
    """All that a step takes and gives back."""

    cache: Any
    lengths: Any
    x: Any


def layers(session, name, query_tokens):
    """Jitted state -> state: every layer stores `query_tokens` tokens and attends, then the lengths grow by as many."""
    case, specs = session.case, session.cache.partition_specs("cp")
    specs = State(specs, P(), P(None, "cp"))

    def body(k, carry, layer):
        out, cache = getattr(decode, name)(carry[0], k, k, carry[1], carry[2], exchange=session.exchange, layer=layer)
        return (out, cache, carry[2]), None

    def step(state):
        k = jnp.ones((case.requests * query_tokens, case.kv_heads, case.key_dim), case.dtype)
        x, cache, lengths = lax.scan(
            functools.partial(body, k), (state.x, state.cache, state.lengths), jnp.arange(LAYERS)
        )[0]
        return State(cache, lengths + query_tokens, x)

    jitted = jax.jit(
        jax.shard_map(step, mesh=session.mesh, in_specs=(specs,), out_specs=specs, check_vma=False), donate_argnums=0
    )
    heads = session.exchange.heads_per_rank * case.cp
    x = jnp.ones((case.requests * query_tokens, heads, case.key_dim), case.dtype)
    place = lambda x, spec: jax.device_put(x, NamedSharding(session.mesh, spec))  # noqa: E731
    lengths = jnp.full(case.requests, query_tokens, jnp.int32)
    return jitted, State(session.cache, place(lengths, P()), place(x, P(None, "cp")))


@pytest.mark.parametrize("name", ["attention", "prefill"])
def test_a_step_neither_transfers_nor_retraces(name):
    session = Session(Case(2, layers=LAYERS, capacity=64))
    step, state = layers(session, name, 3)
    state = step(state)  # compiles
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **_: events.append(event))
    try:
        with jax.transfer_guard("disallow_explicit"), jax.no_tracing(True):
            for _ in range(5):
                state = step(state)
        assert not [event for event in events if "/jax/core/compile" in event]
        jax.jit(lambda x: x + 1)(jnp.ones(7))
        assert [event for event in events if "/jax/core/compile" in event], "the listener hears nothing"
    finally:
        jax.monitoring.clear_event_listeners()
    assert step._cache_size() == 1
    assert state.lengths.tolist() == [21] * 3
    assert np.isfinite(state.x).all()
    decode.check(state.cache)


@pytest.mark.parametrize(
    ("case", "name", "query_tokens"),
    [
        (Case(1, cache_dtype="bfloat16", capacity=LONG), "attention", 1),
        (Case(8, capacity=8192), "attention", 1),  # one block: XLA would fuse the scatter into its reader
        (Case(8, cache_dtype="float8_e4m3fn", capacity=LONG), "attention", 4),
        (Case(3, cache_dtype="float8_e4m3fn", capacity=LONG), "prefill", 64),
        (Case(2, kv_heads=1, capacity=LONG), "prefill", 64),
    ],
    ids=str,
)
def test_the_cache_is_updated_in_place(case, name, query_tokens):
    """Nothing but the scatter yields an array of the cache's shape, and no buffer comes near its size."""
    case = dataclasses.replace(case, requests=1, layers=LAYERS, page_size=16)
    session = Session(case)
    step, state = layers(session, name, query_tokens)
    compiled = step.lower(state).compile()
    memory, rank_bytes = compiled.memory_analysis(), session.cache.bytes_per_rank
    assert memory.alias_size_in_bytes >= rank_bytes
    assert memory.temp_size_in_bytes < rank_bytes / 4
    pages = session.cache.k.shape[1] // case.cp
    made = re.findall(rf"= \w+\[{LAYERS},{pages},\d[\d,]*\]\S* ([a-z][\w\-]*)\(", compiled.as_text())
    allowed = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice", "opt-barrier"}
    assert set(made) <= allowed
    assert made.count("fusion") == made.count("scatter") + made.count("dynamic-update-slice") == 2
