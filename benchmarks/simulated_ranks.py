"""Times of the exchange kernels on ranks simulated on one GPU, for regression: simulated_ranks.py [OUTPUT.json]

Ranks that share a device share its memory system and no link lies between them, so these figures say nothing about a
machine with several GPUs. FlashInfer's header is the installed package's, or JAXCP_FLASHINFER_INCLUDE names its folder.
"""

import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import native_programs
from native_programs import CSRC, NATIVE

from jaxcp.exchange import flashinfer


def cupti() -> tuple[pathlib.Path, pathlib.Path]:
    """CUPTI's include and library folders, beside the compiler."""
    root = pathlib.Path(native_programs.nvcc()).resolve().parents[1]
    for folder in (root / "targets" / "x86_64-linux", root / "extras" / "CUPTI", root):
        headers, libraries = (
            folder / "include",
            next((folder / n for n in ("lib64", "lib") if (folder / n / "libcupti.so").exists()), None),
        )
        if (headers / "cupti.h").exists() and libraries:
            return headers, libraries
    raise SystemExit(f"no CUPTI (cupti.h, libcupti.so) below {root}; it comes with the CUDA toolkit")


def measure() -> list[dict]:
    """One row per kernel, group size and number of tokens."""
    headers, libraries = cupti()
    flags = [
        "-I",
        str(CSRC / "flashinfer_shim"),
        "-I",
        str(flashinfer.include_folder()),
        "-I",
        str(headers),
        "-L",
        str(libraries),
        "-lcupti",
        "-Xlinker",
        f"-rpath={libraries}",
    ]
    sources = [NATIVE / "exchange_bench.cu", CSRC / "exchange.cu", CSRC / "flashinfer.cu"]
    with tempfile.TemporaryDirectory() as folder:
        program = native_programs.compile_cuda(
            sources, pathlib.Path(folder, "bench"), native_programs.present_architecture(), flags
        )
        printed = native_programs.run(program, timeout_s=300)
    return [json.loads(line) for line in printed.splitlines()]


def table(rows: list[dict]) -> str:
    """kernel_us / cadence_us by tokens."""
    tokens = sorted({row["tokens"] for row in rows if row["tokens"]})
    times = {
        (row["kernel"], row["cp"], row["tokens"]): f"{row['kernel_us']:.2f} / {row['cadence_us']:.2f}" for row in rows
    }
    lines = ["kernel, ranks".ljust(16) + "".join(f"{n:>17}" for n in tokens)]
    for kernel, cp in dict.fromkeys((row["kernel"], row["cp"]) for row in rows if row["tokens"]):
        lines.append(f"{kernel}, {cp}".ljust(16) + "".join(f"{times[kernel, cp, n]:>17}" for n in tokens))
    return "\n".join(lines)


def main() -> None:
    """Measures, prints a table, writes JSON."""
    if blocker := flashinfer.header_blocker():
        raise SystemExit(f"FlashInfer's kernel is the peer of this benchmark: {blocker}")
    rows = measure()
    gpu, driver = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
        .stdout.splitlines()[0]
        .split(", ")
    )
    commit = "unknown"
    if shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=NATIVE)
        commit = head.stdout.strip() or commit
    compiler = subprocess.run([native_programs.nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    record = {
        "benchmark": "simulated_ranks",
        "what": "ranks simulated on one GPU; for regression only",
        "unit": "us, slowest rank: kernel_us median kernel duration, cadence_us graph of 60 calls / 60 (median of 21)",
        "gpu": gpu, "driver": driver, "nvcc": compiler.split("release ")[1].split(",")[0],
        "flashinfer": flashinfer.VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/simulated_ranks.py", "commit": commit, "rows": rows,
    }  # fmt: skip
    output = pathlib.Path(
        sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("simulated_ranks.json")
    )
    output.write_text(json.dumps(record, indent=1) + os.linesep)
    print(
        f"{gpu}; kernel / cadence in us by tokens, 16 heads per rank, dim 512, bf16\n{table(rows)}\nwritten to {output}"
    )


if __name__ == "__main__":
    main()
