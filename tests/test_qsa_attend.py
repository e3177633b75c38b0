"""Sparse attention in CUDA, without a GPU: lists of tiles, how calls are cut up, blockers, compiled programs."""

import dataclasses
import itertools
import re

import deviceless
import jax
import native_programs
import pytest
import qsa_attention_cases as attention
from qsa_cases import cache_of
from test_kernel_binary import disassembled, resources

from jaxcp import errors, qsa
from jaxcp.native import builder
from jaxcp.qsa import kernel_attend, resolve
from jaxcp.qsa.sparse import ATTEND

FLASH = qsa.QSAConfig.flash_next()


def test_lists_of_tiles(tmp_path):
    assert native_programs.run_on_host("qsa_attend_tile_test.cc", tmp_path) == "ok\n"


class TestPlan:
    def test_many_rows_are_tiles_of_five_uncut(self):
        work = kernel_attend.plan(8192, FLASH, 512, 8192)
        assert (work.tile_rows, work.splits) == (5, 1)
        assert work.slice >= 8192
        assert work.scratch == 1639 * (2 + 5 * 513) + 3  # partials would begin at 16 bytes

    def test_scratch_is_bounded(self):
        work = kernel_attend.plan(1 << 20, FLASH, 512, 1 << 20)
        assert work.slice % work.tile_rows == 0
        assert work.scratch * 4 <= 64 << 20

    @pytest.mark.parametrize("longest", [1, 4])
    def test_rows_of_many_requests_go_alone(self, longest):
        assert kernel_attend.plan(32, FLASH, 512, longest).tile_rows == 1

    @pytest.mark.parametrize(
        ("rows", "longest", "splits"),
        # What was fastest on an H200 (tests/native/qsa_attend_bench.cu: decode, short), or within 3 % of it.
        [(1, 1, 20), (16, 1, 4), (32, 1, 2), (64, 1, 1), (64, 64, 5), (128, 128, 2), (256, 256, 1), (2048, 2048, 1)],
    )
    def test_lists_are_cut_where_that_is_faster(self, rows, longest, splits):
        work = kernel_attend.plan(rows, FLASH, 512, longest)
        assert work.splits == splits
        assert work.scratch >= (splits > 1) * splits * rows * 24 * 257

    @pytest.mark.parametrize("group", [1, 8, 12, 16, 40, 64])
    def test_limits_of_the_kernel(self, group):
        config = dataclasses.replace(FLASH, heads=group, kv_heads=1)
        for rows in (1, 7, 64, 1000, 100_000):
            for longest in (1, 3, rows):
                work = kernel_attend.plan(rows, config, 512, longest)
                assert 1 <= work.tile_rows <= kernel_attend.TILE_ROWS
                assert work.tile_rows * group <= kernel_attend.TILE_HEADS
                assert 1 <= work.splits <= kernel_attend.MOST_SPLITS
                assert work.splits == 1 or work.slice >= rows

    def test_the_table_reaches_every_way(self):
        """Tiles, rows alone, and those whose heads fill several MMAs and need lists."""
        ways = set()
        for case in attention.CASES:
            work = kernel_attend.plan(case.requests.rows, case.config, case.blocks, case.requests.longest)
            kind = "tiles" if work.tile_rows > 1 else "rows with lists" if case.group > 16 else "rows"
            ways.add((kind, "parts" if work.splits > 1 else "whole"))
        both = set(itertools.product(("tiles", "rows"), ("parts", "whole")))
        assert ways == both | {("rows with lists", "parts")}


class TestBlockers:
    def blocker(self, config=FLASH, **cache):
        with resolve.lowering_for("gpu"):
            return resolve.blockers_of(ATTEND, config, cache_of(config, **cache))["cuda"]

    def test_flash_next_is_served(self):
        assert self.blocker() is None

    @pytest.mark.parametrize(
        ("config", "cache", "words"),
        [
            ({}, {"dtype": "float32"}, "float32"),
            ({}, {"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
            ({"head_dim": 96}, {}, "head_dim = 96"),
            ({"heads": 130, "kv_heads": 2}, {}, "65 query heads"),
            ({"ratio": 8, "budget": 24}, {}, None),
            ({"ratio": 6, "budget": 24}, {"page_size": 12}, "ratio = 6"),
            ({"ratio": 1}, {"page_size": 1 << 21}, "blocks"),
        ],
    )
    def test_named(self, config, cache, words):
        why = self.blocker(dataclasses.replace(FLASH, **config), **cache)
        assert why is None if words is None else words in why

    def test_platform(self):
        if jax.default_backend() == "gpu":
            pytest.skip("the default backend is a GPU")
        cache = cache_of(FLASH)
        assert "platform cpu" in resolve.blockers_of(ATTEND, FLASH, cache)["cuda"]
        assert resolve.resolve("sparse attention", ATTEND, "auto", FLASH, cache) is ATTEND["xla"]
        with pytest.raises(errors.BackendError, match=r"'cuda' cannot compute sparse attention: .* Usable here: xla"):
            resolve.resolve("sparse attention", ATTEND, "cuda", FLASH, cache)
        with pytest.raises(ValueError, match="implementation"):
            resolve.resolve("sparse attention", ATTEND, "pallas", FLASH, cache)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_machine_code(architecture, tmp_path):
    native_programs.nvcc()
    library = builder.build("qsa", architectures=("sm_90a", "sm_100a"))
    cubins = native_programs.machine_codes(library, architecture, tmp_path)
    names = re.compile("attend_(hopper|portable|rows)|build_lists|merge_parts|prepare_heads|store_(kv|index)")
    used = {name: facts for cubin in cubins for name, facts in resources(cubin).items() if names.search(name)}
    assert len(used) == 3 * 4 + 1 + 5, sorted(used)
    for name, facts in used.items():
        assert facts["STACK"] == facts["LOCAL"] == 0, f"{name} spills: {facts}"
    for name, code in ((name, code) for cubin in cubins for name, code in disassembled(cubin).items()):
        if not names.search(name):
            continue
        count = lambda pattern, code=code: sum(bool(re.match(pattern, op)) for op in code)  # noqa: E731
        if "attend_hopper" in name:
            # Scores of a walk's first chunk and of others, values of its last and of others.
            dim = int(re.search(r"Li(\d+)E", name)[1])
            assert count("HGMMA") == (dim // 4 if architecture == "sm_90a" else 0), name
        if "attend_portable" in name or "attend_rows" in name:
            assert count("HMMA.16816.F32.BF16"), name
            assert count("LDSM"), f"{name}: operands are not read by ldmatrix"
        if count("LDGSTS"):
            assert count("LDGSTS") == count(r"LDGSTS\.E\.BYPASS\.LTC128B\.128"), f"{name}: units below 16 bytes"


PROGRAM = """
from deviceless_qsa import OneDevice, calls, facts
from jaxcp import qsa
from jaxcp.qsa import resolve
from jaxcp.qsa.kernel_attend import attend_cuda
from jaxcp.qsa.queries import Queries
from jaxcp.qsa.segments import rows_of

config, rows, tokens, layers = qsa.QSAConfig.flash_next(), {rows}, 131072, 12
one = OneDevice(mesh(cp=1))
cache = one.cache(config, tokens, layers)

def stack(q, blocks, cache, segments):
    def layer(cache, at):
        index, q = at
        queries = Queries(segments, rows_of(segments, rows), tokens, rows)
        new = q[:, :2]  # what a layer writes before it attends
        k = cache.k.at[index, 1, jnp.arange(rows) % 64].set(new)
        cache = type(cache)(**(vars(cache) | {{"k": k}}))
        partial = attend_cuda(q, blocks, cache, index, queries, config)
        return cache, (partial.o, partial.lse)
    cache, (o, lse) = jax.lax.scan(layer, cache, (jnp.arange(layers, dtype=jnp.int32), q))
    return o, lse, cache

arguments = one.shape((layers, rows, 24, 256), jnp.bfloat16), one.shape((rows, 512), jnp.int32), cache, one.segments()
with resolve.lowering_for("gpu"):
    compiled = jax.jit(stack, donate_argnums=2).lower(*arguments).compile()
answer(facts(compiled, cache.k, cache.v) | {{"calls": calls(compiled, "jaxcp_qsa_attend")}})
"""


@deviceless.requires_plugin
@pytest.mark.parametrize("architecture", deviceless.ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 2048])
def test_compiled_into_a_scan_without_copies(rows, architecture, tmp_path):
    facts = deviceless.run(PROGRAM.format(rows=rows), tmp_path, architecture)
    assert facts["calls"] == 1
    assert facts["copies"] == []
    assert facts["aliased"] >= facts["pools"]
    assert facts["temporary"] <= 160 << 20, facts


def test_every_implementation_has_one_signature():
    import inspect

    signatures = {str(inspect.signature(entry.run)) for entry in ATTEND.values()}
    assert len(signatures) == 1
