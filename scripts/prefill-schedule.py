"""The text of two layers of context-parallel prefill, compiled for eight H200s on a machine without one.

JAXCP_COMPILE_ONLY=.venv/compile-only .venv/bin/python scripts/prefill-schedule.py prefill.hlo
.venv/bin/jaxcp plot timeline prefill.hlo docs/prefill_timeline.svg
"""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

import deviceless
import prefill_program


def main(output: str) -> None:
    """Writes the text there."""
    if deviceless.PLUGIN is None:
        sys.exit("JAXCP_COMPILE_ONLY names no folder with the compile-only CUDA plugin; `make test` makes one.")
    with tempfile.TemporaryDirectory() as folder:
        text = deviceless.run(prefill_program.SNIPPET + "answer(ranks())", pathlib.Path(folder), timeout_s=300)
    pathlib.Path(output).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
