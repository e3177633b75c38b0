"""Kernels on the streams of GPUs, read from what `jax.profiler` wrote."""

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Iterator

import jax

from jaxcp.errors import invalid

SUFFIX = ".xplane.pb"


@dataclasses.dataclass(frozen=True, order=True)
class Launch:
    """One run of one kernel; ordered by device, then by start.

    Attributes:
      device: its plane, "/device:GPU:0".
      start_us: µs, from an origin that all launches of a trace share.
      us: duration, µs.
      stream: "Stream #13(Compute)".
      module: HLO module, "jit_step".
      operation: of the module; "" if the profiler does not say.
      traced: the operation's traced name, or part of it; "" if the profiler does not say.
      name: of the kernel.
    """

    device: str
    start_us: float
    us: float
    stream: str
    module: str
    operation: str
    traced: str
    name: str

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.us


def launches(path: str | os.PathLike[str], device: str = "/device:GPU") -> list[Launch]:
    """The kernels of HLO modules in a trace, in order of device and start.

    Args:
      path: a trace's file (.xplane.pb), or a folder that holds one, at any depth.
      device: what the names of the planes begin with.

    Raises:
      FileNotFoundError: no such path.
      ValueError: no trace there, several, or a file that is none.
    """
    planes = [plane for plane in _planes(trace_file(path)) if plane.name.startswith(device)]
    with warnings.catch_warnings():  # jaxlib's own types warn when first used, and a warning made an error ends Python
        warnings.simplefilter("ignore", DeprecationWarning)
        return sorted(launch for plane in planes for launch in _on_streams(plane))


def trace_file(path: str | os.PathLike[str]) -> pathlib.Path:
    """The one trace at or below `path`; raises as `launches` does."""
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"trace: {path} does not exist; expected what jax.profiler.trace(folder) wrote.")
    if path.is_file():
        return path
    found = sorted(path.rglob(f"*{SUFFIX}"))
    if len(found) != 1:
        raise invalid(
            "trace", f"{len(found)} files *{SUFFIX} below {path}", "one", "Name one, or trace into a folder of its own."
        )
    return found[0]


def _planes(path: pathlib.Path):
    try:
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    except Exception as error:  # the parser's own, which is no public class
        raise invalid("trace", f"{path}: {error}", f"a profile (*{SUFFIX})", "Give what jax.profiler wrote.") from None
    if not planes:
        raise invalid("trace", f"{path}, without a plane", f"a profile (*{SUFFIX})", "Give what jax.profiler wrote.")
    return planes


def _on_streams(plane) -> Iterator[Launch]:
    for line in plane.lines:
        if line.name.startswith("Stream"):  # other lines repeat the events under other names
            yield from filter(None, (_launch(plane.name, line.name, event) for event in line.events))


def _launch(device: str, stream: str, event) -> Launch | None:
    stats = dict(event.stats)
    if not (module := stats.get("hlo_module")):
        return None
    operation, traced = (str(stats.get(name, "")) for name in ("hlo_op", "name"))
    return Launch(
        device, event.start_ns / 1e3, event.duration_ns / 1e3, stream, str(module), operation, traced, event.name
    )
