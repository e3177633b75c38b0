"""scripts/find-python.sh: candidates are run, not only looked up."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "find-python.sh"


@pytest.fixture
def find(tmp_path):
    """Run the script with only `tmp_path/bin` and the system's plain tools on PATH; returns the completed process."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()

    def add(name: str, script: str) -> pathlib.Path:
        path = bin_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    for tool in ("ls", "sort"):
        add(tool, f'exec /bin/{tool} "$@"' if pathlib.Path(f"/bin/{tool}").exists() else f'exec /usr/bin/{tool} "$@"')

    def run(**env: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(bin_dir), "HOME": str(tmp_path), **env}
        return subprocess.run(["/bin/sh", SCRIPT], env=env, capture_output=True, text=True, timeout=60)

    run.add = add
    return run


REAL = f'exec {sys.executable} "$@"'
SHIM = 'echo "pyenv: command not found" >&2; exit 127'
OLD = f"""[ "$1" = -c ] && exec {sys.executable} -c "import sys; sys.version_info = (3, 11, 7); $(echo "$2")" """


def test_a_failing_shim_is_passed_over(find):
    find.add("python3.13", SHIM)
    good = find.add("python3.12", REAL)
    assert find().stdout.strip() == str(good)


def test_an_old_python_is_passed_over(find):
    find.add("python3.13", OLD)
    good = find.add("python3", REAL)
    assert find().stdout.strip() == str(good)


def test_pyenv_versions_are_found_newest_first(find, tmp_path):
    for version in ("3.9.1", "3.12.1", "3.12.10"):
        find.add(str(tmp_path / ".pyenv/versions" / version / "bin/python3"), REAL)
    assert find().stdout.strip().endswith("/3.12.10/bin/python3")


def test_uv_is_asked_last_and_never_downloads(find, tmp_path):
    good = find.add(str(tmp_path / "managed" / "python3.12"), REAL)
    find.add("uv", f'case "$*" in *--no-python-downloads*) echo {good};; *) exit 9;; esac')
    assert find().stdout.strip() == str(good)


def test_none_names_what_was_tried_and_what_to_do(find):
    find.add("python3", OLD)
    result = find()
    assert result.returncode == 1
    assert not result.stdout
    assert "Python >= 3.12" in result.stderr
    assert "python3.13" in result.stderr
    assert "Install it" in result.stderr


def test_an_explicit_python_is_not_replaced(find):
    find.add("python3.13", REAL)
    result = find(PYTHON="/nonexistent/python")
    assert result.returncode == 1
    assert "/nonexistent/python" in result.stderr


def test_the_machine_has_one():
    result = subprocess.run([SCRIPT], env=os.environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
