"""Queries, attention and gate some rows at a time: the same rows, and memory that does not grow with them."""

import deviceless
import jax.numpy as jnp
import numpy as np
import pytest
import qsa_oracle as oracle
from qsa_parallel import Ranks
from qsa_runs import Session, close, same_selection

from jaxcp.qsa import mixing

C, W = oracle.TINY, oracle.weights(oracle.TINY)


@pytest.fixture
def seen(monkeypatch):
    """Rows of every step's attention, traced from then on."""
    rows = []

    def prepare_queries(params, q_gate, angles):
        rows.append(len(q_gate))
        return original(params, q_gate, angles)

    original = mixing.prepare_queries
    monkeypatch.setattr(mixing, "prepare_queries", prepare_queries)
    return rows


@pytest.mark.parametrize(
    ("rows", "at_once", "steps"),
    [(64, 64, [64]), (64, 16, [16]), (67, 16, [16, 3]), (17, 16, [16, 1]), (0, 16, [0])],
)
def test_steps(monkeypatch, rows, at_once, steps):
    monkeypatch.setattr(mixing, "ROWS_AT_ONCE", at_once)
    traced = []

    def double(arrays):
        traced.append(len(arrays[0]))
        return 2 * arrays[0] + arrays[1][0][:, None]

    x, y = np.arange(3 * rows).reshape(rows, 3), np.arange(rows)
    got = mixing._in_turn(double, (jnp.asarray(x), (jnp.asarray(y),)), rows)
    assert (got == 2 * x + y[:, None]).all()
    assert sorted(set(traced), reverse=True) == steps


def test_prefill_in_steps(monkeypatch, seen):
    x = {0: oracle.hidden(C, 50), 1: oracle.hidden(C, 9, 1)}
    whole = Session(C, W, requests=2).feed(x)
    monkeypatch.setattr(mixing, "ROWS_AT_ONCE", 32)
    seen.clear()
    steps = Session(C, W, requests=2, rows=80).feed(x)  # another bucket: traced anew
    assert sorted(seen) == [16, 32]
    for request in x:
        close(steps[request][0], whole[request][0], "float32")
        same_selection(steps[request][1], whole[request][1])


def test_context_parallel_prefill_in_steps(monkeypatch, seen):
    x = {0: oracle.hidden(C, 90), 1: oracle.hidden(C, 9, 1)}
    whole = Session(C, W, requests=2).feed(x)
    monkeypatch.setattr(mixing, "ROWS_AT_ONCE", 8)
    steps = Ranks(C, W, cp=4, requests=2, rows=112).feed(x)
    assert sorted(seen[-2:]) == [4, 8]
    for request in x:
        close(steps[request][0], whole[request][0], "float32")
        same_selection(steps[request][1], whole[request][1])


@deviceless.requires_plugin
@pytest.mark.parametrize("architecture", deviceless.ARCHITECTURES)
def test_memory_on_a_gpu(tmp_path, architecture):
    """32768 rows over 131072 keys, a rank's share of four: selections, scratch and a step's rows."""
    temporary, loops = deviceless.run(
        """
        from jaxcp import qsa
        from jaxcp.qsa import forward, resolve
        from jaxcp.qsa.layer import products
        from jaxcp.qsa.segments import Segments

        rows, keys, config = 32768, 131072, qsa.QSAConfig.flash_next()
        params = jax.eval_shape(lambda: qsa.init_params(config, jax.random.key(0), "bfloat16"))
        cache = jax.eval_shape(lambda: qsa.init_cache(config, requests=1, pages=1 + keys // 64, dtype="bfloat16"))
        of = jax.eval_shape(products, params, jax.ShapeDtypeStruct((rows, config.hidden), jnp.bfloat16))
        number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

        def mixer(cache, params, of, layer, table):
            bounds = {"context": keys, "longest": rows, "implementation": "cuda"}
            mixed, _, cache, blocks = forward.mix(params, of, cache, Segments(*table), None, layer, **bounds)
            return mixed, cache, blocks

        place = jax.sharding.SingleDeviceSharding(mesh(x=1).devices.item())
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
                                 (cache, params, of, number(), number(4, 1)))
        with resolve.lowering_for("gpu"):
            program = jax.jit(mixer, donate_argnums=0).lower(*arguments).compile()
        answer([program.memory_analysis().temp_size_in_bytes, program.as_text().count(" while(")])
        """,
        tmp_path,
        architecture,
    )
    assert temporary < 256 << 20
    assert loops == 0, "the kernel's handler walks the rows"
