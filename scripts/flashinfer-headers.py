"""flashinfer-headers.py FOLDER VERSION: puts the headers of a FlashInfer release into FOLDER/flashinfer/data/include.

The tests compile two of them. Installed, the package would take 850 MB, its headers take 8.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

HEADERS = "flashinfer/data/include/"


def main(folder: str, version: str) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--dest", downloads, f"flashinfer-python=={version}"], check=True)
        [wheel] = pathlib.Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(HEADERS)])


if __name__ == "__main__":
    main(*sys.argv[1:])
