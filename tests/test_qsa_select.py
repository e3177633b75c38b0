"""Block selection in CUDA without a GPU: its core on the host, how calls are done, blockers, machine code, programs."""

import dataclasses
import re
import shutil

import deviceless
import jax
import native_programs
import pytest
from native_programs import CSRC
from qsa_cases import cache_of
from test_kernel_binary import disassembled, resources

from jaxcp import errors, qsa
from jaxcp.native import builder
from jaxcp.qsa import flashinfer_topk, kernel_select, resolve
from jaxcp.qsa.selection import SELECT

FLASH = qsa.QSAConfig.flash_next()


def twin(tmp_path, **options):
    """Output of the selection's core on the host."""
    return native_programs.run_on_host("qsa_select_twin.cc", tmp_path, "-Wno-unknown-pragmas", timeout_s=120, **options)


def test_the_core_selects_as_a_stable_sort_does(tmp_path):
    assert twin(tmp_path) == "ok\n"


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("ties -= bit_count(all_tied);", ""),
        ("return {range.low, range.wanted};", "return {range.low, range.wanted - 1};"),
        ("wanted - range.wanted + found.inside <= enough", "wanted - range.wanted <= enough"),
        ("above += more", "above = more"),
        ("cut.ties > 0 ? *this : Before{above + inside, 0}", "*this"),
        ("(inside < cut.ties ? inside : cut.ties)", "inside"),
    ],
)
def test_the_twin_notices_a_broken_rule(rule, broken, tmp_path):
    shutil.copytree(CSRC / "qsa", tmp_path / "qsa")
    header = tmp_path / "qsa" / "select_cut.h"
    text = header.read_text()
    assert rule in text
    header.write_text(text.replace(rule, broken))
    with pytest.raises(AssertionError, match="returned"):
        twin(tmp_path, folder=tmp_path)


class TestPlan:
    def test_much_streams_in_bounded_memory(self):
        work = kernel_select.plan(131072, 65536, 512, 4)
        assert work == (kernel_select.STREAMING, 80 << 20)
        assert kernel_select.plan(8192, 8192, 512, 4) == (kernel_select.STREAMING, 128 * 64 * 1024 * 8)
        assert kernel_select.plan(32768, 32768, 512, 4) == (kernel_select.STREAMING, 80 << 20)

    def test_little_stores_its_scores(self):
        assert kernel_select.plan(1, 32768, 512, 4) == (kernel_select.STORED, 32768 * 4)
        assert kernel_select.plan(32, 100, 50, 4) == (kernel_select.STORED, 32 * 128 * 4)
        assert kernel_select.plan(2048, 2048, 512, 4) == (kernel_select.STORED, 16 << 20)
        assert kernel_select.plan(16384, 2048, 512, 4) == (kernel_select.STORED, 64 << 20)

    @pytest.mark.parametrize(("k", "heads"), [(2048, 4), (512, 8)])
    def test_what_cannot_stream_takes_rows_in_turns(self, k, heads):
        assert kernel_select.plan(131072, 65536, k, heads) == (kernel_select.STORED, 64 << 20)

    def test_one_row_may_exceed_the_bound(self):
        assert kernel_select.plan(5, 1 << 25, 2048, 4) == (kernel_select.STORED, 128 << 20)


class TestBlockers:
    def blockers(self, config=FLASH, **cache):
        with resolve.lowering_for("gpu"):
            return resolve.blockers_of(SELECT, config, cache_of(config, **cache))

    def test_flash_next_is_served(self):
        assert self.blockers()["cuda"] is None
        assert self.blockers(index_dtype="float8_e4m3fn")["cuda"] is None

    @pytest.mark.parametrize(
        ("config", "cache", "words"),
        [
            ({}, {"dtype": "float32"}, "float32"),
            ({"index_dim": 96}, {}, "index_dim = 96"),
            ({"index_heads": 9}, {}, "9 index heads"),
            ({"index_heads": 8, "index_dim": 64, "ratio": 3, "budget": 9000 * 3}, {"page_size": 15}, None),
        ],
    )
    def test_named(self, config, cache, words):
        why = self.blockers(dataclasses.replace(FLASH, **config), **cache)["cuda"]
        assert why is None if words is None else words in why

    def test_flashinfer(self, monkeypatch, tmp_path):
        monkeypatch.setenv("JAXCP_FLASHINFER_INCLUDE", str(tmp_path))
        assert "has no flashinfer/topk.cuh" in self.blockers()["flashinfer"]
        with pytest.raises(errors.BuildError, match=r"topk\.cuh"):
            flashinfer_topk.load()
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer" / "topk.cuh").write_text("enum class TopKTieBreak")
        assert self.blockers()["flashinfer"] is None
        assert "float64" in self.blockers(dtype="float64")["flashinfer"] if jax.config.jax_enable_x64 else True
        assert "2049" in self.blockers(dataclasses.replace(FLASH, budget=2049 * 4))["flashinfer"]

    def test_platform(self):
        if jax.default_backend() == "gpu":
            pytest.skip("the default backend is a GPU")
        cache = cache_of(FLASH)
        assert "platform cpu" in resolve.blockers_of(SELECT, FLASH, cache)["cuda"]
        assert resolve.resolve("selection", SELECT, "auto", FLASH, cache) is SELECT["xla"]
        with pytest.raises(errors.BackendError, match=r"'cuda' cannot compute selection: .* Usable here: xla"):
            resolve.resolve("selection", SELECT, "cuda", FLASH, cache)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_machine_code(architecture, tmp_path):
    native_programs.nvcc()
    library = builder.build("qsa", architectures=("sm_90a", "sm_100a"))
    cubins = native_programs.machine_codes(library, architecture, tmp_path)
    names = re.compile("store_scores|stream_blocks|top_blocks")
    used = {name: facts for cubin in cubins for name, facts in resources(cubin).items() if names.search(name)}
    assert len(used) == 8 + 4 + 4 + 3, sorted(used)
    for name, facts in used.items():
        assert facts["STACK"] == facts["LOCAL"] == 0, f"{name} spills: {facts}"
    for name, code in ((name, code) for cubin in cubins for name, code in disassembled(cubin).items()):
        if not names.search(name) or "top_blocks" in name:
            continue
        copies = [operation for operation in code if operation.startswith("LDGSTS")]
        assert copies, name
        assert all("128" in copy for copy in copies), f"{name}: keys are not copied in units of 16 bytes"
        assert not [operation for operation in code if re.match("LDL|STL", operation)], name
        tiles, dim = map(int, re.search(r"Li(\d)ELi(\d+)E", name).groups())
        products = tiles * (4 if tiles == 2 else 2) * dim // 16  # of a step; nothing is unrolled or cloned beyond it
        assert sum(operation.startswith("HMMA.16816.F32") for operation in code) == products, name


@pytest.mark.slow
def test_flashinfer_header_compiles(tmp_path):
    native_programs.nvcc()
    if why := flashinfer_topk.header_blocker():
        pytest.skip(f"no FlashInfer top-k: {why}")
    flags = ["-cubin", "-diag-suppress=940", "-I", str(flashinfer_topk.include_folder())]
    source = CSRC / "qsa" / "select_flashinfer.cu"
    output = native_programs.compile_cuda([source], tmp_path / "flashinfer.cubin", "sm_90a", flags)
    assert sum("TopK" in name for name in resources(output)) == 7  # one to select, six sizes to sort


PROGRAM = """
from deviceless_qsa import OneDevice, calls, facts
from jaxcp import qsa
from jaxcp.qsa import resolve
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import rows_of
from jaxcp.qsa.selection import SELECT

config, rows, tokens, layers = qsa.QSAConfig.flash_next(), {rows}, 131072, 12
one = OneDevice(mesh(cp=1))
cache = one.cache(config, tokens, layers, index_dtype={dtype!r})

def stack(q, cache, segments):
    def layer(cache, at):
        index, q = at
        queries = Queries(segments, rows_of(segments, rows), tokens, rows)
        keys = cache.index.at[index, 1].set(7)  # what a layer writes before it selects
        cache = type(cache)(**(vars(cache) | {{"index": keys}}))
        select = resolve.resolve("selection", SELECT, "auto", config, cache).run
        return cache, select(q, cache, index, queries, config)
    cache, ids = jax.lax.scan(layer, cache, (jnp.arange(layers, dtype=jnp.int32), q))
    return ids, cache

arguments = one.shape((layers, rows, 4, 128), jnp.bfloat16), cache, one.segments()
with resolve.lowering_for("gpu"):
    compiled = jax.jit(stack, donate_argnums=1).lower(*arguments).compile()
answer(facts(compiled, cache.index) | {{"calls": calls(compiled, "jaxcp_qsa_select")}})
"""


@deviceless.requires_plugin
@pytest.mark.parametrize(
    ("rows", "dtype", "architecture"), [(1, None, "h200"), (8192, None, "b200"), (8192, "float8_e4m3fn", "h200")]
)
def test_compiled_into_a_scan_without_copies(rows, dtype, architecture, tmp_path):
    facts = deviceless.run(PROGRAM.format(rows=rows, dtype=dtype), tmp_path, architecture)
    assert facts["calls"] == 1
    assert facts["copies"] == []
    assert facts["aliased"] >= facts["pools"]
    assert facts["temporary"] <= 128 << 20, facts


def test_every_implementation_has_one_signature():
    import inspect

    assert len({str(inspect.signature(entry.run)) for entry in SELECT.values()}) == 1
