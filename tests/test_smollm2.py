"""SmolLM2-135M against golden continuations from an independent implementation, for every cp and backend."""

import functools
import json
from pathlib import Path

import jax
import llama_oracle
import numpy as np
import pytest

from jaxcp.models import checkpoint
from jaxcp.models.decoder import Decoder
from jaxcp.models.demo import usable
from jaxcp.models.generate import generate
from jaxcp.models.runtime import Runtime
from jaxcp.models.tokenizer import Tokenizer
from jaxcp.topology import make_mesh

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text())
PROMPTS = [case["prompt_ids"] for case in GOLDEN]
TIE = 0.02  # below this gap the other token may win with another order of sums
GAP_ATOL = 5e-3
pytestmark = pytest.mark.optimized


@functools.cache
def model():
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'jaxcp[models]'")
    try:
        return checkpoint.load(checkpoint.locate("smollm2"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@functools.lru_cache(maxsize=1)
def runtime(cp):
    return Runtime(model(), make_mesh(cp), requests=len(GOLDEN), capacity=160)


def assert_golden(generation, count):
    for case, tokens, gaps in zip(GOLDEN, generation.tokens, generation.gaps, strict=True):
        ties = [i for i, gap in enumerate(case["gap"][:count]) if gap < TIE]
        decided = ties[0] if ties else count
        assert tokens[:decided] == case["greedy"][:decided]
        np.testing.assert_allclose(gaps[:decided], case["gap"][:decided], atol=GAP_ATOL)


def in_group(*cases):
    """One worker per cp: it places the weights and compiles the prefill once."""
    return [
        pytest.param(cp, backend, speculate, count, marks=[pytest.mark.xdist_group(f"smollm2-{cp}"), *marks])
        for cp, backend, speculate, count, *marks in cases
    ]


# (cp, backend, drafted tokens, tokens compared). One rank has no peers: what it runs is the same for all backends.
CASES = in_group(
    *((3, backend, 0, 10) for backend in ("a2a", "fused")),
    (1, "a2a", 0, 24, pytest.mark.slow),
    (3, "fused", 3, 24, pytest.mark.slow),
    *((3, backend, 0, 10, pytest.mark.slow) for backend in ("ag_rs", "allgather")),
    *((cp, backend, 0, 10, pytest.mark.slow) for cp in (2, 8) for backend in ("a2a", "fused")),
)


@pytest.mark.parametrize(("cp", "backend", "speculate", "count"), CASES)
def test_greedy_equals_the_golden_continuation(cp, backend, speculate, count):
    if cp > len(jax.devices()):
        pytest.skip(f"needs {cp} devices")
    if jax.default_backend() != "cpu" and backend not in usable(runtime(cp)):  # on CPU all are
        pytest.skip(f"{backend} is not usable here")
    assert_golden(generate(Decoder(runtime(cp), backend, speculate), PROMPTS, max_new=count), count)


@pytest.mark.xdist_group("smollm2-3")
def test_tokenizer_gives_the_golden_ids():
    tokenizer = Tokenizer(model().vocabulary)
    for case in GOLDEN:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["greedy"]) == case["text"]
    assert tokenizer.decode([tokenizer.end]) == "<|im_end|>"


@pytest.mark.xdist_group("smollm2-3")
def test_the_weights_give_the_golden_gaps():
    """The file's tensors through a dense float64 forward: no cache, no ranks."""
    case = GOLDEN[0]
    count = 16
    logits = llama_oracle.logits(model().weights, model().config, case["prompt_ids"] + case["greedy"][: count - 1])
    logits = logits[-count:]
    assert logits.argmax(axis=1).tolist() == case["greedy"][:count]
    second, first = np.sort(logits, axis=1)[:, -2:].T
    np.testing.assert_allclose(first - second, case["gap"][:count], atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_prompt_of_2000_tokens_gives_the_same_on_eight_ranks():
    """Four prefill chunks; a text that repeats itself with changes, so that the model has something to look up."""
    tokenizer = Tokenizer(model().vocabulary)
    lines = [f"{i}. {GOLDEN[2]['prompt'].splitlines()[2 + i % 7]}\n" for i in range(400)]
    prompt = tokenizer.encode("".join(lines))[:2000]
    found = {}
    for cp, speculate in ((1, 0), (8, 3)):
        ranks = Runtime(model(), make_mesh(cp), requests=1, capacity=2016)
        found[cp] = generate(Decoder(ranks, "a2a", speculate), [prompt], max_new=8)
    assert min(found[1].gaps[0]) > 2 * GAP_ATOL  # the tokens are decided
    assert found[8].tokens == found[1].tokens
    np.testing.assert_allclose(found[8].gaps, found[1].gaps, atol=GAP_ATOL)
    assert found[8].kv_bytes_per_rank < found[1].kv_bytes_per_rank / 7
