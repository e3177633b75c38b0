"""GPU memory that other processes map (tests/native/fabric_cases.cu): VMM handles, and what workspaces use besides."""

import re
import subprocess
from pathlib import Path

import native_programs
import pytest
from native_programs import CSRC, NATIVE

SOURCES = [NATIVE / "fabric_cases.cu", CSRC / "memory_cuda.cc", CSRC / "memory_fabric.cc"]
ANYWHERE = ("file_descriptor", "file_descriptor_processes", "reach_host", "refused")
ON_A_FABRIC = ("fabric", "fabric_processes", "reach_domain")
"""These need a fabric: GPUs of an NVLink domain and an IMEX channel."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("native") / "fabric_cases"
    return native_programs.compile_cuda(SOURCES, output, native_programs.present_architecture())


@pytest.mark.gpu
@pytest.mark.xdist_group("one_gpu")
class TestOnOneGpu:
    def test_no_case_is_missing(self, cases):
        assert set(native_programs.run(cases, timeout_s=60).split()) == {*ANYWHERE, *ON_A_FABRIC}

    @pytest.mark.parametrize("name", ANYWHERE)
    def test_case(self, cases, name):
        assert native_programs.run(cases, name, timeout_s=120) == f"{name}: ok\n"

    @pytest.mark.parametrize("name", ON_A_FABRIC)
    def test_fabric(self, cases, name):
        printed = native_programs.run(cases, name, timeout_s=120)
        if "not available here" in printed:
            assert "Fabric handles need " in printed  # what to do about it
            pytest.skip(printed.strip())
        assert printed == f"{name}: ok\n"


def test_nothing_links_the_driver(tmp_path):
    """Compiles without a GPU, and asks the runtime for the driver's functions: libcuda need not be there to load it."""
    output = tmp_path / "memory_fabric.o"
    flags = ["-Xcompiler=-Wall,-Wextra,-Werror", "-c"]
    native_programs.compile_cuda([CSRC / "memory_fabric.cc"], output, "sm_90a", flags)
    names = subprocess.run(["nm", "--undefined-only", output], capture_output=True, text=True, timeout=60, check=True)
    undefined = re.findall(r"U (cu\w+)", names.stdout)
    assert "cudaGetDriverEntryPointByVersion" in undefined
    assert [name for name in undefined if not name.startswith("cuda")] == []
