"""The host twin's threads under sanitizers, which cannot see through jaxlib (tests/native/twin_test.cc)."""

import subprocess

import pytest
from native_programs import CSRC, NATIVE

from jaxcp.native import compiler


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def twin(request, tmp_path_factory):
    program = tmp_path_factory.mktemp("twin") / "twin_test"
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wall",
        "-Wno-tsan",
        f"-fsanitize={request.param}",
        "-fno-sanitize-recover=all",
    ]
    command = [compiler.cxx().path, *flags, "-I", CSRC, NATIVE / "twin_test.cc", "-o", program, "-lpthread"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def run(twin, calls):
    done = subprocess.run([twin, str(calls)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


def test_under_a_sanitizer(twin):
    run(twin, 60)


@pytest.mark.soak
def test_long_under_a_sanitizer(twin):
    run(twin, 10_000)
