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
import re
from jax.sharding import SingleDeviceSharding
from jaxcp import qsa
from jaxcp.qsa.decode import _decode
from jaxcp.qsa.prefill import _prefill

device = SingleDeviceSharding(mesh(cp=1).devices.flat[0])

def shaped(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), tree)

def facts(lowered, cache):
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    pools = "|".join(re.escape(",".join(map(str, a.shape))) for a in (cache.k, cache.index))
    copies = re.findall(rf"(?:copy|convert)[\\w.\\-]* = \\S*\\[(?:{pools})\\]", compiled.as_text())
    return {"temporary": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes, "copies": copies}

config, tokens = qsa.QSAConfig.flash_next(), 131072
pages = tokens // 64
storage = {"kv_dtype": "float8_e4m3fn", "index_dtype": "bfloat16"}  # a pool of each kind
cache = shaped(jax.eval_shape(lambda: qsa.init_cache(
    config, requests=1, pages=1 + pages, layers=12, page_table=1 + np.arange(pages)[None], **storage)))
params = shaped(jax.eval_shape(lambda: qsa.init_params(config, jax.random.key(0))))
plan = qsa.plan([1024], [tokens - 1024])
options = {"implementation": "xla", "return_selection": False}
layer, length = (jax.ShapeDtypeStruct(s, jnp.int32, sharding=device) for s in ((), (1,)))
x = lambda rows: jax.ShapeDtypeStruct((rows, config.hidden), jnp.bfloat16, sharding=device)
answer({
    "pools": sum(a.size * a.dtype.itemsize for a in (cache.k, cache.v, cache.index)),
    "prefill": facts(_prefill.lower(params, x(1024), cache, shaped(plan), layer, **options), cache),
    "decode": facts(_decode.lower(params, x(1), cache, length, length, None, layer, **options), cache),
})
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
        assert facts[program]["aliased"] >= facts["pools"]
        assert facts[program]["temporary"] < 256 << 20
