"""The exchange kernel on ranks simulated on one GPU (tests/native/exchange_cases.cu)."""

import native_programs
import pytest
from native_programs import CSRC, NATIVE

from jaxcp.exchange import flashinfer

pytestmark = pytest.mark.gpu

CASES = (
    "table",
    "varying_rows",
    "same_bits",
    "call_numbers",
    "graphs",
    "skew",
    "tearing",
    "alternating",
    "absent",
    "late",
    "refused",
    "soak",
)
ONE_GRID = {"JAXCP_ONE_GRID": "1"}
"""All ranks as one grid: a sanitizer runs kernels one after the other."""

SANITIZED = [
    ("memcheck", ("table", "12")),
    ("memcheck", ("call_numbers",)),
    ("racecheck", ("table", "4")),
    ("racecheck", ("varying_rows",)),
]


@pytest.mark.xdist_group("one_gpu")
class TestOnOneGpu(
    native_programs.cases_on_a_gpu("exchange_cases.cu", [CSRC / "exchange.cu"], CASES, SANITIZED, **ONE_GRID)
):
    @pytest.mark.soak
    @pytest.mark.parametrize(
        ("name", "calls"), [("soak", 100_000), ("tearing", 20_000), ("skew", 100_000), ("alternating", 100_000)]
    )
    def test_long(self, cases, name, calls):
        print(native_programs.run(cases, name, str(calls), timeout_s=1800))

    def test_flashinfer_agrees_with_the_float64_merge(self, tmp_path):
        architecture = native_programs.present_architecture()
        if blocker := flashinfer.header_blocker():
            pytest.skip(f"no FlashInfer kernel: {blocker}")
        include = ["-I", str(CSRC / "flashinfer_shim"), "-I", str(flashinfer.include_folder())]
        sources = [NATIVE / "flashinfer_cases.cu", CSRC / "exchange.cu", CSRC / "flashinfer.cu"]
        program = native_programs.compile_cuda(sources, tmp_path / "flashinfer_cases", architecture, include)
        assert "ok" in native_programs.run(program, timeout_s=60)
