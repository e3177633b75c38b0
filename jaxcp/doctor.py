"""`jaxcp doctor`: what this machine has, and which backend an exchange would take on it. Works without a GPU."""

import dataclasses
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxcp.errors import BuildError
from jaxcp.exchange.resolve import Resolution, explain
from jaxcp.topology import make_mesh

PACKAGES = ("jaxcp", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "numpy", "nvidia-nccl-cu13",
            "flashinfer-python")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as jax sees it. `peers` are the ids of the devices whose memory it can map; None if unknown."""

    id: int
    kind: str
    process: int
    compute_capability: str | None
    peers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything `jaxcp doctor` says, as data.

    Attributes:
      environment: see `environment`.
      devices: all devices of all processes.
      processes: number of processes.
      compilers: tool to its path and version, or why it was not found.
      resolutions: the choice of an exchange's backend on a mesh over 2 devices, 4, ... and all of them.
    """

    environment: dict[str, Any]
    devices: tuple[Device, ...]
    processes: int
    compilers: dict[str, str]
    resolutions: tuple[Resolution, ...]


def environment() -> dict[str, Any]:
    """Versions of everything that figures depend on, and the kind of device."""
    device = jax.devices()[0]
    return {
        "platform": device.platform, "device_kind": device.device_kind, "device_count": jax.device_count(),
        "runtime": " ".join(device.client.platform_version.split()), "driver": _driver_version(),
        "python": platform.python_version(), "versions": versions(),
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    """Installed version of every package that matters here, None if absent."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in PACKAGES}


def examine(*, heads: int = 128, head_dim: int = 512, dtype: str = "bfloat16") -> Report:
    """Looks at the machine. The arguments describe the exchange whose backend is explained."""
    devices, processes = jax.devices(), jax.process_count()
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < len(devices) and size % processes == 0]
    sizes.append(len(devices))
    resolutions = [explain(make_mesh(size), "cp", heads=heads, head_dim=head_dim, dtype=dtype) for size in sizes]
    return Report(environment(), _devices(devices), processes, compilers(), tuple(resolutions))


def compilers() -> dict[str, str]:
    """The native library's compilers: path and version, or what to install."""
    from jaxcp.native import compiler

    found = {}
    for name, find in (("c++", compiler.cxx), ("nvcc", compiler.nvcc)):
        try:
            tool = find()
            found[name] = f"{tool.path}: {_first_line_with_digit(tool.version)}"
        except BuildError as error:
            found[name] = f"not found: {error}"
    return found


def render(report: Report, console: Console) -> None:
    """Prints a report for people."""
    console.print(_facts(report))
    console.print(_device_table(report.devices))
    console.print(_resolution_table(report.resolutions))


def _facts(report: Report) -> Table:
    facts = Table(show_header=False, title="jaxcp doctor")
    env = report.environment
    for package, version in env["versions"].items():
        facts.add_row(package, version or "not installed")
    facts.add_row("python", env["python"])
    facts.add_row("runtime", env["runtime"])
    facts.add_row("CUDA driver", env["driver"] or "not found")
    for name, text in report.compilers.items():
        facts.add_row(name, text)
    facts.add_row("processes", str(report.processes))
    return facts


def _device_table(devices: Sequence[Device]) -> Table:
    table = Table("device", "kind", "process", "compute capability", "can map memory of", title="devices")
    for device in devices:
        peers = "unknown" if device.peers is None else ", ".join(map(str, device.peers)) or "nobody"
        table.add_row(str(device.id), device.kind, str(device.process), device.compute_capability or "-", peers)
    return table


def _resolution_table(resolutions: Iterable[Resolution]) -> Table:
    resolutions = list(resolutions)
    spec = resolutions[0].spec
    table = Table(
        "cp",
        *resolutions[0].blockers,
        "auto takes",
        title=f"exchange of {spec.heads} heads x {spec.head_dim}, {spec.dtype.name}",
    )
    for resolution in resolutions:
        cells = [blocker or "usable" for blocker in resolution.blockers.values()]
        table.add_row(str(resolution.spec.cp), *cells, f"{resolution.chosen}: {resolution.reason}")
    return table


def _devices(devices: Sequence[Any]) -> tuple[Device, ...]:
    peers = _peers(devices)
    return tuple(
        Device(d.id, d.device_kind, d.process_index, getattr(d, "compute_capability", None), peers.get(d.id))
        for d in devices
    )


def _peers(devices: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Which local devices can map which others' memory. Virtual CPU devices share one address space."""
    if devices[0].platform != "gpu":
        return {
            device.id: tuple(
                other.id for other in devices if other.id != device.id and other.process_index == device.process_index
            )
            for device in devices
        }
    answer = _nvidia_smi("topo", "-p2p", "w")
    if answer is None:
        return {}
    rows = [line.split() for line in answer.splitlines() if line.lstrip().startswith("GPU")]
    status = {row[0]: row[1:] for row in rows if len(row) > 1 and not row[1].startswith("GPU")}
    local = [device for device in devices if device.process_index == jax.process_index()]
    if len(status) != len(local):  # CUDA_VISIBLE_DEVICES renumbers: rows cannot be told apart
        return {}
    return {
        device.id: tuple(other.id for j, other in enumerate(local) if status[f"GPU{i}"][j] == "OK")
        for i, device in enumerate(local)
    }


def _driver_version() -> str | None:
    answer = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _nvidia_smi(*arguments: str) -> str | None:
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    try:
        return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _first_line_with_digit(text: str) -> str:
    """nvcc prints its version on the fourth line, gcc on the first."""
    lines = [line for line in text.splitlines() if any(char.isdigit() for char in line)]
    release = [line for line in lines if "release" in line]
    return (release or lines or [text])[0].strip()
