"""The symmetric memory of an exchange: made collectively outside jit, the same on all ranks, never an XLA buffer.

Every rank owns one block at a fixed address that its peers write (kernels/csrc/protocol.h says what lies in it):

    bytes = 128 + align128(8 (c - 1) M) + 2 (c - 1) M D e      M = max_tokens ceil(heads / c)

so 8 ranks, 32 tokens, 16 heads per rank, 512 x bfloat16 need 7 368 832 bytes (7.03 MiB). How peers reach it:

    ranks in one process               GPU: peer access            CPU twin: threads share memory
    ranks in processes of one host     GPU: CUDA IPC handles       CPU twin: POSIX shared memory
    ranks on several hosts             GPU: fabric handles            CPU twin: none

Fabric handles (kernels/csrc/memory_fabric.h) reach the hosts of one NVLink domain; whether they work is tried in every
process before anything else is allocated. They have not yet run between hosts.

Set-up: agree on the fingerprint -> allocate and blank -> exchange handles -> map peers -> meet once more. No rank can
write before every block is blank, and a failure of one process is an error in all of them.
Tear-down: wait for the device -> meet -> unmap peers -> meet -> free. Garbage collection and interpreter exit cannot
meet: one process frees in that order by itself; with several, the maps go and the blocks stay until the process ends.
"""

import itertools
import logging
import weakref
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxcp.errors import BackendError, JaxcpError, PeerTimeoutError, TopologyError
from jaxcp.exchange import agree, watcher
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.native.workspace_library import Config, WorkspaceLibrary
from jaxcp.topology import Topology

FIRST_CALL_FACTOR = 10
"""The first call of each call site waits this many times longer: peers may still be compiling the program."""

FABRIC = "fabric handles"

REACH = {"threads": 0, "peer access": 0, "shared memory": 1, "CUDA IPC": 1, FABRIC: 2}
"""How far a block must reach (kernels/csrc/memory.h, enum Reach), by transport."""

_DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}

log = logging.getLogger("jaxcp")
_numbers = itertools.count()


def sizes(spec: ExchangeSpec) -> dict[str, int]:
    """Bytes of one rank's workspace and of its parts, by the formula above; the library's own answer must equal it."""
    rows = spec.max_tokens * spec.heads_per_rank
    lse = -(-8 * (spec.cp - 1) * rows // 128) * 128
    data = 2 * (spec.cp - 1) * rows * spec.head_dim * spec.dtype.itemsize
    return {"control": 128, "lse": lse, "data": data, "total": 128 + lse + data}


def transport(topology: Topology, hosts: list[str]) -> str:
    """How ranks of `topology` reach each other's memory; `hosts` has one id per process.

    Groups may live on different hosts: they exchange nothing.
    """
    if any(len({hosts[device.process_index] for device in group}) > 1 for group in topology.groups):
        return FABRIC
    inside = topology.one_process
    if topology.platform == "cpu":
        return "threads" if inside else "shared memory"
    return "peer access" if inside else "CUDA IPC"


def check_mesh(topology: Topology) -> None:
    """Raises NotImplementedError if the ranks of `topology` can never share memory, or set-up would wait for ever."""
    if why := absent_processes(topology):
        raise NotImplementedError(f"exchange: {why}. Use backend='a2a', or a mesh over all processes.")
    if why := several_domains(topology):
        raise NotImplementedError(f"exchange: {why}. Use backend='a2a', or keep the axis inside a host.")


def several_domains(topology: Topology) -> str | None:
    """Why memory of some group's devices cannot be shared, as far as the devices tell, or None.

    A GPU's slice is its NVLink domain: its host, or the hosts of a fabric where XLA knows of it (from Blackwell on;
    others are declared by jax.distributed.initialize(partition_index=...)).
    """
    slices = [len({getattr(device, "slice_index", 0) for device in group}) for group in topology.groups]
    if max(slices, default=1) == 1:
        return None
    return f"a group's devices are in {max(slices)} NVLink domains (slices), and memory is mapped inside one only"


def host_id() -> str:
    """What tells this host's running kernel from any other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def absent_processes(topology: Topology) -> str | None:
    """Which processes of the job the mesh leaves out, or None: set-up meets all of them, and would wait for ever."""
    absent = sorted(set(range(jax.process_count())) - set(topology.processes))
    return f"the mesh leaves out processes {absent} of the job, with all of which set-up must meet" if absent else None


class Workspace:
    """One exchange's blocks of this process, connected to all peers.

    Attributes:
      number: names the exchange inside compiled programs; the same in all processes, never used again.
      transport: how peers are reached.
      configs: one per local rank.
    """

    def __init__(
        self,
        topology: Topology,
        spec: ExchangeSpec,
        load: Callable[[], WorkspaceLibrary],
        timeout_s: float,
        *,
        name: str,
    ):
        """Collective over all processes of the job.

        Args:
          topology, spec: what is exchanged.
          load: gives the library whose handlers will use the workspace; builds it if need be.
          timeout_s: seconds a rank waits for a peer.
          name: of the backend, for logs and for the fingerprint.

        Raises:
          BackendError: a process could not set up its part, or the processes do not agree.
          BuildError: the library cannot be built, in a job of one process.
          NotImplementedError: see `check_mesh`, or ranks on several hosts cannot use fabric handles; in every process,
            before anything is allocated.
        """
        self.spec, self.timeout_s, self.name = spec, timeout_s, name
        check_mesh(topology)
        if jax.process_count() > 1:
            agree.together("building the library", lambda: {"key": load().path.stem})
        self.library = library = load()
        self._ranks = topology.local_ranks()
        self.number, hosts = self._agreed(topology)
        self.transport = transport(topology, hosts)
        if self.transport == FABRIC:
            self._check_fabric()
        self.configs = [self._config(topology, *local) for local in self._ranks]
        self._closed = False
        alone = len(topology.processes) == 1
        self._free = weakref.finalize(self, _free, library, self.configs, _EVERYTHING if alone else _MAPS)
        try:
            self._connect()
        except BackendError:  # in every process, at the same step
            self._give_back()
            raise
        watcher.watch(self)
        self._log_ready(topology)

    def expiry(self) -> str | None:
        """What the first local rank that failed reported, or None; reads host memory, touches no device."""
        if self._closed:
            return None
        return next((text for config in self.configs if (text := self.library.expiry(config))), None)

    def check(self) -> None:
        """Raises what a rank of this process reported; calls stay refused until `reset`.

        Raises:
          PeerTimeoutError: it waited in vain.
          TopologyError: a program ran whose mesh orders the devices otherwise than the exchange's.
        """
        if text := self.expiry():
            name, _, words = text.partition(": ")
            raise {kind.__name__: kind for kind in (PeerTimeoutError, TopologyError)}[name](words)

    def reset(self) -> None:
        """Collective: waits for all devices, blanks all blocks, meets; then calls and replays work again."""
        if self._closed:
            raise JaxcpError("exchange: it is closed, its memory is given back. Build a new Exchange.")
        self._together("waiting for the devices", self.library.synchronize)
        self._together("blanking the workspace", self.library.blank)

    def close(self) -> None:
        """Collective: gives the memory back, see the top of this file.

        A workspace whose peers are dead cannot meet them: its blocks stay until the process ends.
        """
        if self._closed:
            return
        alive = self.expiry() is None
        self._closed = True
        if alive or jax.process_count() == 1:
            self._together("waiting for the devices", self.library.synchronize)
            self._give_back()
        else:
            self._free()

    def _give_back(self) -> None:
        """Collective: unmaps peers' blocks everywhere, then frees."""
        self._free.detach()
        _free(self.library, self.configs, _MAPS)
        agree.allgather(None)
        _free(self.library, self.configs, _BLOCKS)

    def describe(self) -> dict[str, Any]:
        """Bytes, capacity and transport."""
        return {
            "workspace_bytes": self.bytes,
            "workspaces": len(self.configs),
            "capacity_rows": self._rows,
            "transport": self.transport,
            "timeout_s": self.timeout_s,
            "exchange": self.number,
        }

    @property
    def bytes(self) -> int:
        """Bytes of one rank's block."""
        return self.library.workspace_bytes(self.configs[0])

    @property
    def _rows(self) -> int:
        return self.spec.max_tokens * self.spec.heads_per_rank

    def _agreed(self, topology: Topology) -> tuple[int, list[str]]:
        """The exchange's number, and the host of every process."""
        spec = self.spec
        fingerprint = {
            "backend": self.name, "cp": spec.cp, "heads": spec.heads, "head_dim": spec.head_dim,
            "dtype": spec.dtype.name, "max_tokens": spec.max_tokens, "axis_name": topology.axis_name,
            "devices": [[device.id for device in group] for group in topology.groups],
            "protocol version": self.library.protocol_version, "jaxcp version": metadata.version("jaxcp"),
        }  # fmt: skip
        mine = next(_numbers)
        answers = agree.together(
            "reading the arguments", lambda: {"number": mine, "host": host_id(), "fingerprint": fingerprint}
        )
        agree.the_same("arguments", [answer["fingerprint"] for answer in answers])
        number = max(answer["number"] for answer in answers)
        while mine < number:  # a process that made fewer exchanges of its own catches up
            mine = next(_numbers)
        return number, [answer["host"] for answer in answers]

    def _check_fabric(self) -> None:
        """Raises NotImplementedError in every process if other hosts cannot map the memory of some device."""

        def tried() -> dict[str, str | None]:
            found = (self.library.domain_blocker(_ordinal(device)) for _, _, device in self._ranks)
            return {"why": next(filter(None, found), None)}

        for process, answer in enumerate(agree.together("trying fabric handles", tried)):
            if why := answer["why"]:
                raise NotImplementedError(
                    "exchange: ranks of a group live on several hosts, where fabric handles are needed, and process "
                    f"{process} cannot use them: {why}. Use backend='a2a', or keep the axis inside a host."
                )

    def _config(self, topology: Topology, group: int, rank: int, device: Any) -> Config:
        spec = self.spec
        timeout_ns = int(self.timeout_s * 1e9)
        return Config(
            exchange=self.number, device=_ordinal(device), place=topology.place(group, rank), rank=rank, cp=spec.cp,
            heads=spec.heads, head_dim=spec.head_dim, max_tokens=spec.max_tokens, dtype=_DTYPES[spec.dtype.name],
            reach=REACH[self.transport], timeout_ns=timeout_ns,
            first_timeout_ns=timeout_ns * FIRST_CALL_FACTOR,
        )  # fmt: skip

    def _together(self, step: str, work) -> None:
        agree.together(step, lambda: [work(config) for config in self.configs] and None)

    def _connect(self) -> None:
        self._together("allocating the workspace", self.library.create)
        handles = agree.together("exporting the workspace", self._handles)
        everyone = {key: handle for process in handles for key, handle in process.items()}
        agree.together("mapping peers", lambda: self._attach(everyone))
        self._together("connecting", self.library.connected)
        self._together("forgetting names", self.library.forget_name)

    def _handles(self) -> dict[str, str]:
        """What a block's reach asks for, by "group:rank"; json carries it."""
        if REACH[self.transport] == 0:
            return {}
        return {
            f"{group}:{rank}": self.library.handle(config).hex()
            for (group, rank, _), config in zip(self._ranks, self.configs, strict=True)
        }

    def _attach(self, handles: dict[str, str]) -> None:
        local = {(group, rank): config for (group, rank, _), config in zip(self._ranks, self.configs, strict=True)}
        for (group, rank), config in local.items():
            for peer in range(self.spec.cp):
                if peer == rank:
                    continue
                if (group, peer) in local and self.transport != FABRIC:  # which maps nothing but by handle
                    self.library.attach(config, local[group, peer])
                else:
                    self.library.attach_handle(config, peer, bytes.fromhex(handles[f"{group}:{peer}"]))

    def _log_ready(self, topology: Topology) -> None:
        if topology.devices[0].process_index == jax.process_index():
            log.info(
                "%s exchange ready: %s by %s, capacity %d rows (%d tokens x %d heads), %d x %.2f MiB",
                self.name,
                topology,
                self.transport,
                self._rows,
                self.spec.max_tokens,
                self.spec.heads_per_rank,
                len(topology.devices),
                self.bytes / 2**20,
            )


def _ordinal(device: Any) -> int:
    """How XLA names its device to a handler: a GPU by its index in this process, a CPU device by its global id."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


_MAPS, _BLOCKS = ("synchronize", "detach"), ("destroy",)
_EVERYTHING = _MAPS + _BLOCKS


def _free(library: WorkspaceLibrary, configs: list[Config], steps: tuple[str, ...]) -> None:
    """Takes each of `steps` for all ranks before the next: a rank still in a call writes into its peers' blocks."""
    for step, config in itertools.product(steps, configs):
        try:
            getattr(library, step)(config)
        except JaxcpError as error:  # at exit, or after a failed set-up: nobody can act on it
            log.debug("freeing workspace %d of rank %d: %s", config.exchange, config.rank, error)
