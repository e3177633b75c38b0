"""Devices and processes for a program that runs on the ranks of one host.

A program that spans processes is the same program in each of them: JAX's distributed runtime connects them. Here is
only what starts the processes of one host and ends them: each is given its place by an environment variable, `joined`
connects it, `report` hands its summary back. The launcher kills what outlives its limit, and a process that ends
without a summary has failed, whatever its exit code.

With `jax_enable_recoverability` a process survives the death of a peer (any but the coordinator, process 0) for long
enough to say so; without it, and with the runtime's own time-outs of minutes, the survivor would hang at exit. The
price is that the runtime no longer waits for everybody before the coordinator leaves, and who leaves later is aborted:
so the coordinator waits here, for a file from each of the others. Before that all wait for all to be done, by files
too: with a collective in that place the coordinator hung once, on a loaded machine with jax 0.11.2.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEARTBEAT_S, SHUTDOWN_S = 10, 5
PROGRAM_END_S = 300
"""Seconds that a process which is done waits for the others to be done."""

GRACE_S = HEARTBEAT_S + SHUTDOWN_S + 15
"""Seconds that the others may take to end by themselves once one process has failed."""

_PLACE = "JAXCP_PROCESS"  # JSON, the fields of _Place
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
      process: its index.
      exit_code: its own, or None if it was killed.
      summary: what it passed to `report`, or None.
      output: the end of what it printed, if it was captured.
    """

    process: int
    exit_code: int | None
    summary: Any
    output: str

    @property
    def failure(self) -> str | None:
        """What went wrong, or None."""
        if self.exit_code is None:
            return f"process {self.process} hung and was killed. Its last output:\n{self.output}"
        if self.exit_code:
            return f"process {self.process} ended with exit code {self.exit_code}. Its last output:\n{self.output}"
        if self.summary is None:
            return f"process {self.process} ended without a summary. Its last output:\n{self.output}"
        return None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a process stands among those that `run` started; `folder` is shared by them and the launcher."""

    index: int
    processes: int
    coordinator: str
    devices: int
    folder: str

    def file(self, kind: str, index: int | None = None) -> Path:
        return Path(self.folder, f"{self.index if index is None else index}.{kind}")


def run(
    arguments: Sequence[str], processes: int, *, devices: int, limit_s: float, show_first: bool = False
) -> list[Outcome]:
    """Runs `python *arguments` in `processes` processes of this host and waits for all of them.

    Args:
      arguments: of the Python interpreter, e.g. ["-m", "jaxcp.cli", ...]; the program uses `joined` and `report`.
      processes: how many.
      devices: of each process: GPUs, or virtual devices of the CPU.
      limit_s: seconds after which all are killed.
      show_first: let process 0 print to this process's stdout and stderr.
    """
    coordinator = f"localhost:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="jaxcp-") as folder:
        places = [_Place(i, processes, coordinator, devices, folder) for i in range(processes)]
        codes = _wait([_start(arguments, place, show_first and place.index == 0) for place in places], limit_s)
        return [
            Outcome(place.index, code, _read_summary(place.file("summary")), _tail(place.file("log")))
            for place, code in zip(places, codes, strict=True)
        ]


def launched() -> bool:
    """Whether `run` started this process."""
    return _PLACE in os.environ


@contextlib.contextmanager
def joined() -> Iterator[int]:
    """Connects this process to the others that `run` started, and leaves them in order; yields its index.

    Enter it before the first use of a device. A process on its own is process 0.
    """
    if not launched():
        yield 0
        return
    import jax

    place = _place()
    first = place.index * place.devices
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.index,
        local_device_ids=range(first, first + place.devices),
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    try:
        yield place.index
        place.file("done").touch()  # nobody closes a connection that another may still read from
        _wait_for([place.file("done", i) for i in range(place.processes)], PROGRAM_END_S)
    finally:
        if place.index == 0:
            _wait_for([place.file("left", i) for i in range(1, place.processes)], SHUTDOWN_S)
        jax.distributed.shutdown()
        place.file("left").touch()


def _wait_for(files: Sequence[Path], limit_s: float) -> None:
    """Returns once all files exist, or after `limit_s`: the launcher then tells who is missing."""
    deadline = time.monotonic() + limit_s
    while not all(map(Path.exists, files)) and time.monotonic() < deadline:
        time.sleep(0.02)


def report(summary: Any) -> None:
    """Hands `summary` (JSON) to the launcher, if there is one."""
    if launched():
        whole = _place().file("summary")
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(summary))
        part.rename(whole)


def virtual_devices(count: int) -> None:
    """Gives the CPU platform `count` devices, unless XLA_FLAGS says otherwise; call it before any use of a device."""
    if _DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = _with_host_devices(os.environ.get("XLA_FLAGS", ""), count)


def _place() -> _Place:
    return _Place(**json.loads(os.environ[_PLACE]))


def _start(arguments: Sequence[str], place: _Place, show: bool) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        _PLACE: json.dumps(dataclasses.asdict(place)),
        "XLA_FLAGS": _with_host_devices(os.environ.get("XLA_FLAGS", ""), place.devices),
    }
    command = [sys.executable, *arguments]
    if show:
        return subprocess.Popen(command, env=environment)
    with open(place.file("log"), "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(running: list[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    deadline = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            if any(process.poll() for process in running):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
        return [process.poll() for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _with_host_devices(flags: str, count: int) -> str:
    return f"{re.sub(_DEVICE_FLAG + '=[0-9]+', '', flags)} {_DEVICE_FLAG}={count}".strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _read_summary(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _tail(path: Path, size: int = 2000) -> str:
    return path.read_text(errors="replace")[-size:] if path.exists() else "(shown above)"
