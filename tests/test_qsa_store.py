"""Norms, rotations and writes into the cache in CUDA, without a GPU: integers, blockers, compiled programs."""

import dataclasses

import deviceless
import jax
import native_programs
import pytest
from qsa_cases import cache_of

from jaxcp import errors, qsa
from jaxcp.qsa import kernel_attend, mixing, resolve
from jaxcp.qsa.operations import PREPARE, WRITE_INDEX, WRITE_KV, operations

FLASH = qsa.QSAConfig.flash_next()
TABLES = {"prepare": PREPARE, "write_index": WRITE_INDEX, "write_kv": WRITE_KV}


def test_blocks_slots_and_places(tmp_path):
    assert native_programs.run_on_host("qsa_store_test.cc", tmp_path) == "ok\n"


@pytest.mark.parametrize(
    ("config", "cache", "words"),
    [
        ({}, {}, None),
        ({}, {"kv_dtype": "float8_e4m3fn", "index_dtype": "float8_e4m3fn"}, None),
        ({}, {"dtype": "float32"}, "float32"),
        ({"head_dim": 96}, {}, "head_dim = 96"),
        ({"index_dim": 96}, {}, "index_dim = 96"),
        ({"rotary_dim": 24, "mrope_section": (4, 4, 4)}, {}, "rotary_dim = 24"),
        ({"ratio": 64}, {}, "ratio = 64"),
    ],
)
def test_blockers_are_named(config, cache, words):
    config = dataclasses.replace(FLASH, **config)
    with resolve.lowering_for("gpu"):
        for table in TABLES.values():
            why = resolve.blockers_of(table, config, cache_of(config, **cache))["cuda"]
            assert why is None if words is None else words in why


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the default backend is a GPU")
def test_one_name_is_for_all_operations():
    cache = cache_of(FLASH)
    auto = operations("auto", FLASH, cache)
    assert [getattr(auto, name) for name in TABLES] == [table["xla"].run for table in TABLES.values()]
    with pytest.raises(errors.BackendError, match=r"'cuda' cannot compute sparse attention: .* Usable here: xla"):
        operations("cuda", FLASH, cache)
    with pytest.raises(ValueError, match="implementation"):
        operations("pallas", FLASH, cache)


def test_attention_takes_rotated_queries_where_it_cannot_rotate():
    config = dataclasses.replace(FLASH, rotary_dim=24, mrope_section=(4, 4, 4))
    with resolve.lowering_for("gpu"):
        own, other = (operations("auto", c, cache_of(c)) for c in (FLASH, config))
    assert own.attended is kernel_attend.attended_cuda
    assert (other.attended.func, other.attended.keywords) == (mixing.attended, {"attend": kernel_attend.attend_cuda})
    assert other.prepare is PREPARE["xla"].run


PROGRAM = """
from deviceless_qsa import OneDevice, calls, facts
from jaxcp import qsa
from jaxcp.qsa import resolve
from jaxcp.qsa.forward import forward
from jaxcp.qsa.segments import Segments

config, rows, tokens, layers = qsa.QSAConfig.flash_next(), {rows}, 131072, 3
one = OneDevice(mesh(cp=1))
cache = one.cache(config, tokens, layers, kv_dtype={kv_dtype!r})
params = one.shaped(jax.eval_shape(lambda: qsa.init_params(config, jax.random.key(0), "bfloat16")))

def stack(params, x, cache, segments):
    def layer(carry, at):
        y, cache, _ = forward(
            params, carry[0], carry[1], segments, None, at, context=tokens, longest=rows, implementation="auto")
        return (carry[0] + y, cache), None
    return jax.lax.scan(layer, (x, cache), jnp.arange(layers, dtype=jnp.int32))[0]

arguments = params, one.shape((rows, config.hidden), jnp.bfloat16), cache, one.segments()
with resolve.lowering_for("gpu"):
    compiled = jax.jit(stack, donate_argnums=2).lower(*arguments).compile()
names = "prepare", "store_index", "store_kv", "select", "mix"
pools = cache.k, cache.index, cache.ring_keys, cache.ring_positions
answer(facts(compiled, *pools) | {{"calls": [calls(compiled, f"jaxcp_qsa_{{name}}") for name in names]}})
"""


@deviceless.requires_plugin
@pytest.mark.parametrize(
    ("architecture", "rows", "kv_dtype", "calls"),
    [
        ("h200", 1, None, [1, 1, 1, 1, 1]),
        ("b200", 1, None, [1, 1, 1, 1, 1]),
        ("h200", 64, "float8_e4m3fn", [1, 1, 1, 1, 0]),
    ],
)
def test_caches_are_written_in_place(architecture, rows, kv_dtype, calls, tmp_path):
    facts = deviceless.run(PROGRAM.format(rows=rows, kv_dtype=kv_dtype), tmp_path, architecture)
    assert facts["calls"] == calls
    assert facts["copies"] == []
    assert facts["aliased"] >= facts["pools"]


@pytest.mark.parametrize("table", TABLES)
def test_every_implementation_has_one_signature(table):
    import inspect

    assert len({str(inspect.signature(entry.run)) for entry in TABLES[table].values()}) == 1
