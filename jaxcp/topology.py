"""A mesh axis seen as a group of ranks: how many, which devices, on which hosts.

Everything here is host data. Building a `Topology` creates no CUDA context and works for abstract meshes (no devices)
and compile-only ones (devices that can only be compiled for).
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxcp.errors import invalid


@dataclasses.dataclass(frozen=True)
class Topology:
    """The groups of devices along one mesh axis.

    Attributes:
      axis_name: the context-parallel axis.
      size: ranks along it, c.
      groups: one tuple of `size` devices, in rank order, per coordinate of the other axes; empty for an abstract mesh.
      platform: "gpu", "cpu", ...; "abstract" for an abstract mesh that names no device kind.
      device_kind: what the devices call themselves, e.g. "NVIDIA H200"; "" if unknown.
      compute_capability: (major, minor) of the least capable CUDA device, or None.
      axes: (name, size) of all axes of the mesh, in its order.
    """

    axis_name: str
    size: int
    groups: tuple[tuple[Any, ...], ...]
    platform: str
    device_kind: str
    compute_capability: tuple[int, int] | None
    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, axis_name: str) -> "Topology":
        """Topology of `axis_name` in `mesh`; other axes, in any position, make independent groups.

        Raises:
          TypeError: `mesh` is not a mesh.
          ValueError: the mesh has no such axis.
        """
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise invalid(
                "mesh",
                type(mesh).__name__,
                "a jax.sharding.Mesh or AbstractMesh",
                "Make one with jax.make_mesh((cp,), ('cp',)).",
                TypeError,
            )
        if axis_name not in mesh.axis_names:
            raise invalid(
                "axis_name",
                repr(axis_name),
                f"one of the mesh's axes {mesh.axis_names}",
                "Name the axis that the KV cache is split over.",
            )
        size = mesh.shape[axis_name]
        if isinstance(mesh, AbstractMesh):
            platform, kind = _abstract_device(mesh)
            return cls(axis_name, size, (), platform, kind, None, tuple(mesh.shape.items()))
        by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1).reshape(-1, size)
        groups = tuple(tuple(row) for row in by_rank)
        first = groups[0][0]
        capability, axes = _least_capability(groups), tuple(mesh.shape.items())
        return cls(axis_name, size, groups, first.platform, first.device_kind, capability, axes)

    @property
    def devices(self) -> tuple[Any, ...]:
        """All devices of the mesh, group after group."""
        return tuple(device for group in self.groups for device in group)

    @property
    def processes(self) -> tuple[int, ...]:
        """Indices of the processes that own the mesh's devices, ascending."""
        return tuple(sorted({device.process_index for device in self.devices}))

    @property
    def one_process(self) -> bool:
        """Whether every group lies inside one process (vacuously so without devices)."""
        return all(len({device.process_index for device in group}) == 1 for group in self.groups)

    @property
    def runnable(self) -> bool:
        """Whether this process can run programs on its part of the mesh: not abstract, not compile-only."""
        return bool(self.groups) and all(_is_live(device) for device in self.devices if self.is_local(device))

    def is_local(self, device: Any) -> bool:
        """Whether `device` belongs to this process."""
        return device.process_index == device.client.process_index()

    def local_ranks(self) -> tuple[tuple[int, int, Any], ...]:
        """(group, rank, device) of every device of the mesh that this process owns."""
        return tuple(
            (g, r, device)
            for g, group in enumerate(self.groups)
            for r, device in enumerate(group)
            if self.is_local(device)
        )

    @property
    def strides(self) -> dict[str, tuple[int, int]]:
        """(stride, size) of every axis: how far a step along it moves in the mesh's row-major order of devices."""
        sizes = [size for _, size in self.axes]
        return {name: (math.prod(sizes[i + 1 :]), size) for i, (name, size) in enumerate(self.axes)}

    def place(self, group: int, rank: int) -> int:
        """Where rank `rank` of group `group` stands in the mesh's row-major order of devices."""
        stride, size = self.strides[self.axis_name]
        return group // stride * stride * size + rank * stride + group % stride

    def __str__(self) -> str:
        kind = f" ({self.device_kind})" if self.device_kind else ""
        groups = f"{len(self.groups)} group{'s' * (len(self.groups) != 1)}" if self.groups else "no devices"
        return f"axis {self.axis_name!r}: {self.size} ranks on {self.platform}{kind}, {groups}"


def make_mesh(cp: int, axis_name: str = "cp") -> Mesh:
    """A one-axis mesh over the first `cp` devices; of several processes, over the first cp / processes of each.

    Raises:
      ValueError: `cp` is no positive integer, exceeds the devices, or does not divide evenly among the processes.
    """
    devices, processes = jax.devices(), jax.process_count()
    if isinstance(cp, bool) or not isinstance(cp, int) or not 1 <= cp <= len(devices):
        raise invalid(
            "cp",
            repr(cp),
            f"1 <= cp <= {len(devices)}, the devices of platform {devices[0].platform}",
            "Lower cp, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N before jax starts.",
        )
    share = [[d for d in devices if d.process_index == p][: cp // processes] for p in range(processes)]
    if sum(map(len, share)) != cp:
        raise invalid(
            "cp",
            cp,
            f"a multiple of the {processes} processes, each of which holds as many ranks",
            "Choose another cp, or start another number of processes.",
        )
    return Mesh([device for some in share for device in some], (axis_name,))


def _is_live(device: Any) -> bool:
    """A compile-only device has no memories: asking it for one raises."""
    try:
        device.default_memory()
    except Exception:  # the client of a compile-only device refuses with an error of its own kind
        return False
    return True


def _abstract_device(mesh: AbstractMesh) -> tuple[str, str]:
    device = mesh.abstract_device
    if device is None:
        return "abstract", ""
    return getattr(device, "platform", None) or "gpu", device.device_kind


def _least_capability(groups: tuple[tuple[Any, ...], ...]) -> tuple[int, int] | None:
    texts = [getattr(device, "compute_capability", None) for group in groups for device in group]
    versions = [tuple(map(int, text.split("."))) for text in texts if text]
    return min(((version[0], version[1]) for version in versions), default=None)
