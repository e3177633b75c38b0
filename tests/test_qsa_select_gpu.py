"""Block selection on a GPU: the kernels by themselves (tests/native/qsa_select_cases.cu), the table through JAX."""

import dataclasses
from functools import partial as bind
from unittest import mock

import jax
import jax.numpy as jnp
import native_programs
import numpy as np
import pytest
import qsa_selection_cases as selection
from native_programs import CSRC
from qsa_cases import scanned

from jaxcp import qsa
from jaxcp.qsa import flashinfer_topk, kernel_select
from jaxcp.qsa.kernel_select import STREAMED_HEADS, STREAMED_K
from jaxcp.qsa.resolve import Implementation
from jaxcp.qsa.selection import SELECT, select_cuda, top_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]

CASES = ("chosen", "clusters", "given", "long", "repeated", "sizes", "small", "summed")
KERNELS = ("select.cc", "select_stored.cu", "select_stream.cu", "select_top.cu")


TestKernels = native_programs.cases_on_a_gpu(
    "qsa_select_cases.cu",
    [CSRC / "qsa" / name for name in KERNELS],
    CASES,
    [("memcheck", ["small"]), ("racecheck", ["small"]), ("memcheck", ["clusters"])],
)


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU (JAXCP_TEST_PLATFORM=cuda)")


def by(method: int) -> Implementation:
    """The kernels' method, whatever the sizes: the streaming one with three lists, the storing one in several turns."""

    def plan(rows, blocks, k, heads):
        if method == kernel_select.STREAMING:
            return kernel_select.Work(method, 3 * kernel_select.LIST_BYTES)
        return kernel_select.Work(method, min(rows, 50) * -(-blocks // 64) * 256)

    def run(*arguments):
        with mock.patch.object(kernel_select, "plan", plan):
            return select_cuda(*arguments)

    def blocker(config, cache, platform):
        k, heads, most = config.selected_blocks, config.index_heads, (STREAMED_K, STREAMED_HEADS)
        if method == kernel_select.STREAMING and (k > STREAMED_K or heads > STREAMED_HEADS):
            return f"(blocks, index heads) = {k, heads} exceed {most} of the streaming method"
        return kernel_select.blocker(config, cache, platform)

    return Implementation(run, blocker)


IMPLEMENTATIONS = SELECT | {"stored": by(kernel_select.STORED), "streaming": by(kernel_select.STREAMING)}


@pytest.mark.usefixtures("gpu")
class TestThroughJax:
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("case", selection.CASES, ids=str)
    def test_matches_oracle(self, case, implementation):
        problem = case.problem("bfloat16")
        selection.check(problem, selection.run(IMPLEMENTATIONS[implementation], problem))

    @pytest.mark.parametrize("method", ["stored", "streaming"])
    def test_scan_over_layers_replayed(self, method):
        problem = selection.RANKING[0].problem("bfloat16")
        again = selection.run(IMPLEMENTATIONS[method], problem, scanned)
        chosen = again()
        selection.check(problem, chosen)
        for _ in range(4):  # the later ones replay a command buffer
            np.testing.assert_array_equal(again(), chosen)


@pytest.mark.usefixtures("gpu")
class TestFlashInfer:
    @pytest.fixture(autouse=True)
    def headers(self):
        if why := flashinfer_topk.header_blocker():
            pytest.skip(f"no FlashInfer top-k: {why}")

    @pytest.mark.parametrize("k", [1, 16, 512, 2048])
    def test_given_scores(self, k):
        rng = np.random.default_rng(k)
        rows, blocks = 64, 5003
        score = rng.random((rows, blocks), np.float32)
        score[::4] = rng.integers(0, 3, score[::4].shape)
        score[1::4] = 1 + rng.integers(0, 16, score[1::4].shape) * np.float32(2**-23)
        score[2] = 0
        visible = jnp.asarray(np.r_[0, 1, k, k + 1, rng.integers(0, blocks + 1, rows - 4)], jnp.int32)
        got, want = (
            jax.jit(bind(f, k=k))(jnp.asarray(score), visible) for f in (flashinfer_topk.top_blocks, top_blocks)
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("gpu")
def test_layer_with_donated_cache():
    """Prefill and decode of whole layers by "auto", against XLA alone."""
    config = dataclasses.replace(qsa.QSAConfig.flash_next(), hidden=64, budget=64)
    params = qsa.init_params(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (300, 64), jnp.bfloat16)

    def run(implementation):
        cache = qsa.init_cache(config, requests=1, pages=8)
        plan = qsa.plan([292], [0], cache=cache)
        y, cache, chosen = qsa.prefill(
            params, plan.pad(x[:292]), cache, plan, implementation=implementation, return_selection=True
        )
        out, blocks = [y[:292]], [chosen[:292]]
        for i in range(292, 300):
            y, cache, chosen = qsa.decode(
                params, x[i : i + 1], cache, np.array([i + 1]), implementation=implementation, return_selection=True
            )
            out.append(y)
            blocks.append(chosen)
        return np.concatenate([np.asarray(y, np.float32) for y in out]), np.concatenate(blocks)

    (got, chosen), (want, expected) = run("auto"), run("xla")
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
    assert (chosen == expected).all(1).mean() > 0.95, "selections differ where scores round otherwise, rarely"
