"""Compiling and running the C++ and CUDA programs of tests/native."""

import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from jaxcp.errors import BuildError
from jaxcp.native import builder, compiler

NATIVE = pathlib.Path(__file__).parent / "native"
CSRC = builder.source_folder()


@functools.cache
def nvcc() -> str:
    """Path of nvcc; the test is skipped where there is none."""
    try:
        return str(compiler.nvcc().path)
    except BuildError as error:
        pytest.skip(f"no nvcc: {error}")


@functools.cache
def present_architecture() -> str:
    """Architecture of the first GPU, e.g. "sm_90a"; the test is skipped where there is none."""
    if not shutil.which("nvidia-smi"):
        pytest.skip("no NVIDIA GPU: nvidia-smi is not on PATH")
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if answer.returncode != 0:
        pytest.skip(f"no NVIDIA GPU: {answer.stdout}{answer.stderr}")
    return builder.architecture(answer.stdout.split()[0])


def compile_cuda(
    sources: Sequence[pathlib.Path], output: pathlib.Path, architecture: str, flags: Sequence[str] = ()
) -> pathlib.Path:
    """`output`, compiled by nvcc from `sources`, each in a process of its own.

    Raises:
      AssertionError: the compiler's messages.
    """
    code = f"-gencode=arch=compute_{architecture.removeprefix('sm_')},code={architecture}"
    command = [
        nvcc(),
        "-std=c++20",
        "-O3",
        code,
        "--threads=4",
        "-I",
        str(CSRC),
        *flags,
        *map(str, sources),
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return output


def tool(name: str) -> str:
    """Path of a CUDA binary tool, on PATH or from its wheel; the test is skipped where there is none."""
    roots = (spec.submodule_search_locations or ()) if (spec := importlib.util.find_spec("nvidia")) else ()
    wheels = [str(found) for root in roots for found in pathlib.Path(root).glob(f"*/bin/{name}")]
    if found := shutil.which(name) or next(iter(wheels), None):
        return found
    pytest.skip(f"{name} is neither on PATH nor in a wheel nvidia-cuda-{name}")


def machine_codes(library: pathlib.Path, architecture: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """The library's cubins for `architecture`, one per CUDA source file, extracted into `folder`."""
    subprocess.run(
        [tool("cuobjdump"), "-xelf", architecture, str(library)],
        cwd=folder, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return sorted(folder.glob("*.cubin"))


def machine_code(library: pathlib.Path, architecture: str, folder: pathlib.Path) -> pathlib.Path:
    """The cubin of a library with one CUDA source file."""
    [found] = machine_codes(library, architecture, folder)
    return found


def run_on_host(
    source: str, tmp_path: pathlib.Path, *flags: str, folder: pathlib.Path = CSRC, timeout_s: float = 60
) -> str:
    """Output of a C++ program of tests/native, its headers taken from `folder`; skipped without a compiler."""
    if not (cxx := shutil.which("g++") or shutil.which("c++")):
        pytest.skip("no C++ compiler on PATH")
    program = tmp_path / pathlib.Path(source).stem
    command = [cxx, "-std=c++20", "-O1", "-Wall", "-Werror", *flags, "-I", str(folder), str(NATIVE / source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    return run(program, timeout_s=timeout_s)


def run(*command: str | os.PathLike, timeout_s: float, **environment: str) -> str:
    """What a program printed.

    Raises:
      AssertionError: it failed, or ran longer than `timeout_s`: then it hangs.
    """
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=timeout_s, env=os.environ | environment
        )
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"{command} hangs: no end after {timeout_s} s; printed {expired.stdout!r}") from expired
    assert done.returncode == 0, f"{command} returned {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def cases_on_a_gpu(
    program: str,
    kernels: Sequence[pathlib.Path],
    names: Sequence[str],
    sanitized: Sequence[tuple[str, Sequence[str]]],
    **environment: str,
) -> type:
    """Tests of the cases of a CUDA program on the GPU that is present: a class for a test file to name `Test...`.

    Args:
      program: in tests/native; prints its cases' names, runs the one that is named, and fails as it does.
      kernels: further sources.
      names: its cases.
      sanitized: (tool of compute-sanitizer, the program's arguments).
      environment: of the program under the sanitizer.
    """

    compiled: list[pathlib.Path] = []  # once; from pytest 9.2 on a class's fixture cannot be class-scoped

    class Cases:
        @pytest.fixture
        def cases(self, tmp_path_factory) -> pathlib.Path:
            if not compiled:
                output = tmp_path_factory.mktemp("native") / pathlib.Path(program).stem
                compiled.append(compile_cuda([NATIVE / program, *kernels], output, present_architecture()))
            return compiled[0]

        def test_no_case_is_missing(self, cases):
            printed = set(run(cases, timeout_s=60).split())
            assert printed == set(names), printed.symmetric_difference(names)

        @pytest.mark.parametrize("name", names)
        def test_case(self, cases, name):
            print(run(cases, name, timeout_s=120))

        @pytest.mark.parametrize(
            ("check", "case"), sanitized, ids=["-".join((tool, *case)) for tool, case in sanitized]
        )
        def test_sanitizer(self, cases, check, case):
            if not (sanitizer := shutil.which("compute-sanitizer")):
                pytest.skip("compute-sanitizer is not on PATH")
            command = (sanitizer, "--tool", check, "--error-exitcode", "9", cases, *case)
            print(run(*command, timeout_s=300, **environment))

    return Cases
