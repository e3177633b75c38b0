"""Builds the native library, once per source, compiler, jaxlib and architecture.

The library is keyed by everything that goes into it, so a change of any of them builds another file and never
overwrites one that a running process has mapped. Several processes may ask at once: a file lock lets one of them
compile, the file appears by an atomic rename, and the others find it.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, resources
from pathlib import Path

import jax
import jaxlib.version

from jaxcp.errors import BuildError, invalid
from jaxcp.native import compiler as compilers

_COMMON = ("build_key.cc", "workspace.cc", "workspace_api.cc")
_MEMORY = ("memory_cuda.cc", "memory_fabric.cc")
SOURCES = {
    "cpu": (*_COMMON, "fused_block.cc", "memory_host.cc", "ffi_cpu.cc"),
    "cuda": (*_COMMON, "fused_block.cc", *_MEMORY, "exchange.cu", "ffi_cuda.cc"),
    "flashinfer": (*_COMMON, "flashinfer_block.cc", *_MEMORY, "flashinfer.cu", "ffi_flashinfer.cc"),
    "qsa": (
        "build_key.cc",
        "qsa/preload.cc",
        "qsa/attend.cu",
        "qsa/attend_lists.cu",
        "qsa/attend_mma.cu",
        "qsa/attend_rows.cu",
        "qsa/attend_wgmma.cu",
        "qsa/ffi_attend.cc",
        "qsa/ffi_store.cc",
        "qsa/heads.cu",
        "qsa/select.cc",
        "qsa/select_stored.cu",
        "qsa/select_stream.cu",
        "qsa/select_top.cu",
        "qsa/ffi_select.cc",
        "qsa/store.cu",
    ),
    "flashinfer_topk": ("build_key.cc", "qsa/select_flashinfer.cu", "qsa/ffi_select_flashinfer.cc"),
}
"""Translation units of each library. "cpu" needs no CUDA: it is the host twin of the exchange kernels."""

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""GPU architectures the kernels are compiled for in CI; others can be asked for."""

COMPILE_SECONDS = 900
"""A compiler that runs longer than this is taken for stuck."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a library.

    Attributes:
      variant: which library.
      compiler: that makes it.
      architectures: GPU architectures, e.g. ("sm_90a",); empty for "cpu".
      include: folders of headers besides our own.
      stamp: what the include folders hold, where their path does not say it (e.g. "flashinfer-python 0.7.4").
    """

    variant: str
    compiler: compilers.Compiler
    architectures: tuple[str, ...]
    include: tuple[Path, ...]
    stamp: str = ""

    @functools.cached_property
    def key(self) -> str:
        """Hex digest over sources, compiler, jaxlib and architecture; names the cached file."""
        digest = hashlib.sha256()
        for file in sorted(source_folder().rglob("*")):
            if file.is_file() and self._uses(file):
                digest.update(str(file.relative_to(source_folder())).encode() + b"\0" + file.read_bytes() + b"\0")
        facts = (self.variant, self.compiler.version, jaxlib.version.__version__, self.stamp, *self.command)
        digest.update("\0".join(facts).encode())
        return digest.hexdigest()[:16]

    def _uses(self, file: Path) -> bool:
        """Whether the library may depend on a source file; those of QSA are nobody else's."""
        if self.variant == "cpu" and file.suffix in (".cu", ".cuh"):
            return False
        return file.parent.name != "qsa" or any(source.startswith("qsa/") for source in SOURCES[self.variant])

    @property
    def command(self) -> list[str]:
        """Compiler and flags, the same for every translation unit."""
        if self.variant == "cpu":
            flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall"]
        else:
            code = [f"-gencode=arch=compute_{name.removeprefix('sm_')},code={name}" for name in self.architectures]
            flags = ["-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-diag-suppress=940", *code]
        # Against the headers of the jaxlib in use: a newer header's handler is refused by an older jaxlib.
        include = [*(f"-I{folder}" for folder in self.include), "-isystem", jax.ffi.include_dir()]
        return [str(self.compiler.path), "-std=c++20", *flags, *include]

    def compile_command(self, source: str, output: Path) -> list[str]:
        """Command line that compiles one translation unit to the object `output`."""
        key = f'-DJAXCP_BUILD_KEY="{self.key}"'
        return [*self.command, key, "-I", str(source_folder()), "-c", str(source_folder() / source), "-o", str(output)]

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """Command line that links the objects to the library `output`."""
        return [str(self.compiler.path), "-shared", *map(str, objects), "-o", str(output), "-lpthread", "-lrt"]


def source_folder() -> Path:
    """Folder of the C++ and CUDA sources."""
    return Path(str(resources.files("jaxcp.kernels"))) / "csrc"


def cache_folder() -> Path:
    """$JAXCP_CACHE_DIR, or jaxcp in the user's cache folder."""
    if folder := os.environ.get("JAXCP_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxcp"


def recipe(
    variant: str,
    *,
    architectures: Sequence[str] | None = None,
    nvcc: str | None = None,
    cxx: str | None = None,
    include: Sequence[Path] = (),
    stamp: str = "",
) -> Recipe:
    """What would be built: compilers found, architectures checked, nothing compiled.

    Args:
      variant: a name in `SOURCES`.
      architectures: for the GPU libraries; those of the GPUs present if None.
      nvcc: path of nvcc; searched if None.
      cxx: path of the host compiler; searched if None.
      include: further folders of headers.
      stamp: description of what those folders hold.

    Raises:
      BuildError: no compiler, or no GPU to take the architecture from.
      ValueError: unknown variant or architecture.
    """
    if variant not in SOURCES:
        raise invalid("variant", repr(variant), " or ".join(map(repr, SOURCES)), "Name one of the libraries.")
    _check_jaxlib()
    if variant == "cpu":
        return Recipe(variant, compilers.cxx(cxx), (), tuple(include), stamp)
    architectures = _checked_architectures(present_architectures() if architectures is None else architectures)
    found = compilers.nvcc(nvcc)
    beside = compilers.include_folder(found.path)
    return Recipe(variant, found, architectures, (*include, *([beside] if beside else [])), stamp)


def build(variant: str, **options) -> Path:
    """Path of the built library; compiles it on the first call for its key.

    Args:
      variant: a name in `SOURCES`; "cpu" needs a host compiler alone.
      options: see `recipe`.

    Raises:
      BuildError: with the compiler's own message, or what stands in the way, and the remedy.
    """
    return ensure(recipe(variant, **options))


def ensure(wanted: Recipe) -> Path:
    """Path of the library that `wanted` describes, built if it is not there."""
    target = cache_folder() / f"libjaxcp-{wanted.variant}-{wanted.key}.so"
    if target.exists():
        return target
    with _locked(target):
        if not target.exists():
            _compile(wanted, target)
    return target


def present_architectures() -> tuple[str, ...]:
    """Architecture names of this process's GPUs, e.g. ("sm_90a",).

    Raises:
      BuildError: jax sees no GPU.
    """
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    if not devices:
        raise BuildError(
            "architectures: got no GPU in jax.local_devices(); expected one to take the architecture "
            "from. Name them, "
            f"e.g. architectures={ARCHITECTURES[:1]}, or set JAX_PLATFORMS=cuda."
        )
    return tuple(sorted({architecture(d.compute_capability) for d in devices}))


def architecture(compute_capability: str) -> str:
    """ "9.0" -> "sm_90a": from Hopper on, the architecture-specific variant."""
    digits = str(compute_capability).replace(".", "")
    return f"sm_{digits}a" if int(digits) >= 90 else f"sm_{digits}"


def _checked_architectures(architectures: Sequence[str]) -> tuple[str, ...]:
    for name in architectures:
        if not (name.startswith("sm_") and name[3:].rstrip("af").isdigit()):
            raise invalid(
                "architectures", repr(name), "names like 'sm_90a'", f"Choose among {', '.join(ARCHITECTURES)}."
            )
    if not architectures:
        raise invalid(
            "architectures",
            "none",
            "at least one name like 'sm_90a'",
            "Leave it out to take those of the GPUs present.",
        )
    return tuple(architectures)


def _check_jaxlib() -> None:
    """Headers on disk must be those of the jaxlib that is loaded."""
    loaded, installed = jaxlib.version.__version__, metadata.version("jaxlib")
    if loaded != installed:
        raise BuildError(
            f"jaxlib: got {installed} on disk while {loaded} is running; expected one version. It was "
            "replaced under "
            "this process: restart it."
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds the lock of `target`; the kernel drops it if the process dies."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_suffix(".lock"), "a")  # noqa: SIM115  (closed below, after the OSError is worded)
    except OSError as error:
        raise BuildError(
            f"JAXCP_CACHE_DIR: got {target.parent}, which cannot be written ({error.strerror}); "
            "expected a writable "
            "folder. Set JAXCP_CACHE_DIR to one."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(wanted: Recipe, target: Path) -> None:
    start = time.monotonic()
    names = f" for {', '.join(wanted.architectures)}" if wanted.architectures else ""
    _progress(f"jaxcp: building the {wanted.variant} library{names} with {wanted.compiler.path} ...")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [Path(folder) / f"{source.replace('/', '-')}.o" for source in SOURCES[wanted.variant]]
            list(
                pool.map(
                    lambda source, output: _run(wanted, wanted.compile_command(source, output)),
                    SOURCES[wanted.variant],
                    objects,
                )
            )
            _run(wanted, wanted.link_command(objects, Path(folder) / target.name))
            os.replace(Path(folder) / target.name, target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"compiler: {wanted.compiler.path} ran for more than {COMPILE_SECONDS} s and was stopped; "
            "expected a minute "
            "at most. Look at the load and the free memory of this machine, then try again."
        ) from error
    except OSError as error:
        raise BuildError(
            f"JAXCP_CACHE_DIR: got {target.parent}, which failed while building ({error}); expected a "
            "writable folder "
            "with some 100 MB free. Set JAXCP_CACHE_DIR to one."
        ) from error
    _progress(f" {time.monotonic() - start:.1f} s: {target}\n")


def _run(wanted: Recipe, command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if result.returncode:
        raise _compile_error(wanted, result.stdout + result.stderr)


def _compile_error(wanted: Recipe, message: str) -> BuildError:
    remedy = "Read the compiler's message; if it is too old (C++20, CUDA 13), name another with cxx= or nvcc=."
    if "unsupported gpu architecture" in message.lower():
        remedy = "This nvcc does not know the architecture: use a newer one (nvcc=, CUDA_HOME) or name others."
    return BuildError(
        f"The {wanted.variant} library does not compile with {wanted.compiler.path}:\n{message.strip()}\n{remedy}"
    )


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
