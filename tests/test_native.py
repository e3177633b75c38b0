"""The native library: found compilers, one build per key, builders that race, and errors that say what to do."""

import importlib.metadata
import os
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
import simulated_ranks
from conftest import PLATFORM

from jaxcp import native
from jaxcp.errors import BackendError, BuildError, JaxcpError
from jaxcp.native import builder, compiler, registry

TINY = {"cpu": ("tiny.cc",), "cuda": ("tiny.cc", "tiny.cu")}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("JAXCP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A library of one line instead of ours: these tests are about building, not about what is built."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cc").write_text(
        'extern "C" __attribute__((visibility("default"))) const char* jaxcp_build_key() { return JAXCP_BUILD_KEY; }\n'
    )
    monkeypatch.setattr(builder, "source_folder", lambda: folder)
    monkeypatch.setattr(builder, "SOURCES", TINY)
    return folder


def fake_compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# Building.


def test_a_build_is_made_once(cache, tiny, capfd):
    path = native.build("cpu")
    assert path.parent == cache
    progress = capfd.readouterr().err
    assert progress.startswith("jaxcp: building the cpu library with ")
    assert str(path) in progress
    made = path.stat().st_mtime_ns
    assert native.build("cpu") == path
    assert path.stat().st_mtime_ns == made
    assert capfd.readouterr().err == ""
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]


def test_the_key_follows_everything_that_goes_in(tiny, tmp_path, monkeypatch):
    seen = [native.builder.recipe("cpu").key]

    def changed():
        seen.append(native.builder.recipe("cpu").key)
        return seen[-1] not in seen[:-1]

    assert not changed()
    (tiny / "tiny.cc").write_text("// another source\n")
    assert changed()
    (tiny / "header.h").write_text("")
    assert changed()
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: "/elsewhere")
    assert changed()
    monkeypatch.setattr(builder.jaxlib.version, "__version__", "0.0.1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert changed()
    other = fake_compiler(tmp_path / "g++", "echo g++ 99.9")
    assert native.builder.recipe("cpu", cxx=other).key not in seen
    assert native.builder.recipe("cpu", include=[tmp_path]).key not in seen
    assert native.builder.recipe("cpu", stamp="headers of another release").key not in seen


def test_gpu_architectures_are_part_of_the_key(tiny, tmp_path):
    nvcc = fake_compiler(tmp_path / "nvcc", "echo nvcc 13.0")
    recipes = [builder.recipe("cuda", architectures=(name,), nvcc=nvcc) for name in native.ARCHITECTURES]
    assert len({recipe.key for recipe in recipes}) == len(native.ARCHITECTURES)
    assert "-gencode=arch=compute_103a,code=sm_103a" in recipes[2].command


BUILD = """
import sys
from pathlib import Path
from jaxcp.native import builder
builder.source_folder = lambda: Path(sys.argv[1])
builder.SOURCES = {"cpu": ("tiny.cc",)}
print(builder.build("cpu", cxx=sys.argv[2]))
"""


def start_builders(count, tiny, cxx):
    command = [sys.executable, "-c", BUILD, str(tiny), cxx]
    return [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(count)]


def test_builders_that_race_compile_once(cache, tiny, tmp_path):
    count = tmp_path / "compilations"
    slow = fake_compiler(
        tmp_path / "slow-g++", f'case "$*" in *" -c "*) echo x >> {count}; sleep 1;; esac; exec g++ "$@"'
    )
    racers = start_builders(3, tiny, slow)
    answers = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert count.read_text() == "x\n"
    assert sum("building" in err for _, err in answers) == 1


def test_a_builder_that_died_leaves_no_lock(cache, tiny, tmp_path):
    started = tmp_path / "started"
    stuck = fake_compiler(
        tmp_path / "stuck-g++", f'case "$*" in *" -c "*) touch {started}; sleep 60;; esac; exec g++ "$@"'
    )
    (dying,) = start_builders(1, tiny, stuck)
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    dying.kill()
    dying.communicate()
    (next_one,) = start_builders(1, tiny, "g++")
    out, err = next_one.communicate(timeout=60)
    assert next_one.returncode == 0, err
    assert Path(out.strip()).exists()


# Errors.


def test_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"searched CUDA_HOME, PATH and the nvidia-cuda-nvcc wheel.*jaxcp\[cuda13\]"):
        builder.recipe("cuda", architectures=("sm_90a",))
    with pytest.raises(BuildError, match=r"no g\+\+ or c\+\+ on PATH.*build-essential"):
        builder.recipe("cpu")
    with pytest.raises(BuildError, match="/no/such/nvcc, which is no executable file"):
        builder.recipe("cuda", architectures=("sm_90a",), nvcc="/no/such/nvcc")


def test_where_nvcc_is_found(monkeypatch, tmp_path):
    for folder in ("home/bin", "path", "wheel/cu13/bin"):
        (tmp_path / folder).mkdir(parents=True)
        fake_compiler(tmp_path / folder / "nvcc", f"echo {folder}")

    class Spec:
        submodule_search_locations = (str(tmp_path / "wheel"),)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: Spec)
    assert compiler.nvcc().version == "home/bin"
    monkeypatch.delenv("CUDA_HOME")
    assert compiler.nvcc().version == "path"
    (tmp_path / "path" / "nvcc").unlink()
    assert compiler.nvcc().version == "wheel/cu13/bin"
    assert compiler.nvcc(str(tmp_path / "home" / "bin" / "nvcc")).version == "home/bin"


def test_a_compiler_that_does_not_run(tmp_path):
    with pytest.raises(BuildError, match="which does not run"):
        compiler.cxx(fake_compiler(tmp_path / "g++", "exit 3"))


def test_a_folder_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"JAXCP_CACHE_DIR: got .*cannot be written.*Set JAXCP_CACHE_DIR to one"):
        native.build("cpu")


def test_a_source_that_does_not_compile(cache, tiny):
    (tiny / "tiny.cc").write_text("int main( {\n")
    with pytest.raises(
        BuildError,
        match=r"(?s)does not compile with .*tiny\.cc:1:\d+: error: .*name another with "
        "cxx=",
    ):
        native.build("cpu")
    assert [path for path in cache.iterdir() if path.suffix == ".so"] == []


def test_architectures_that_make_no_sense(tmp_path):
    nvcc = fake_compiler(tmp_path / "nvcc", "echo nvcc 13.0")
    with pytest.raises(ValueError, match="architectures: got '90'; expected names like 'sm_90a'"):
        builder.recipe("cuda", architectures=("90",), nvcc=nvcc)
    with pytest.raises(ValueError, match="architectures: got none"):
        builder.recipe("cuda", architectures=(), nvcc=nvcc)
    with pytest.raises(ValueError, match="variant: got 'rocm'"):
        builder.recipe("rocm")
    assert [builder.architecture(c) for c in ("9.0", "10.0", "10.3", "8.9")] == [
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_89",
    ]


@pytest.mark.skipif(PLATFORM == "cuda", reason="needs a machine without a GPU")
def test_no_gpu_to_take_the_architecture_from(tmp_path):
    with pytest.raises(BuildError, match=r"got no GPU in jax\.local_devices"):
        builder.recipe("cuda", nvcc=fake_compiler(tmp_path / "nvcc", "echo nvcc 13.0"))


def test_an_architecture_that_nvcc_does_not_know(cache, tiny, tmp_path):
    nvcc = fake_compiler(
        tmp_path / "nvcc",
        'case "$1" in --version) echo nvcc;; *) '
        "echo \"nvcc fatal : Unsupported gpu architecture 'compute_999a'\" >&2; exit 1;; esac",
    )
    with pytest.raises(BuildError, match=r"(?s)Unsupported gpu architecture.*use a newer one"):
        native.build("cuda", architectures=("sm_999a",), nvcc=nvcc)


def test_jaxlib_replaced_under_the_process(tiny, monkeypatch):
    monkeypatch.setattr(builder.metadata, "version", lambda name: "99.0")
    with pytest.raises(BuildError, match=r"got 99.0 on disk while .* is running.*restart"):
        builder.recipe("cpu")


def test_a_library_of_another_build(cache, tiny):
    path = native.build("cpu")
    with pytest.raises(BuildError, match=r"was built as .*; expected 0123.*Delete the file"):
        native.Library(path, "cpu", "0123")
    other = cache / "other.so"  # not `path`: it is mapped now
    other.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="does not load"):
        native.Library(other, "cpu", "0123")
    other.write_bytes(path.read_bytes()[:-100])  # to map it and to touch its end would be SIGBUS
    with pytest.raises(BuildError, match=r"does not load \(\d+ bytes of at least \d+\)"):
        native.Library(other, "cpu", "0123")


# Importing and loading.


def test_importing_builds_nothing(tmp_path):
    code = "import jaxcp, jaxcp.native, jaxcp.exchange.fused, jaxcp.exchange.flashinfer"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAXCP_CACHE_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "none").exists()


def test_kernels_without_code_for_the_gpu(monkeypatch):
    class Gpu:
        local_hardware_id, compute_capability, platform = 0, "10.0", "gpu"

    class WithoutCode(native.Library):
        path = "lib.so"

        def __init__(self):
            pass

        def preload(self, device):
            raise JaxcpError("no kernel image is available for execution on the device")

    with pytest.raises(
        BuildError,
        match=r"no kernel image.*expected code for sm_100a.*architectures including "
        "'sm_100a'",
    ):
        registry._preload(WithoutCode(), Gpu())


@pytest.fixture
def registered(monkeypatch):
    """(target, platform) of what is registered meanwhile, without XLA; the "cpu" library stands in for the GPU's."""
    loaded, found = registry.load("cpu"), []
    monkeypatch.setattr(registry, "_targets", {})
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda symbol, capsule, platform: found.append((symbol, platform))
    )
    monkeypatch.setattr(builder, "recipe", lambda variant: types.SimpleNamespace(key=""))
    monkeypatch.setattr(builder, "ensure", lambda wanted: Path())
    monkeypatch.setattr(registry, "WorkspaceLibrary", lambda path, variant, key: loaded)
    monkeypatch.setattr(registry, "HANDLERS", {"cuda": ("jaxcp_fused",), "flashinfer": ("jaxcp_compile_only",)})
    monkeypatch.setattr(registry, "_preload", lambda library, device: None)
    return found


def test_a_process_that_compiled_for_a_compile_only_mesh_cannot_run(registered):
    registry.register_compile_only.__wrapped__()
    with pytest.raises(BackendError, match=r"registered jaxcp_fused for a compile-only mesh.*another process"):
        registry.load.__wrapped__("cuda")
    assert registered == [("jaxcp_fused", "CUDA"), ("jaxcp_compile_only", "CUDA")]


def test_a_process_that_runs_can_compile_for_a_compile_only_mesh(registered):
    registry.load.__wrapped__("cuda")
    registry.register_compile_only.__wrapped__()
    assert registered == [("jaxcp_fused", "CUDA"), ("jaxcp_compile_only", "CUDA")]


@pytest.mark.slow
@pytest.mark.skipif(not compiler._nvcc_candidates(), reason="needs nvcc")
def test_the_gpu_library_compiles():
    """For Hopper and Blackwell, into the user's cache: only a change of the sources costs its minute again."""
    wanted = builder.recipe("cuda", architectures=("sm_90a", "sm_100a"))
    loaded = native.WorkspaceLibrary(builder.ensure(wanted), "cuda", wanted.key)
    assert loaded.protocol_version >= 1
    for symbol in registry.HANDLERS["cuda"]:
        loaded.capsule(symbol)


@pytest.mark.slow
@pytest.mark.skipif(not compiler._nvcc_candidates(), reason="needs nvcc")
def test_the_handler_of_simulated_ranks_compiles(tmp_path):
    """The file that only tests on a GPU use, by the command that makes them their library."""
    wanted = simulated_ranks.recipe(architectures=("sm_90a",))
    command = wanted.compile_command(str(simulated_ranks.SOURCE), tmp_path / "handler.o")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert simulated_ranks.TARGET.encode() in (tmp_path / "handler.o").read_bytes()


def test_libraries_have_workspaces_as_their_sources_say(monkeypatch):
    for kind in (native.Library, native.WorkspaceLibrary):
        monkeypatch.setattr(registry, kind.__name__, lambda *_, kind=kind: object.__new__(kind))
    monkeypatch.setattr(builder, "recipe", lambda variant: types.SimpleNamespace(key=""))
    monkeypatch.setattr(builder, "ensure", lambda wanted: Path())
    monkeypatch.setattr(registry, "_preload", lambda library, device: None)
    monkeypatch.setattr(registry, "HANDLERS", dict.fromkeys(builder.SOURCES, ()))
    for variant, has in {"cpu": 1, "cuda": 1, "flashinfer": 1, "qsa": 0, "flashinfer_topk": 0}.items():
        assert isinstance(registry.load.__wrapped__(variant), native.WorkspaceLibrary) == has


def test_a_library_without_workspaces_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "load", lambda variant: object())
    with pytest.raises(ValueError, match=r"variant: got 'qsa'; expected one of \['cpu', 'cuda', 'flashinfer'"):
        registry.load_exchange("qsa")
