"""The C interface of the exchange libraries: make, connect, inspect and free workspaces (csrc/workspace_api.cc)."""

import ctypes
from pathlib import Path

from jaxcp.native.library import Library

HANDLE_BYTES = 64
_MESSAGE_BYTES = 512


class Config(ctypes.Structure):
    """One rank's workspace; the fields of `struct Config` in kernels/csrc/workspace.h, where they are explained."""

    _fields_ = [
        ("exchange", ctypes.c_int64), ("device", ctypes.c_int32), ("place", ctypes.c_int32), ("rank", ctypes.c_int32),
        ("cp", ctypes.c_int32), ("heads", ctypes.c_int32), ("head_dim", ctypes.c_int32), ("max_tokens", ctypes.c_int32),
        ("dtype", ctypes.c_int32), ("reach", ctypes.c_int32), ("timeout_ns", ctypes.c_uint64),
        ("first_timeout_ns", ctypes.c_uint64),
    ]  # fmt: skip


class WorkspaceLibrary(Library):
    """A loaded exchange library: "cpu", "cuda" or "flashinfer". Methods raise `JaxcpError` with the system's own words.

    Attributes:
      protocol_version: of workspace layout and transport; ranks must agree on it.
    """

    def __init__(self, path: Path, variant: str, key: str):
        super().__init__(path, variant, key)
        self.protocol_version = int(self._lib.jaxcp_protocol_version())
        self._lib.jaxcp_workspace_bytes.restype = ctypes.c_uint64

    def workspace_bytes(self, config: Config) -> int:
        """Bytes of the workspace that `config` asks for."""
        return int(self._lib.jaxcp_workspace_bytes(ctypes.byref(config)))

    def domain_blocker(self, device: int) -> str | None:
        """Why processes of other hosts cannot map memory of `device`, with what to do, or None; tries it."""
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._call("domain_blocker", ctypes.c_int32(device), text, ctypes.c_uint64(_MESSAGE_BYTES))
        return text.value.decode() or None

    def create(self, config: Config) -> None:
        """Allocates the workspace of one rank, blank."""
        self._call("create", config)

    def handle(self, config: Config) -> bytes:
        """What another process needs to map the workspace; 64 bytes."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._call("export", config, handle)
        return handle.raw

    def attach(self, config: Config, peer: Config) -> None:
        """Lets a rank write the workspace of a peer of this process."""
        self._call("attach", config, peer)

    def attach_handle(self, config: Config, rank: int, handle: bytes) -> None:
        """Lets a rank write the workspace of a peer, of another process or (fabric handles) of this one."""
        self._call("attach_handle", config, ctypes.c_int32(rank), ctypes.create_string_buffer(handle, HANDLE_BYTES))

    def connected(self, config: Config) -> None:
        """All peers are attached."""
        self._call("connected", config)

    def forget_name(self, config: Config) -> None:
        """Everybody who needs the handle has used it."""
        self._call("forget_name", config)

    def blank(self, config: Config) -> None:
        """Puts the workspace into its first state; no rank may be in a call."""
        self._call("blank", config)

    def expiry(self, config: Config) -> str | None:
        """Who waited in vain for whom, or None."""
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._call("expiry", config, text, ctypes.c_uint64(_MESSAGE_BYTES))
        return text.value.decode() or None

    def call_number(self, config: Config) -> int:
        """Calls that the rank has finished, modulo 2^32; waits for the device."""
        number = ctypes.c_uint32()
        self._call("call", config, ctypes.byref(number))
        return number.value

    def set_call_number(self, config: Config, number: int) -> None:
        """For tests near the wrap: the same on all ranks, between calls."""
        self._call("set_call", config, ctypes.c_uint32(number))

    def launches(self, config: Config) -> int:
        """Handler calls so far; replays of a captured launch are not among them."""
        count = ctypes.c_int64()
        self._call("launches", config, ctypes.byref(count))
        return count.value

    def synchronize(self, config: Config) -> None:
        """Waits for everything launched on the rank's device."""
        self._call("synchronize", config)

    def detach(self, config: Config) -> None:
        """Waits for the device and unmaps what handles mapped; the workspace can only be destroyed then."""
        self._call("detach", config)

    def destroy(self, config: Config) -> None:
        """Waits for the device and frees the rank's workspace and its maps of peers'."""
        self._call("destroy", config)
