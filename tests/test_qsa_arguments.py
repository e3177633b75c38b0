"""Bad input: every refusal names the argument and comes before any device work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_runs import Session

import jaxcp
from jaxcp import qsa

C, W, X = oracle.TINY, oracle.weights(oracle.TINY), oracle.hidden(oracle.TINY, 30)


@pytest.fixture
def run():
    return Session(C, W)


def test_qsa_is_a_public_name():
    assert jaxcp.qsa is qsa
    assert "qsa" in dir(jaxcp)
    assert set(qsa.__all__) <= set(dir(qsa))


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, 0) for n in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "index_heads", "index_dim", "ratio")]
    + [("budget", 0), ("rope_theta", 0.0), ("rope_theta", float("nan")), ("eps", -1e-6), ("heads", 5), ("budget", 18)]
    + [("rotary_dim", 3), ("rotary_dim", 8), ("mrope_section", (1, 1, 1)), ("mrope_section", (2, -1, 1))]
    + [("mrope_section", (0, 0, 2)), ("mrope_section", (1, 1)), ("hidden", True)],
)  # fmt: skip
def test_config(name, value):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(C, **{name: value})


def test_the_released_config():
    c = qsa.QSAConfig.flash_next()
    assert (c.selected_blocks, c.row_width, c.scale) == (512, 2051, 1 / 16)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"pages": 0}, ValueError, "pages"),
        ({"pages": 3}, ValueError, "pages: got 3; expected at least 4"),
        ({"page_size": 6}, ValueError, "page_size: got 6; expected a multiple of ratio = 4"),
        ({"layers": 0}, ValueError, "layers"),
        ({"requests": 0}, ValueError, "requests"),
        ({"max_query_tokens": 0}, ValueError, "max_query_tokens"),
        ({"dtype": "float16"}, TypeError, "dtype"),
        ({"kv_dtype": "float32"}, TypeError, "kv_dtype"),
        ({"index_dtype": "float8_e5m2"}, TypeError, "index_dtype"),
        ({"page_table": [[1, 2]]}, ValueError, "page_table"),
        ({"page_table": [[1, 9], [2, 3], [4, 5]]}, ValueError, r"page_table: got 9; expected ids in \[1, 9\)"),
        ({"page_table": [[1, -1], [2, 3], [4, 5]]}, ValueError, "page_table: got -1"),
        ({"page_table": [[1, 1], [2, 3], [4, 5]]}, ValueError, "page 1 twice for request 0"),
        ({"page_table": [[1.0], [2.0], [3.0]]}, TypeError, "page_table"),
    ],
)
def test_init_cache(options, error, match):
    with pytest.raises(error, match=match):
        qsa.init_cache(C, **{"requests": 3, "pages": 9} | options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (([],), {}, ValueError, "lengths"),
        (([3, -1],), {}, ValueError, "lengths: got -1"),
        (([3.0],), {}, TypeError, "lengths"),
        (([[3]],), {}, TypeError, "lengths"),
        (([3, 4], [1]), {}, ValueError, "prefix_lengths: got 1 entries; expected 2"),
        (([3], [2**31]), {}, ValueError, "prefix_lengths"),
        (([2**30, 2**30], None), {}, ValueError, "lengths: got 2147483648"),
        (([2**30], [2**30]), {}, ValueError, r"lengths \+ prefix_lengths: got 2147483648"),
        (([3, 4],), {"requests": [1, 1]}, ValueError, "requests: got 1 twice"),
        (([3, 4],), {"requests": [0]}, ValueError, "requests"),
        (([3],), {"requests": [3]}, ValueError, "requests: got 3; expected rows below 3"),
        (([7], [90]), {}, ValueError, "97; expected at most 96 tokens, the cache's capacity"),
        (([3],), {"rope_positions": np.zeros((3, 4), int)}, ValueError, "rope_positions"),
        (([3],), {"rope_positions": np.zeros((3, 3))}, ValueError, "rope_positions"),
        (([3],), {"rope_positions": np.full((3, 3), -1)}, ValueError, "rope_positions"),
        (([3],), {"rope_positions": np.array([[4, 5, 3]] * 3)}, ValueError, "5 then 3 at token 2"),
        (([3],), {"min_rows": 0}, ValueError, "min_rows"),
    ],
)
def test_plan(run, arguments, options, error, match):
    with pytest.raises(error, match=match):
        qsa.plan(*arguments, **{"cache": run.cache} | options)


def test_positions_start_again_with_each_request(run):
    plan = qsa.plan([2, 2], rope_positions=np.array([[8, 9, 0, 1]] * 3), cache=run.cache)
    assert plan.rope_positions[0, :5].tolist() == [8, 9, 0, 1, 0]


def prefill(run, plan, x=None, params=None, cache=None, **options):
    return qsa.prefill(params or run.params, plan.pad(X[:5]) if x is None else x, cache or run.cache, plan, **options)


def test_prefill(run):
    plan = qsa.plan([5], cache=run.cache)
    with pytest.raises(ValueError, match="axis_name: got 'cp'; expected a mesh axis of the shard_map"):
        prefill(run, plan, axis_name="cp")
    with pytest.raises(ValueError, match=r"x\.shape: got \(5, 16\); expected \(16, 16\).*plan\.pad"):
        prefill(run, plan, x=jnp.asarray(X[:5]))
    with pytest.raises(TypeError, match=r"x\.dtype: got bfloat16; expected float32"):
        prefill(run, plan, x=plan.pad(X[:5]).astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"cache\.dtype: got bfloat16"):
        prefill(run, plan, cache=Session(C, W, "bfloat16").cache)
    with pytest.raises(ValueError, match=r"cache: .*\(2, 8, 6, 4\), the layer's"):
        prefill(run, plan, cache=Session(oracle.BUDGET, oracle.weights(oracle.BUDGET)).cache)
    for layer in (1, -1, 0.5):
        with pytest.raises(ValueError, match=f"layer: got {layer}"):
            prefill(run, plan, layer=layer)
    with pytest.raises(ValueError, match="implementation: got 'fast'; expected 'auto' or one of"):
        prefill(run, plan, implementation="fast")
    with pytest.raises(ValueError, match="x: got 30 rows; expected at most 16"):
        plan.pad(X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(run.cache)), "refused calls leave the cache alone"
    prefill(run, plan)


def test_params(run):
    plan = qsa.plan([5], cache=run.cache)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), run.params)
    with pytest.raises(ValueError, match=r"q_proj\.weight\.shape.*One layer's weights"):
        prefill(run, plan, params=stacked)
    mixed = dataclasses.replace(run.params, k_norm=run.params.k_norm.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"k_norm\.weight\.dtype: got bfloat16; expected float32"):
        prefill(run, plan, params=mixed)
    with pytest.raises(TypeError, match="dtype: got float16"):
        qsa.from_tensors(W, C, "float16")


@pytest.mark.parametrize(
    ("rows", "lengths", "options", "error", "match"),
    [
        (4, [1, 1, 1], {}, ValueError, "4 rows; expected a positive multiple of 3"),
        (0, [1, 1, 1], {}, ValueError, "0 rows"),
        (24, [8, 8, 8], {}, ValueError, "8 tokens per request; expected at most max_query_tokens = 7"),
        (3, [1, 1], {}, TypeError, "lengths"),
        (3, [1.0, 1.0, 1.0], {}, TypeError, "lengths"),
        (3, [1, 0, 1], {}, ValueError, "lengths.*at least counts"),
        (3, [1, 97, 1], {}, ValueError, "97; expected at most 96"),
        (6, [2, 2, 2], {"counts": [3, 1, 1]}, ValueError, "counts"),
        (6, [2, 2, 2], {"counts": [-1, 1, 1]}, ValueError, "counts"),
        (3, [1, 1, 1], {"layer": 1}, ValueError, "layer"),
        (3, [1, 1, 1], {"rope_positions": jnp.zeros((3, 4), jnp.int32)}, ValueError, "rope_positions"),
        (3, [1, 1, 1], {"implementation": "fast"}, ValueError, "implementation"),
    ],
)
def test_decode(run, rows, lengths, options, error, match):
    with pytest.raises(error, match=match):
        qsa.decode(run.params, jnp.zeros((rows, C.hidden)), run.cache, lengths, **options)
