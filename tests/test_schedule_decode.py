"""What XLA schedules for decode steps on 8 H200s: collectives per layer, the kernel, a cache that is never copied."""

import re

import deviceless
import pytest

# One worker: programs are compiled once for all tests of this file.
pytestmark = [deviceless.requires_plugin, pytest.mark.xdist_group("schedule_decode")]

LAYERS, PAGES = 3, 4097

DECODE = f"""
import dataclasses
from jax import lax
import jaxcp
from jaxcp import decode
from jaxcp.layout import Interleave
from jaxcp.models import mla

LAYERS, PAGES, REQUESTS = {LAYERS}, {PAGES}, 8
M = mesh(cp=8)
LENGTHS = jax.ShapeDtypeStruct((REQUESTS,), jnp.int32)

def abstract_cache(config):
    whole = jax.eval_shape(lambda: decode.init_cache(config, Interleave(1), pages=8 * PAGES, requests=REQUESTS))
    return dataclasses.replace(whole, layout=Interleave(8))

def program(step, specs, arguments, out_specs, cache_index):
    place = lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(M, spec))
    shapes = jax.tree.map(place, specs, arguments, is_leaf=lambda x: isinstance(x, P))
    mapped = jax.shard_map(step, mesh=M, in_specs=specs, out_specs=out_specs, check_vma=False)
    done = jax.jit(mapped, donate_argnums=cache_index).lower(*shapes).compile()
    memory = done.memory_analysis()
    return {{"hlo": done.as_text(), "temp": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes,
            "cache": arguments[cache_index].config.bytes_per_rank(PAGES)}}

def mla_layers(backend):
    config = mla.MLAConfig.deepseek_v2_lite()
    exchange = jaxcp.Exchange(M, "cp", max_tokens=32, heads=16, head_dim=512, dtype="bfloat16", backend=backend)
    cache = abstract_cache(config.cache(LAYERS))
    stack = lambda: jax.tree.map(lambda x: jnp.stack([x] * LAYERS),
                                 mla.padded(mla.random_weights(config, jax.random.key(0)), 8))
    def step(weights, x, cache, lengths):
        def body(carry, layer):
            return mla.layer(layer[1], *carry, lengths, config=config, exchange=exchange, index=layer[0]), None
        return lax.scan(body, (x, cache), (jnp.arange(LAYERS), weights))[0]
    weight_specs = {{name: P(None, *spec) for name, spec in mla.partition_specs(config, "cp").items()}}
    specs = cache.partition_specs("cp")
    x = jax.ShapeDtypeStruct((REQUESTS, config.width), jnp.bfloat16)
    return program(step, (weight_specs, P(), specs, P()), (jax.eval_shape(stack), x, cache, LENGTHS), (P(), specs), 2)

def gqa_layers(name, query_tokens, cache_dtype):
    exchange = jaxcp.Exchange(M, "cp", max_tokens=32, heads=32, head_dim=128, dtype="bfloat16", backend="a2a")
    cache = abstract_cache(decode.CacheConfig.gqa(layers=LAYERS, kv_heads=4, head_dim=128, dtype=cache_dtype))
    def step(q, k, v, cache, lengths):
        def body(carry, layer):
            out, cache = getattr(decode, name)(carry[0], k, v, carry[1], lengths, exchange=exchange, layer=layer)
            return (out, cache), None
        return lax.scan(body, (q, cache), jnp.arange(LAYERS))[0]
    rows = lambda heads: jax.ShapeDtypeStruct((REQUESTS * query_tokens, heads, 128), jnp.bfloat16)
    specs, heads = cache.partition_specs("cp"), P(None, "cp")
    return program(step, (heads, P(), P(), specs, P()), (rows(32), rows(4), rows(4), cache, LENGTHS), (heads, specs), 3)

answer({{
    "mla a2a": mla_layers("a2a"), "mla ag_rs": mla_layers("ag_rs"),
    "gqa float8": gqa_layers("attention", 4, "float8_e4m3fn"), "gqa prefill": gqa_layers("prefill", 128, "bfloat16"),
}})
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Scans over layers, so that a program holds the operations of one layer once."""
    return deviceless.run(DECODE, tmp_path_factory.mktemp("decode"), timeout_s=300)


# Per layer; tensor parallelism's two all-reduces belong to the model, not to attention.
COLLECTIVES = {
    "mla a2a": ["all-gather", "all-reduce", "all-reduce", "all-to-all"],
    "mla ag_rs": ["all-gather", "all-gather", "all-reduce", "all-reduce", "reduce-scatter"],
    "gqa float8": ["all-gather", "all-to-all"],
    "gqa prefill": ["all-gather"],  # keys and values of a chunk together
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_layer_has_these_collectives(programs, name):
    assert sorted(deviceless.collectives(programs[name]["hlo"])) == COLLECTIVES[name]


@pytest.mark.parametrize("name", ["mla a2a", "gqa float8"])
def test_the_merge_is_the_pallas_kernel(programs, name):
    assert deviceless.pallas_kernels(programs[name]["hlo"]) == ["lse_merge"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_cache_is_updated_in_place(programs, name):
    """Whatever yields an array of the cache's shape passes it on or scatters into it; and no buffer is as large."""
    program = programs[name]
    made = re.findall(rf"%([\w.\-]+) = \w+\[{LAYERS},{PAGES},\d[\d,]*\]\S* ([a-z][\w\-]*)\(", program["hlo"])
    scatters = [result for result, kind in made if kind == "scatter"]
    fusions = [result for result, kind in made if kind == "fusion"]
    assert {kind for _, kind in made} <= {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter"}
    assert len(scatters) == len(fusions) == (2 if name.startswith("gqa") else 1)
    assert program["aliased"] >= program["cache"]
    assert program["temp"] < program["cache"] / 4
