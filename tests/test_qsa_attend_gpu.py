"""Sparse attention in CUDA on a GPU: the kernels by themselves (tests/native/qsa_attend_cases.cu) and through JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import native_programs
import numpy as np
import pytest
from native_programs import CSRC

from jaxcp import qsa
from jaxcp.qsa.kernel_attend import attend_cuda
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import Segments, rows_of
from jaxcp.qsa.sparse import attend_xla

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]

CASES = ("shapes", "choices", "long_contexts", "nothing", "same_bits", "graphs", "small")
KERNELS = ("attend.cu", "attend_lists.cu", "attend_mma.cu", "attend_rows.cu", "attend_wgmma.cu", "heads.cu")


TestKernels = native_programs.cases_on_a_gpu(
    "qsa_attend_cases.cu",
    [CSRC / "qsa" / name for name in KERNELS],
    CASES,
    [("memcheck", ["small"]), ("racecheck", ["small"])],
)


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU (JAXCP_TEST_PLATFORM=cuda)")


def problem(rows, prefix, heads=24, dim=256, ratio=4, budget=256, layers=3, seed=0):
    """(config, cache with random K and V, queries, ascending random blocks, Queries) of one request."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(
        qsa.QSAConfig.flash_next(), heads=heads, head_dim=dim, ratio=ratio, budget=budget, hidden=64
    )
    tokens = prefix + rows
    pages = -(-tokens // 64)
    table = 1 + rng.permutation(pages)[None]
    cache = qsa.init_cache(config, requests=1, pages=1 + pages, layers=layers, page_table=table)
    random = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    cache = dataclasses.replace(cache, k=random(cache.k.shape), v=random(cache.v.shape))
    blocks = np.full((rows, config.selected_blocks), -1, np.int32)
    for row, p in zip(blocks, range(prefix, tokens), strict=True):
        chosen = np.sort(rng.permutation((p + 1) // ratio)[: len(row)])
        row[: len(chosen)] = chosen
    real = max(1, rows - 1)  # the last row is padding
    blocks[real:] = -1
    segments = Segments(*(jnp.asarray([n], jnp.int32) for n in (0, real, prefix, 0)))
    queries = Queries(segments, rows_of(segments, rows), tokens, rows)
    return config, cache, random((rows, heads, dim)), jnp.asarray(blocks), queries


def close(got, want):
    """Two roundings to bfloat16 of values of some 0.1 ... 4, and fp32 sums."""
    np.testing.assert_allclose(np.asarray(got.o, np.float32), np.asarray(want.o, np.float32), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("gpu")
class TestThroughJax:
    @pytest.mark.parametrize(
        ("rows", "prefix", "options"),
        [
            (1, 3000, {}), (4, 0, {}), (3, 777, {"heads": 32}), (70, 0, {}), (300, 1234, {}), (300, 1234, {"dim": 128}),
            (64, 500, {"heads": 80, "dim": 64}), (100, 500, {"ratio": 16, "budget": 512}), (33, 90, {"heads": 2}),
        ],
    )  # fmt: skip
    def test_equals_xla(self, rows, prefix, options):
        config, cache, q, blocks, queries = problem(rows, prefix, **options)
        layer = jnp.asarray(1, jnp.int32)
        got, want = (
            jax.jit(lambda q, cache, attend=attend: attend(q, blocks, cache, layer, queries, config))(q, cache)
            for attend in (attend_cuda, attend_xla)
        )
        close(got, want)
        if rows > 1:
            assert not np.asarray(got.o[-1], np.float32).any()
            assert np.isneginf(np.asarray(got.lse[-1])).all()

    def test_scan_over_layers_replayed(self):
        config, cache, q, blocks, queries = problem(40, 2000)

        @jax.jit
        def layers(q, cache):
            step = lambda q, layer: (attend_cuda(q, blocks, cache, layer, queries, config).o, ())  # noqa: E731
            return jax.lax.scan(step, q, jnp.arange(3, dtype=jnp.int32))[0]

        want = q
        for layer in range(3):
            want = attend_cuda(want, blocks, cache, jnp.asarray(layer, jnp.int32), queries, config).o
        for _ in range(5):  # the later ones replay a command buffer
            np.testing.assert_array_equal(np.asarray(layers(q, cache), np.float32), np.asarray(want, np.float32))

    def test_layer_with_donated_cache(self):
        """Prefill and decode of whole layers, attention by "auto", against XLA alone."""
        config = dataclasses.replace(qsa.QSAConfig.flash_next(), hidden=64, budget=64)
        params = qsa.init_params(config, jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (200, 64), jnp.bfloat16)

        def run(implementation):
            cache = qsa.init_cache(config, requests=1, pages=8)
            plan = qsa.plan([192], [0], cache=cache)
            y, cache = qsa.prefill(params, plan.pad(x[:192]), cache, plan, implementation=implementation)
            out = [y[:192]]
            for i in range(192, 200):
                y, cache = qsa.decode(params, x[i : i + 1], cache, np.array([i + 1]), implementation=implementation)
                out.append(y)
            return np.concatenate([np.asarray(y, np.float32) for y in out])

        got, want = run("auto"), run("xla")
        assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
