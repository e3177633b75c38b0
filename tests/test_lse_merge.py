"""The Pallas merge kernel: interpreted with race detection, compiled for both architectures, or run on a GPU.

The inputs are the exchange's table: what rank r would receive from its peers is packed here and merged by the kernel.
"""

import cases
import deviceless
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxcp.kernels import lse_merge
from jaxcp.kernels.lse_merge import Tiling

import jaxcp
from jaxcp import LogBase, Partial
from jaxcp.exchange import packing

MAX_READS = 1 << 40 if interpreter.ON_GPU else 200
"""Per kernel: the interpreter takes some 10 ms for a read."""


def reads(case: cases.Case) -> int:
    """Loads of the kernel over all programs; 0 where it cannot merge the case."""
    rows = case.tokens * case.heads_per_rank
    if not rows or lse_merge.blocker(case.cp, rows, case.dim, case.dtype):
        return 0
    row = case.dim * jnp.dtype(case.dtype).itemsize // 4
    block = lse_merge.tiling(case.cp, rows, case.dim, case.dtype).block
    return rows * row // block * case.cp * (1 + max(1, block // row))


pytestmark = pytest.mark.optimized  # bits of two programs are compared: both must round alike
CASES = [case for case in cases.EXCHANGE if 0 < reads(case) <= MAX_READS]


def received(case: cases.Case, rank: int):
    """The buffer in which `rank` receives the blocks of all ranks."""
    o, lse = case.inputs()
    lse = lse.reshape(o.shape[:-1])
    return jnp.stack([packing.pack(jnp.asarray(o[i]), jnp.asarray(lse[i]), case.cp)[rank] for i in range(case.cp)])


def run(case: cases.Case, rank: int, **options):
    """(o, lse) of one rank by the kernel, as [tokens, h, dim] and [tokens, h]."""
    shape = (case.tokens, case.heads_per_rank)
    with interpreter.no_races():
        o, lse = lse_merge.merge_packed(
            received(case, rank),
            rows=shape[0] * shape[1],
            dim=case.dim,
            dtype=case.dtype,
            base=case.base,
            return_lse=True,
            interpret=interpreter.DETECT,
            **options,
        )
        jax.block_until_ready((o, lse))
    return np.asarray(o).reshape(*shape, case.dim), np.asarray(lse).reshape(shape)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case):
    want_o, want_lse, scale = case.expected()
    for rank in {0, case.cp - 1} if interpreter.ON_GPU else [case.cp - 1]:  # the last has the rows without a head
        o, lse = run(case, rank)
        assert o.dtype == jnp.dtype(case.dtype)
        cases.check_o(o, want_o[rank], scale[rank])
        cases.check_lse(lse, want_lse[rank])


def test_the_cases_reach_every_block_size_and_dtype():
    rows = lambda case: case.tokens * case.heads_per_rank  # noqa: E731
    cuts = {lse_merge.tiling(case.cp, rows(case), case.dim, case.dtype).block for case in CASES}
    assert cuts == {128, 256, 512}
    assert {case.dtype for case in CASES} == set(lse_merge.DTYPES)
    assert {case.filling for case in CASES} == set(cases._FILLINGS)


SMALL = cases.Case(3, 9, 512, 2, base=LogBase.E, filling="not_finite")


@pytest.mark.parametrize("case", [SMALL, cases.Case(2, 4, 64, 2, dtype="float16")], ids=str)
def test_separate_arrays_give_the_same_bits(case):
    rows = case.tokens * case.heads_per_rank
    o, lse = packing.unpack(received(case, 0), rows, case.dim, jnp.dtype(case.dtype))
    with interpreter.no_races():
        got = lse_merge.merge_separate(o, lse, base=case.base, return_lse=True, interpret=interpreter.DETECT)
        jax.block_until_ready(got)
    packed_o, packed_lse = run(case, 0)
    np.testing.assert_array_equal(np.asarray(got[0]).reshape(packed_o.shape), packed_o)
    np.testing.assert_array_equal(np.asarray(got[1]).reshape(packed_lse.shape), packed_lse)


CUTS = [Tiling(256, 2), Tiling(128, 1), Tiling(128, 4), Tiling(128, 3), Tiling(512, 1)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_gives_the_same_bits(cut):
    for a, b in zip(run(SMALL, 0, cut=cut), run(SMALL, 0), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_wider_than_a_block():
    case = cases.Case(2, 4, 768, 1, base=LogBase.E)
    want_o, want_lse, scale = case.expected()
    o, lse = run(case, 1)
    cases.check_o(o, want_o[1], scale[1])
    cases.check_lse(lse, want_lse[1])


def test_without_lse():
    o, lse = lse_merge.merge_packed(
        received(SMALL, 0), rows=6, dim=512, dtype="bfloat16", base=SMALL.base, interpret=interpreter.DETECT
    )
    assert lse is None
    np.testing.assert_array_equal(np.asarray(o).reshape(2, 3, 512), run(SMALL, 0)[0])


@pytest.mark.skipif(interpreter.ON_GPU, reason="the race detector is the interpreter's")
def test_a_planted_race_is_found(monkeypatch):
    """All programs write block 0: the detector must see it, else the other tests prove nothing."""
    monkeypatch.setattr(lse_merge, "_first_block", lambda cut: 0)
    with pytest.raises(interpreter.RaceError):
        run(SMALL, 0)


def test_agrees_with_the_jnp_merge_to_one_rounding():
    case = cases.Case(8, 8, 512, 4)
    o, lse = packing.unpack(received(case, 0), 4, 512, jnp.dtype("bfloat16"))
    want = jaxcp.lse.merge(Partial(o, lse, case.base))
    got, _ = run(case, 0)
    scale = np.abs(np.asarray(o, np.float32)).max(0).reshape(got.shape)
    cases.check_o(got, np.asarray(want.o, np.float64).reshape(got.shape), scale)


@pytest.mark.parametrize(("sources", "rows", "dim", "dtype", "why"), [
    (8, 16, 512, "float64", "dtype float64"),
    (33, 16, 512, "bfloat16", "33 sources exceed its 32"),
    (8, 3, 64, "bfloat16", "3 rows of 64 x bfloat16 cannot be cut"),
    (8, 4, 48, "float16", "4 rows of 48 x float16 cannot be cut"),
    (8, 4, 7, "bfloat16", "4 rows of 7 x bfloat16 cannot be cut"),
])  # fmt: skip
def test_blocker(sources, rows, dim, dtype, why):
    assert why in lse_merge.blocker(sources, rows, dim, dtype)
    with pytest.raises(ValueError, match=why):
        lse_merge.merge_packed(jnp.zeros((sources, 8), "uint32"), rows=rows, dim=dim, dtype=dtype, base=LogBase.TWO)


@pytest.mark.parametrize(("sources", "rows", "dim", "dtype", "cut"), [
    (8, 16, 512, "bfloat16", Tiling(256)), (8, 1, 512, "float16", Tiling(256)), (8, 3, 1536, "bfloat16", Tiling(256)),
    (8, 1, 1024, "bfloat16", Tiling(512)), (8, 1, 512, "float32", Tiling(512)), (8, 2, 128, "bfloat16", Tiling(128)),
    (8, 4, 64, "bfloat16", Tiling(128)), (8, 1, 128, "float32", Tiling(128)), (8, 1, 640, "float32", Tiling(128)),
    (8, 512, 512, "bfloat16", Tiling(256)), (2, 512, 512, "bfloat16", Tiling(256, 2)),
    (2, 513, 512, "bfloat16", Tiling(256)), (2, 16, 512, "bfloat16", Tiling(256)),
])  # fmt: skip
def test_tiling(sources, rows, dim, dtype, cut):
    assert lse_merge.tiling(sources, rows, dim, dtype) == cut
    assert lse_merge.blocker(sources, rows, dim, dtype) is None


@deviceless.requires_plugin
@pytest.mark.parametrize("architecture", deviceless.ARCHITECTURES)
def test_compiles_without_a_device(architecture, tmp_path):
    """All dtypes and block sizes; the exchange's schedule test covers the kernel inside shard_map."""
    shapes = [("bfloat16", 16, 512), ("float16", 8, 64), ("float32", 2, 128), ("float16", 2, 1024)]
    hlo = deviceless.run(
        f"""
    from jaxcp import LogBase
    from jaxcp.exchange import packing
    from jaxcp.kernels import lse_merge

    def program(dtype, rows, dim):
        words = packing.packed_words(rows, dim, jnp.dtype(dtype))
        merge = lambda x: lse_merge.merge_packed(x, rows=rows, dim=dim, dtype=dtype, base=LogBase.E, return_lse=True)
        return compiled(merge, mesh(x=1), (P(),), P(), ((8, words), "uint32"))

    answer([program(*shape) for shape in {shapes}])
    """,
        tmp_path,
        architecture,
    )
    assert [deviceless.pallas_kernels(text) for text in hlo] == [[lse_merge.NAME]] * len(shapes)
