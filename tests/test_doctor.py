"""The report on the machine: complete without a GPU, and readable."""

import io

import jax
import pytest
from rich.console import Console

from jaxcp import doctor
from jaxcp.errors import BuildError
from jaxcp.exchange import BACKENDS


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def test_report_is_data(report):
    assert report.environment["platform"] == "cpu"
    assert report.environment["versions"]["jax"] == jax.__version__
    assert report.environment["device_count"] == len(report.devices) == 8
    assert report.processes == 1
    assert report.devices[0].peers == (1, 2, 3, 4, 5, 6, 7)


def test_resolutions_cover_growing_meshes(report):
    assert [resolution.spec.cp for resolution in report.resolutions] == [1, 2, 4, 8]
    for resolution in report.resolutions:
        assert set(resolution.blockers) == set(BACKENDS)
        assert resolution.chosen == "a2a"


def test_rendering_names_everything(report):
    console = Console(width=200, record=True, file=io.StringIO())
    doctor.render(report, console)
    text = console.export_text()
    for word in (*BACKENDS, *doctor.PACKAGES, jax.__version__, "nvcc", "c++", "a2a: first choice on cpu"):
        assert word in text


def test_a_missing_compiler_is_reported_not_raised(monkeypatch):
    from jaxcp.native import compiler

    def missing():
        raise BuildError("nvcc: got none; expected one. Install it.")

    monkeypatch.setattr(compiler, "nvcc", missing)
    assert doctor.compilers()["nvcc"] == "not found: nvcc: got none; expected one. Install it."


TOPOLOGY = """        GPU0    GPU1    GPU2
 GPU0   X       OK      NS
 GPU1   OK      X       OK
 GPU2   NS      OK      X

Legend: X = Self, OK = Status Ok, NS = Not supported
"""


class Gpu:
    platform, process_index = "gpu", 0

    def __init__(self, ordinal):
        self.id = ordinal


@pytest.mark.parametrize(("answer", "count", "peers"), [
    (TOPOLOGY, 3, {0: (1,), 1: (0, 2), 2: (1,)}),
    (TOPOLOGY, 2, {}),  # CUDA_VISIBLE_DEVICES hides one
    (None, 3, {}),  # no nvidia-smi
])  # fmt: skip
def test_peers_from_nvidia_smi(monkeypatch, answer, count, peers):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *arguments: answer)
    assert doctor._peers([Gpu(i) for i in range(count)]) == peers


@pytest.mark.parametrize(("text", "line"), [
    ("g++ (Debian 12.2.0) 12.2.0\nCopyright (C) 2022", "g++ (Debian 12.2.0) 12.2.0"),
    ("nvcc: NVIDIA\nBuilt on Wed_Aug_20_2025\nCuda compilation tools, release 13.0, V13.0.88\nBuild 1",
     "Cuda compilation tools, release 13.0, V13.0.88"),
])  # fmt: skip
def test_version_line(text, line):
    assert doctor._first_line_with_digit(text) == line
