"""Block selection in CUDA on a GPU: the kernels by themselves (tests/native/qsa_select_cases.cu) and through JAX."""

import dataclasses
from functools import partial as bind

import jax
import jax.numpy as jnp
import native_programs
import numpy as np
import pytest
import qsa_oracle as oracle
from native_programs import CSRC
from qsa_runs import ids, same_selection

from jaxcp import qsa
from jaxcp.qsa import flashinfer_topk, kernel_select
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import Segments, rows_of
from jaxcp.qsa.selection import select_cuda, select_flashinfer, select_xla, top_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]

CASES = ("chosen", "given", "repeated", "sizes", "small", "summed")
KERNELS = ("select.cc", "select_stored.cu", "select_stream.cu")
METHODS = {"stored": kernel_select.STORED, "streaming": kernel_select.STREAMING}


TestKernels = native_programs.cases_on_a_gpu(
    "qsa_select_cases.cu",
    [CSRC / "qsa" / name for name in KERNELS],
    CASES,
    [("memcheck", ["small"]), ("racecheck", ["small"])],
)


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU (JAXCP_TEST_PLATFORM=cuda)")


@pytest.fixture(params=METHODS)
def method(request, monkeypatch):
    """Each of the kernels' two methods, whatever the sizes."""
    forced = METHODS[request.param]

    def plan(rows, blocks, k, heads):
        if forced == kernel_select.STREAMING:
            return kernel_select.Work(forced, 3 * kernel_select.LIST_BYTES)
        return kernel_select.Work(forced, min(rows, 100) * -(-blocks // 64) * 256)

    monkeypatch.setattr(kernel_select, "plan", plan)
    return request.param


def problem(lengths, prefixes, draw, *, k=64, heads=4, dim=128, layers=2, page_size=64, index_dtype=None, padding=5):
    """(config, cache, index queries, Queries): requests in shuffled pages, `draw(shape)` for keys and queries."""
    config = dataclasses.replace(
        qsa.QSAConfig.flash_next(), index_heads=heads, index_dim=dim, budget=4 * k, hidden=64, rotary_dim=64
    )
    requests, rows = len(lengths), sum(lengths) + padding
    pages = -(-max(n + p for n, p in zip(lengths, prefixes, strict=True)) // page_size)
    table = 1 + np.random.default_rng(1).permutation(requests * pages).reshape(requests, pages)
    cache = qsa.init_cache(
        config, requests=requests, pages=1 + table.size, layers=layers, page_table=table, page_size=page_size,
        index_dtype=index_dtype,
    )  # fmt: skip
    keys = draw(cache.index.shape)
    stored = jax.lax.bitcast_convert_type(keys.astype(cache.index_dtype), jnp.uint8) if index_dtype else keys
    cache = dataclasses.replace(cache, index=stored.astype(cache.index.dtype))
    first = np.cumsum([0, *lengths[:-1]])
    segments = Segments(*(jnp.asarray(a, jnp.int32) for a in (first, lengths, prefixes, np.arange(requests))))
    queries = Queries(segments, rows_of(segments, rows), pages * page_size, rows)
    return config, cache, draw((rows, heads, dim)), queries


def integers(seed=0):
    """Numbers whose products and sums are exact, and exactly stored as e4m3."""
    rng = np.random.default_rng(seed)
    return lambda shape: jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16)


def selection(select, config, cache, q, queries, layer=1):
    run = jax.jit(lambda q, cache, layer: select(q, cache, layer, queries, config))
    return np.asarray(run(q, cache, jnp.asarray(layer, jnp.int32)))


RAGGED = ([1, 3, 500, 64, 2], [4000, 0, 1200, 255, 3000])


@pytest.mark.usefixtures("gpu", "method")
class TestThroughJax:
    @pytest.mark.parametrize(
        "options",
        [
            {}, {"k": 1}, {"k": 16}, {"k": 512}, {"heads": 1}, {"heads": 3, "dim": 64}, {"page_size": 20},
            {"index_dtype": "float8_e4m3fn"}, {"index_dtype": "float8_e4m3fn", "dim": 64, "heads": 2},
        ],
        ids=str,
    )  # fmt: skip
    def test_equals_xla_where_sums_are_exact(self, options):
        arguments = problem(*RAGGED, integers(), **options)
        np.testing.assert_array_equal(selection(select_cuda, *arguments), selection(select_xla, *arguments))

    def test_all_zero(self):
        """No head responds anywhere: the first blocks, +0 = -0."""
        config, cache, q, queries = problem([200], [3000], lambda shape: jnp.ones(shape, jnp.bfloat16))
        signs = jnp.where(jnp.arange(128) % 2, -0.0, 0.0).astype(jnp.bfloat16)
        for negative in (-q, q * signs):
            got = selection(select_cuda, config, cache, negative, queries)
            same_selection(ids(got[:200]), [range(64)] * 200)

    def test_nan_ranks_as_in_xla(self):
        config, cache, q, queries = problem([130], [2000], integers())
        cache = dataclasses.replace(cache, index=cache.index.at[:, 3::7, ::5].set(jnp.nan))
        arguments = (config, cache, q, queries)
        np.testing.assert_array_equal(selection(select_cuda, *arguments), selection(select_xla, *arguments))

    def test_random_scores(self):
        """Where selections differ from float64's, the scores are within rounding of the cut."""
        rng = np.random.default_rng(3)
        config, cache, q, queries = problem([300], [3700], lambda s: jnp.asarray(rng.normal(size=s), jnp.bfloat16))
        got = selection(select_cuda, config, cache, q, queries)
        keys = np.asarray(cache.index[1], np.float64)[np.asarray(cache.page_table[0])].reshape(-1, 128)
        for row in range(300):
            visible = (3700 + row + 1) // 4
            score = np.maximum(np.asarray(q[row], np.float64) @ keys[:visible].T, 0).sum(0) * 128**-0.5
            want, chosen = oracle.largest(score, 64), got[row]
            assert (np.diff(chosen) > 0).all()
            cut = score[want].min()
            differing = np.setxor1d(want, chosen)
            assert (np.abs(score[differing] - cut) <= 1e-5 * (1 + cut)).all()

    def test_scan_over_layers_replayed(self):
        config, cache, q, queries = problem([40], [2000], integers())

        @jax.jit
        def layers(q, cache):
            step = lambda _, layer: (_, select_cuda(q, cache, layer, queries, config))  # noqa: E731
            return jax.lax.scan(step, 0, jnp.arange(2, dtype=jnp.int32))[1]

        want = np.stack([selection(select_xla, config, cache, q, queries, layer) for layer in range(2)])
        assert (want[0] != want[1]).any()
        for _ in range(5):  # the later ones replay a command buffer
            np.testing.assert_array_equal(layers(q, cache), want)


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

    def test_equals_xla(self):
        rng = np.random.default_rng(3)
        arguments = problem(*RAGGED, lambda s: jnp.asarray(rng.normal(size=s), jnp.bfloat16))
        np.testing.assert_array_equal(selection(select_flashinfer, *arguments), selection(select_xla, *arguments))


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
