"""A snippet for `deviceless.run`: two layers of context-parallel prefill on eight GPUs, with the CUDA kernels.

It defines the layers' shapes, `text(fn, donated, shardings, arguments)`, the scheduled HLO of a program, and `ranks()`,
that of a rank of eight.
"""

SNIPPET = """
from functools import partial as bind
from jax.sharding import SingleDeviceSharding
from jaxcp import qsa
from jaxcp.qsa import resolve

LAYERS, TOKENS = 2, 8192
CONFIG, F, M = qsa.QSAConfig.flash_next(), jax.ShapeDtypeStruct, mesh(cp=8)
pages = 1 + np.arange(TOKENS // 64)[None]
cache = jax.eval_shape(
    lambda: qsa.init_cache(CONFIG, requests=1, pages=1 + pages.size, layers=LAYERS, page_table=pages))
params = jax.eval_shape(
    lambda: jax.tree.map(lambda a: jnp.stack([a] * LAYERS), qsa.init_params(CONFIG, jax.random.key(0))))
plan = qsa.plan([TOKENS], cp=8, cache=cache)

def text(fn, donated, shardings, arguments):
    placed = [jax.tree.map(lambda a: F(a.shape, a.dtype, sharding=to), tree) for to, tree in zip(shardings, arguments)]
    fast = {"xla_gpu_mock_custom_calls": True, "xla_backend_optimization_level": 0}
    with resolve.lowering_for("gpu"):
        return jax.jit(fn, donate_argnums=donated).lower(*placed).compile(compiler_options=fast).as_text()

def ranks():
    def prefill_layers(params, x, cache, plan):
        return qsa.prefill_layers(params, x, cache, plan, axis_name="cp")

    specs = P(), P("cp"), P(), P()
    x = F((plan.rows, CONFIG.hidden), jnp.bfloat16)
    mapped = jax.shard_map(prefill_layers, mesh=M, in_specs=specs, out_specs=(P("cp"), P()))
    return text(mapped, 2, [NamedSharding(M, spec) for spec in specs], (params, x, cache, plan))
"""
