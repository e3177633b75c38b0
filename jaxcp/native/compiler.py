"""Finds the compilers of the native library and says how to get one that is missing."""

import dataclasses
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from jaxcp.errors import BuildError


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler that was found and answered.

    Attributes:
      path: executable.
      version: its own description of itself; part of the cache key.
    """

    path: Path
    version: str


def cxx(argument: str | None = None) -> Compiler:
    """The host C++ compiler: the argument, or g++ or c++ on PATH.

    Raises:
      BuildError: none found, or it does not run.
    """
    for candidate in [argument] if argument else ["g++", "c++"]:
        if found := shutil.which(candidate):
            return _probed(Path(found))
    raise BuildError(
        f"cxx: got {argument or 'no g++ or c++ on PATH'}; expected a C++20 compiler. Install g++ (package "
        "build-essential or gcc-c++) or pass its path as cxx=."
    )


def nvcc(argument: str | None = None) -> Compiler:
    """nvcc: the argument, $CUDA_HOME/bin, PATH, or the nvidia-cuda-nvcc wheel that jax[cuda13] brings.

    Raises:
      BuildError: none found, or it does not run.
    """
    if argument:
        if found := shutil.which(argument):
            return _probed(Path(found))
        raise BuildError(
            f"nvcc: got {argument}, which is no executable file; expected the path of nvcc. Correct the "
            "path, or "
            "leave it out to search CUDA_HOME, PATH and the nvidia-cuda-nvcc wheel."
        )
    for candidate in _nvcc_candidates():
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return _probed(candidate)
    raise BuildError(
        "nvcc: got none; searched CUDA_HOME, PATH and the nvidia-cuda-nvcc wheel. Install the CUDA 13 "
        "toolkit, or "
        "`pip install 'jaxcp[cuda13]'`, or pass its path as nvcc=."
    )


def _nvcc_candidates() -> list[Path]:
    candidates = []
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    # A namespace package: several wheels share the folder `nvidia`.
    if (spec := importlib.util.find_spec("nvidia")) and spec.submodule_search_locations:
        for root in spec.submodule_search_locations:
            candidates += sorted(Path(root).glob("*/bin/nvcc"))
    return candidates


@functools.cache
def _probed(path: Path) -> Compiler:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"compiler: got {path}, which does not run ({error}); expected a working compiler. "
            "Reinstall it or name "
            "another."
        ) from error
    return Compiler(path, answer.stdout.strip())


def include_folder(wheel_compiler: Path) -> Path | None:
    """Headers that lie beside an nvcc of the wheel (a toolkit's nvcc knows its own)."""
    folder = wheel_compiler.parent.parent / "include"
    return folder if (folder / "cuda_runtime.h").exists() else None
