"""What XLA schedules for context-parallel prefill on 8 H200s and B200s: which gather runs behind what, and no copies.

Selection and attention are stand-ins for kernels: custom calls whose handlers compile-only programs do not need.
"""

import re

import deviceless
import pytest

from jaxcp import overlap
from jaxcp.overlap import copy_engines

# One worker: programs are compiled once for all tests of this file.
pytestmark = [deviceless.requires_plugin, pytest.mark.xdist_group("schedule_prefill")]

LAYERS, TOKENS = 2, 8192

PREFILL = f"""
from functools import partial as bind
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxcp import overlap, qsa
from jaxcp.overlap import copy_engines
from jaxcp.qsa import resolve
from jaxcp.qsa.operations import PREPARE, WRITE_INDEX, WRITE_KV
from jaxcp.qsa.resolve import Implementation
from jaxcp.qsa.selection import SELECT
from jaxcp.qsa.sparse import ATTEND

LAYERS, TOKENS = {LAYERS}, {TOKENS}
CONFIG = qsa.QSAConfig.flash_next()
M = mesh(cp=8)

def select(index_q, cache, layer, queries, config):
    made = jax.ShapeDtypeStruct((len(index_q), config.selected_blocks), jnp.int32)
    return jax.ffi.ffi_call("select", made)(index_q, cache.index, cache.page_table, layer, *queries.rows[1:])

def attended(params, q_gate, angles, blocks, cache, layer, queries):
    made = jax.ShapeDtypeStruct((len(q_gate), q_gate.shape[1] // 2), q_gate.dtype)
    call = jax.ffi.ffi_call("attend", made)
    return call(q_gate, *angles, blocks, cache.k, cache.v, cache.page_table, layer, *queries.rows[1:])

SELECT["stand-in"], ATTEND["stand-in"] = Implementation(select), Implementation(None, attended=lambda config: attended)
for table in PREPARE, WRITE_INDEX, WRITE_KV:
    table["stand-in"] = Implementation(table["cuda"].run)

def gathers(key, barrier):
    def schedule(small, large, local, axis_name):
        small = overlap.all_gather(small, axis_name)
        if barrier:
            small, local, large = lax.optimization_barrier((small, local, large))
        with set_xla_metadata(combiner_key="large" if key else ""):
            large = lax.all_gather(large, axis_name, tiled=True, to="invarying")
        return small, local, lambda work: (large, work)
    return schedule

def bare(small, large, local, axis_name):
    large = overlap.all_gather(large, axis_name)
    return overlap.all_gather(small, axis_name), local, lambda work: (large, work)

overlap.SCHEDULES["key alone"] = gathers(key=True, barrier=False)
overlap.SCHEDULES["barrier alone"] = gathers(key=False, barrier=True)
overlap.SCHEDULES["neither"] = bare

def kernels():
    with resolve.lowering_for("gpu"):
        return program("cuda")

def program(implementation="stand-in", prefix=0, remat=False, kv_dtype=None, index_keys="raw", extra=None, **options):
    pages = (TOKENS + prefix) // 64
    cache = jax.eval_shape(lambda: qsa.init_cache(
        CONFIG, requests=1, pages=1 + pages, layers=LAYERS, page_table=1 + np.arange(pages)[None], kv_dtype=kv_dtype))
    params = jax.eval_shape(lambda: jax.tree.map(
        lambda a: jnp.stack([a] * LAYERS), qsa.init_params(CONFIG, jax.random.key(0))))
    plan = qsa.plan([TOKENS], [prefix], cp=8, cache=cache, index_keys=index_keys)
    x = jax.ShapeDtypeStruct((plan.rows, CONFIG.hidden), jnp.bfloat16)
    step = bind(qsa.prefill_layers, axis_name="cp", implementation=implementation, **options)
    specs = P(), P("cp"), P(), P()
    place = lambda spec, tree: jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(M, spec)), tree)
    mapped = jax.shard_map(jax.checkpoint(step) if remat else step, mesh=M, in_specs=specs, out_specs=(P("cp"), P()))
    lowered = jax.jit(mapped, donate_argnums=2).lower(*(place(*a) for a in zip(specs, (params, x, cache, plan))))
    fast = {{"xla_gpu_mock_custom_calls": True, "xla_backend_optimization_level": 0}}
    done = lowered.compile(compiler_options=fast | (extra or {{}}))
    memory = done.memory_analysis()
    pools = sum(a.size * a.dtype.itemsize for a in (cache.k, cache.v, cache.index))
    return {{"hlo": done.as_text(), "aliased": memory.alias_size_in_bytes, "pools": pools}}
"""

BOTH = 'answer({"unrolled": program(), "scanned": program(scan=True)})'
# The others are scanned, which compiles a layer once.
APART = """
program = bind(program, scan=True)
answer({
    "checkpoint": program(remat=True), "key alone": program(schedule="key alone"),
    "barrier alone": program(schedule="barrier alone"), "neither": program(schedule="neither"),
})"""
VARIANTS = """
program = bind(program, scan=True)
answer({
    "prefix": program(prefix=57344), "float8": program(kv_dtype="float8_e4m3fn"), "xla": program("xla"),
    "kv_first": program(schedule="kv_first"), "inline": program(schedule="inline"),
    "compressed": program(index_keys="compressed"), "cuda": kernels(),
} | {way: program(extra=extra) for way, extra in copy_engines.WAYS.items()})"""


@pytest.fixture(scope="module", params=deviceless.ARCHITECTURES)
def stack(request, tmp_path_factory):
    return deviceless.run(PREFILL + BOTH, tmp_path_factory.mktemp("prefill"), request.param, timeout_s=300)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return deviceless.run(PREFILL + APART, tmp_path_factory.mktemp("prefill"), timeout_s=500)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return deviceless.run(PREFILL + VARIANTS, tmp_path_factory.mktemp("prefill"), timeout_s=500)


def gathers(program) -> list[overlap.Collective]:
    """The program's collectives, in order: all of them all-gathers."""
    found = list(overlap.report(program["hlo"]).collectives)
    assert {c.kind for c in found} == {"all-gather"}
    return found


def behind(collective) -> set[str]:
    return {operation.what for operation in collective.behind}


def assert_kv_runs_behind_the_indexer(program, layers, selection="select", writer="jaxcp_qsa_store_kv"):
    found = gathers(program)
    assert len(found) == 2 * layers, "a layer gathers index keys once, K and V once"
    for index, kv in zip(found[::2], found[1::2], strict=True):
        assert index.shape == f"bf16[{TOKENS},128]"
        assert kv.shape in (f"bf16[{TOKENS},1024]", f"u8[{TOKENS},1024]")
        assert kv.asynchronous
        assert selection in behind(kv), "K and V travel while blocks are scored and selected"
        assert not behind(index) & {selection, "attend"}
        assert {o.what for o in kv.consumers} == {writer}, "they are written to the cache, and read nowhere else"
        if writer != "scatter":  # XLA's own attention has norms of queries, which it may do anywhere
            assert kv.following == kv.consumers[0], "nothing follows the wait but what needs it"


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_kv_runs_behind_the_indexer(stack, form):
    layers = LAYERS if form == "unrolled" else 1
    assert_kv_runs_behind_the_indexer(stack[form], layers)
    assert {c.times for c in gathers(stack[form])} == {1 if form == "unrolled" else LAYERS}


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_kv_starts_directly_behind_the_index_keys(stack, form):
    """Nothing of a layer runs between the end of the first gather and the start of the second."""
    hlo = stack[form]["hlo"]
    kinds = deviceless_schedule(hlo)
    for at, kind in enumerate(kinds):
        if kind == "all-gather-done 128":
            assert kinds[at + 1] == "all-gather-start 1024"
    assert kinds.count("all-gather-start 1024") == (LAYERS if form == "unrolled" else 1)


def deviceless_schedule(hlo) -> list[str]:
    """What a schedule executes: fusions, calls, and the gathers' starts and ends with their rows' width."""
    found = []
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", line)
        if match and match[2].startswith("all-gather"):
            found.append(f"{match[2]} {re.findall(r',([0-9]+)]', match[1])[-1]}")
        elif match and match[2] in ("fusion", "custom-call", "while", "copy"):
            found.append(match[2])
    return found


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_no_pool_is_copied(stack, form):
    assert_no_pool_is_copied(stack[form])


def assert_no_pool_is_copied(program):
    pool = rf"\[{LAYERS},{1 + TOKENS // 64},\d[\d,]*\]"
    made = re.findall(rf"^\s+(?:ROOT )?%[\w.\-]+ = \w+{pool}\S* ([a-z][\w\-]*)\(", program["hlo"], re.MULTILINE)
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter"}
    assert program["aliased"] >= program["pools"]


def test_rematerialised_layers_keep_the_schedule(apart):
    assert_kv_runs_behind_the_indexer(apart["checkpoint"], 1)


@pytest.mark.parametrize("variant", ["key alone", "barrier alone"])
def test_key_and_barrier_each_keep_the_gathers_apart(apart, variant):
    found = gathers(apart[variant])
    assert len(found) == 2
    assert all(kv.asynchronous for kv in found[1::2])


def test_without_both_the_gathers_become_one(apart):
    """What the key and the barrier are for: one gather of everything, and the indexer waits for K and V."""
    assert len(gathers(apart["neither"])) == 1
    with pytest.raises(AssertionError, match="gathers index keys once"):
        assert_kv_runs_behind_the_indexer(apart["neither"], 1)


def test_projections_hide_the_index_keys(apart):
    """The query projection, the layer's largest, runs while index keys travel."""
    for index in gathers(apart["checkpoint"])[::2]:
        assert index.asynchronous
        assert "dot_general" in behind(index)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["prefix", "float8", *copy_engines.WAYS])
def test_variants_keep_the_schedule(variants, variant):
    assert_kv_runs_behind_the_indexer(variants[variant], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "selection", "writer"),
    [("xla", "top_k", "scatter"), ("cuda", "jaxcp_qsa_select", "jaxcp_qsa_store_kv")],
)
def test_every_indexer_hides_kv(variants, implementation, selection, writer):
    assert_kv_runs_behind_the_indexer(variants[implementation], 1, selection, writer)
    assert_no_pool_is_copied(variants[implementation])


@pytest.mark.slow
def test_compressed_index_keys_are_a_quarter(variants):
    """64 bytes a token, and seven raw keys per rank for the rings."""
    index, kv = gathers(variants["compressed"])[:2]
    assert index.shape == f"bf16[{TOKENS // 4 + 8 * 7},128]"
    assert behind(kv) >= {"select"}


@pytest.mark.slow
def test_kv_first(variants):
    for kv, index in zip(*[iter(gathers(variants["kv_first"]))] * 2, strict=True):
        assert (kv.shape, index.shape) == (f"bf16[{TOKENS},1024]", f"bf16[{TOKENS},128]")
        assert "dot_general" in behind(kv)
        assert "select" not in behind(kv)


@pytest.mark.slow
def test_inline_waits_for_kv(variants):
    for kv in gathers(variants["inline"])[1::2]:
        assert not behind(kv) & {"select", "dot_general"}
