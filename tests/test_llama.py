"""The decoder over the ranks of an axis, against a dense float64 forward, with a tiny model that divides nowhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import llama_oracle
import numpy as np
import pytest
import tiny_llama
from jax.sharding import PartitionSpec as P

from jaxcp import decode
from jaxcp.errors import CacheOverflowError, PeerTimeoutError
from jaxcp.models import llama, speculation
from jaxcp.models.decoder import Decoder
from jaxcp.models.demo import usable
from jaxcp.models.generate import generate
from jaxcp.models.runtime import PAGE_SIZE, Runtime
from jaxcp.topology import make_mesh

pytest.importorskip("gguf")

PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], [200], list(range(100, 135))]
MAX_NEW = 14
CAPACITY = 64


@functools.cache
def decoder(cp: int, backend: str = "auto", speculate: int = 0) -> Decoder:
    """Programs compile for seconds even for a tiny model, so tests share them."""
    return Decoder(runtime(cp), backend, speculate)


@functools.cache
def runtime(cp: int) -> Runtime:
    return Runtime(tiny_llama.checkpoint(), make_mesh(cp), requests=len(PROMPTS), capacity=CAPACITY)


def prefilled(decoder: Decoder, prompts=PROMPTS, max_new=MAX_NEW):
    state = decoder.runtime.state(prompts, max_new, decoder.speculate)
    decoder.compile(state)
    return decoder.runtime.prefill(state, max(map(len, prompts)))


@functools.cache
def expected() -> list[tuple[list[int], list[float]]]:
    checkpoint = tiny_llama.checkpoint()
    return [llama_oracle.greedy(checkpoint.weights, checkpoint.config, prompt, MAX_NEW) for prompt in PROMPTS]


def assert_expected(generation):
    for (tokens, gaps), got, got_gaps in zip(expected(), generation.tokens, generation.gaps, strict=True):
        assert min(gaps) > 1e-3  # no near tie: the tokens are decided
        assert got == tokens
        np.testing.assert_allclose(got_gaps, gaps, atol=2e-4)


@pytest.mark.parametrize(("cp", "speculate"), [(1, 0), (3, 0), (8, 3)])
def test_greedy_equals_the_dense_forward(cp, speculate):
    assert_expected(generate(decoder(cp, "auto", speculate), PROMPTS, max_new=MAX_NEW))


@pytest.mark.parametrize("backend", ["ag_rs", "allgather", "fused"])
def test_every_backend_gives_the_same(backend):
    if jax.default_backend() != "cpu" and backend not in usable(runtime(3)):  # on CPU all are
        pytest.skip(f"{backend} is not usable here")
    assert_expected(generate(decoder(3, backend), PROMPTS, max_new=MAX_NEW))


def test_right_drafts_save_steps():
    """The first prompt's continuation is one token again and again: after three of them every draft is right."""
    done = generate(decoder(2, "auto", 3), PROMPTS[:1] * 3, max_new=MAX_NEW)
    assert done.tokens == [expected()[0][0]] * 3
    assert done.steps <= 3 + MAX_NEW // 4 < MAX_NEW


def test_a_prompt_longer_than_one_prefill_chunk(monkeypatch):
    monkeypatch.setattr("jaxcp.models.runtime.PREFILL_ROWS", (8,))
    seen = []
    done = generate(decoder(3), PROMPTS, max_new=MAX_NEW, progress=lambda *at: seen.append(at))
    assert_expected(done)
    assert seen == [(8, 34), (16, 34), (24, 34), (32, 34), (34, 34)]


def test_steps_neither_trace_nor_compile_nor_transfer():
    step = decoder(2, "auto", 3)
    state, _ = step(prefilled(step))
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        with jax.no_tracing(True), jax.transfer_guard("disallow_explicit"):
            for _ in range(3):
                state, emitted = step(state)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in events if "/compile/" in name]
    assert int(np.min(emitted.counts)) >= 1


def test_a_step_writes_into_the_cache_it_is_given():
    step = decoder(3)
    state = prefilled(step)

    def places(state):
        return [
            shard.data.unsafe_buffer_pointer() for x in (state.cache.k, state.cache.v) for shard in x.addressable_shards
        ]

    before = places(state)
    after, _ = step(state)
    assert places(after) == before
    assert state.cache.k.is_deleted()
    assert state.tokens.is_deleted()


def test_weights_and_cache_are_split_over_the_ranks():
    ranks = runtime(8)
    split = {
        "embedding": 33,
        "query": 32,
        "output": 32,
        "gate": 5,
        "up": 5,
        "down": 5,
    }  # ceil(261/8), 2 x 16, ...
    flat = {**ranks.weights, **ranks.weights["blocks"]}
    for name, size in split.items():
        assert size in flat[name].addressable_shards[0].data.shape, name
    state = ranks.state(PROMPTS, MAX_NEW)
    shard = state.cache.k.addressable_shards[0].data
    assert shard.nbytes + state.cache.v.addressable_shards[0].data.nbytes == state.cache.bytes_per_rank


def test_generation_ends_at_the_end_token_and_at_the_limit():
    tokens = expected()[0][0]
    end = tokens[4]
    told = []
    done = generate(decoder(3), PROMPTS, max_new=MAX_NEW, end=end, on_token=told.append)
    for (whole, _), got in zip(expected(), done.tokens, strict=True):
        assert got == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert [token.id for token in told if token.request == 0] == done.tokens[0]


def test_no_token_of_a_failed_exchange_is_shown(monkeypatch):
    """A peer that is lost leaves NaN, whose argmax is a token like any other."""
    shown = []

    def lost():
        raise PeerTimeoutError("rank 0 waited for rank 1")

    greedy = decoder(2)
    monkeypatch.setattr(greedy.exchange, "check", lost)
    with pytest.raises(PeerTimeoutError):
        generate(greedy, PROMPTS, max_new=MAX_NEW, on_token=shown.append)
    assert not shown


def test_a_full_cache_is_not_overrun():
    """The last drafts stand right at the end of the capacity, and every request stops at its own limit."""
    done = generate(decoder(2, "auto", 3), [list(range(CAPACITY - 6 - 3))] * 3, max_new=6)
    assert [len(tokens) for tokens in done.tokens] == [6, 6, 6]


def test_a_request_stays_at_its_limit():
    step = decoder(2, "auto", 3)
    state = prefilled(step, max_new=3)
    for _ in range(5):
        state, emitted = step(state)
    assert state.lengths.tolist() == [len(prompt) + 3 for prompt in PROMPTS]
    assert emitted.counts.tolist() == [0, 0, 0]
    assert state.tokens[0, len(PROMPTS[0]) :].tolist()[:4] == [*expected()[0][0][:3], 0]


def test_rows_that_do_not_fit_are_reported():
    """If the host's check of the limits is by-passed, the cache itself tells."""
    step = decoder(3)
    room = prefilled(step, [[5] * (CAPACITY - 1)] * 3, 1)
    state = dataclasses.replace(room, limits=room.limits + 100)
    for _ in range(2 + step.runtime.layout.widened(PAGE_SIZE)):
        state, _ = step(state)
    with pytest.raises(CacheOverflowError):
        decode.check(state.cache)


BAD = {
    "no token": ([[]] * 3, 4, "prompt: got no token"),
    "outside the vocabulary": ([[1], [261], [2]], 4, "ids below 261"),
    "negative": ([[1], [-1], [2]], 4, "ids below 261"),
    "beyond the context": ([[1] * 90] * 3, 7, "90 tokens and max_new = 7; expected at most 96 together"),
    "beyond the capacity": ([[1] * 60] * 3, 5, "60 prompt . 5 new . 0 drafted tokens; expected at most 64"),
    "another number of prompts": ([[1]], 4, "1 prompts; expected 3"),
    "nothing asked for": ([[1]] * 3, 0, "max_new: got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts(case):
    prompts, max_new, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        runtime(2).state(prompts, max_new)


@pytest.mark.parametrize("speculate", [-1, True])
def test_bad_speculate(speculate):
    with pytest.raises(ValueError, match="speculate: got"):
        Decoder(runtime(2), speculate=speculate)


def test_rope_turns_adjacent_pairs():
    x = np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32)
    got = llama.rope(jnp.asarray(x), jnp.arange(5), 100.0)
    np.testing.assert_allclose(got, llama_oracle._rope(x.astype(np.float64), 100.0), atol=1e-5)


def head(embedding, x):
    """(best token, gap) for one hidden state over 3 ranks; 7 tokens, so that 2 rows of the last rank are padding."""
    config = dataclasses.replace(tiny_llama.CONFIG, vocabulary=7)
    weights = {"embedding": embedding, "norm": np.ones(config.width, np.float32)}
    mesh = make_mesh(3)
    specs = (llama.partition_specs(weights, "cp"), P())
    step = jax.shard_map(
        lambda w, x: llama.greedy(w, x, config, "cp"), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    token, gap = jax.jit(step)(llama.place(weights, config, mesh, "cp"), x[None])
    return int(token[0]), float(gap[0])


def test_the_smallest_of_equal_logits_wins():
    """Two equal rows of the embedding, on different ranks: the lower id wins, with a gap of 0."""
    embedding = np.random.default_rng(1).normal(size=(7, tiny_llama.CONFIG.width)).astype(np.float32)
    embedding[5] = embedding[2] = 3 * embedding[2]
    assert head(embedding, embedding[2]) == (2, 0.0)


def test_padding_of_the_vocabulary_is_no_token():
    """All logits are negative; the padding's would be 0."""
    x = np.ones(tiny_llama.CONFIG.width, np.float32)
    token, gap = head(np.outer([-5, -4, -3, -9, -8, -7, -6], x).astype(np.float32), x)
    assert token == 2
    assert gap == pytest.approx(tiny_llama.CONFIG.width, rel=1e-4)


DRAFTS = {
    "longest match wins": ([1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3], 12, [9, 9]),
    "then the latest": ([5, 1, 6, 1, 7, 1], 6, [7, 1]),
    "what lies beyond the length is not text": ([4, 1, 4, 4, 4, 4], 3, [1, 4]),
    "a repeated end goes on": ([9, 3, 3, 0, 0], 3, [3, 3]),
    "one token": ([3, 0, 0], 1, None),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_draft(case):
    tokens, length, want = DRAFTS[case]
    got = speculation.draft(jnp.array(tokens, jnp.int32), jnp.int32(length), 2)
    assert got.shape == (2,)
    assert want is None or got.tolist() == want


def test_accepted_counts_right_drafts_up_to_the_first_wrong_one():
    best = jnp.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]], jnp.int32)
    query = jnp.array([[0, 1, 2], [0, 1, 9], [0, 9, 2], [0, 9, 9]], jnp.int32)
    assert speculation.accepted(best, query).tolist() == [3, 2, 1, 1]
