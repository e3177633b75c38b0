"""What the compiler made of the exchange kernel, read from its machine code, and the host side of its work order."""

import re
import subprocess
from pathlib import Path

import native_programs
import pytest
from native_programs import CSRC, tool

from jaxcp.exchange import flashinfer
from jaxcp.native import builder

REGISTERS = {(2, 1): 64, (2, 2): 80, (4, 1): 80, (4, 2): 128, (8, 1): 128, (8, 2): 128, "general": 128}
"""Most registers of a variant, by ranks and units in flight: what its resident warps leave (Exchange::kWarps)."""


pytestmark = pytest.mark.xdist_group("kernel_binary")  # one worker: the library is built and taken apart once


def disassembled(path: Path) -> dict[str, list[str]]:
    """Instructions of every kernel in an object file."""
    text = subprocess.run(
        [tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    kernels = {}
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        kernels[section.split(",")[0]] = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", section)
    return kernels


def resources(path: Path) -> dict[str, dict[str, int]]:
    """Registers, stack, shared and local bytes of every kernel."""
    answer = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", str(path)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    found = re.findall(r"Function (\S+):\s+(REG:.*)", answer)
    return {
        name: {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", facts)}
        for name, facts in found
    }


def variant(name: str):
    """Key of REGISTERS for a mangled kernel name."""
    sources, units, general = map(int, re.search(r"Li(\d)ELi(\d)ELb(\d)E", name).groups())
    return "general" if general else (sources, units)


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def cubin(request, tmp_path_factory) -> Path:
    """Machine code of one architecture, taken out of the library that users load (see test_native)."""
    native_programs.nvcc()
    library = builder.build("cuda", architectures=("sm_90a", "sm_100a"))
    return native_programs.machine_code(library, request.param, tmp_path_factory.mktemp("kernel"))


@pytest.mark.slow
def test_machine_code(cubin):
    kernels = disassembled(cubin)
    assert len(kernels) == 3 * len(REGISTERS), sorted(kernels)
    for name, code in kernels.items():

        def count(pattern, code=code):
            return sum(bool(re.fullmatch(pattern, instruction)) for instruction in code)

        assert count(r"LDG\.E\.128\.STRONG\.SYS"), f"{name}: received words are not read as 128-bit system-scope loads"
        assert count(r"STG?\.E\.128\.STRONG\.SYS"), f"{name}: sent words are not written as 128-bit system-scope stores"
        assert count(r"LDG\.E\.(?!\S*STRONG)\S*128\S*"), f"{name}: input is not read 16 bytes at a time"
        assert not count(r"MEMBAR\..*|ERRBAR.*|CCTL\..*|FENCE\..*"), f"{name}: a fence or cache operation on the path"
        assert not count(r"LDL.*|STL.*"), f"{name}: something lives in local memory"
        assert count(r"BAR\.SYNC.*") <= 4, f"{name}: more barriers than an opening and a next item"
        assert count(r"ATOM\w*\..*ADD.*") == 2, f"{name}: one ticket per send and one per receive"


@pytest.mark.slow
def test_resources(cubin):
    kernels = resources(cubin)
    assert len(kernels) == 3 * len(REGISTERS), sorted(kernels)
    for name, used in kernels.items():
        assert used["REG"] <= REGISTERS[variant(name)], f"{name}: {used}"
        assert used["STACK"] == used["LOCAL"] == 0, f"{name} spills: {used}"
        assert used["SHARED"] <= 1024 + 64, f"{name}: {used}"  # 1 KiB is the system's on Blackwell


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_flashinfer_header_compiles_unmodified(architecture, tmp_path):
    native_programs.nvcc()
    if blocker := flashinfer.header_blocker():
        pytest.skip(f"no FlashInfer kernel: {blocker}")
    flags = ["-cubin", "-I", str(CSRC / "flashinfer_shim"), "-I", str(flashinfer.include_folder())]
    output = native_programs.compile_cuda([CSRC / "flashinfer.cu"], tmp_path / "flashinfer.cubin", architecture, flags)
    assert len(disassembled(output)) == 8  # two dtypes, two bases, two ways to spread rows


def test_work_order(tmp_path):
    assert native_programs.run_on_host("schedule_test.cc", tmp_path, "-std=c++17") == "ok\n"
