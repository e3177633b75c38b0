#!/bin/sh
# Print the path of a Python >= 3.12 that can make virtual environments, or say what to install.
# Every candidate is run, because a name on PATH can be a shim that fails. PYTHON=... is tried first and alone.

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    candidates=$PYTHON
else
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    candidates="python3.13 python3.12
        $(ls -d "$pyenv"/3.1[2-9]*/bin/python3 2>/dev/null | sort -rV)
        python3.14 python3
        $(uv python find --no-python-downloads '>=3.12' 2>/dev/null)"
fi

for candidate in $candidates; do
    if usable "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

echo "jaxcp needs Python >= 3.12 with the venv module; none of these is one:" $candidates >&2
echo "Install it (Debian 13: apt-get install python3-venv; elsewhere: pyenv install 3.13, or uv python install 3.13)," \
    "or name one: make PYTHON=/path/to/python3.13 ..." >&2
exit 1
