"""QSA programs compiled for an H200 on a machine without one: the XLA path, its roundings, its memory."""

import deviceless
import pytest

ROUNDING = """
from jax.sharding import SingleDeviceSharding
from jaxcp.qsa.numerics import narrow, rounded, widen

device = SingleDeviceSharding(mesh(cp=1).devices.flat[0])

def kept(fn):
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=device)
    text = jax.jit(fn).lower(x).compile().as_text()
    return "reduce-precision" in text or "bf16[" in text

answer({
    "conversions": kept(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 3),
    "rounded": kept(lambda x: rounded(x, jnp.bfloat16) * 3),
    "narrow, widen": kept(lambda x: widen(narrow(x, jnp.bfloat16)) * 3),
    "widen": kept(lambda x: widen(x.astype(jnp.bfloat16)) * 3),
})
"""

LAYER = """
from deviceless_qsa import OneDevice, facts
from jaxcp import qsa
from jaxcp.qsa.decode import _decode
from jaxcp.qsa.prefill import _prefill

config, tokens = qsa.QSAConfig.flash_next(), 131072
one = OneDevice(mesh(cp=1))
cache = one.cache(config, tokens, layers=12, kv_dtype="float8_e4m3fn", index_dtype="bfloat16")  # a pool of each kind
params = one.shaped(jax.eval_shape(lambda: qsa.init_params(config, jax.random.key(0))))
plan = one.shaped(qsa.plan([1024], [tokens - 1024]))
options = {"implementation": "xla", "return_selection": False}
layer, length = (one.shape(s, jnp.int32) for s in ((), (1,)))
x = lambda rows: one.shape((rows, config.hidden), jnp.bfloat16)
lowered = {
    "prefill": _prefill.lower(params, x(1024), cache, plan, layer, peers=None, **options),
    "decode": _decode.lower(params, x(1), cache, length, length, None, layer, **options),
}
answer({name: facts(program.compile(), cache.k, cache.v, cache.index) for name, program in lowered.items()})
"""


@deviceless.requires_plugin
def test_rounding_points_survive_gpu_compilation(tmp_path):
    """XLA drops a narrowing conversion followed by a widening one; ours go through reduce-precision and stay."""
    kept = deviceless.run(ROUNDING, tmp_path)
    assert kept == {"conversions": False, "rounded": True, "narrow, widen": True, "widen": True}


@pytest.mark.slow
@deviceless.requires_plugin
def test_twelve_layers_of_cache_are_updated_in_place(tmp_path):
    """At the model's geometry and 128K tokens no program copies a pool, and temporaries stay below 256 MiB."""
    facts = deviceless.run(LAYER, tmp_path, timeout_s=300)
    for program in ("prefill", "decode"):
        assert not facts[program]["copies"]
        assert facts[program]["aliased"] >= facts[program]["pools"]
        assert facts[program]["temporary"] < 256 << 20
