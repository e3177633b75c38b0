"""A built library in this process: checked to be the right one, its C interface callable."""

import ctypes
import struct
from pathlib import Path

import jax

from jaxcp.errors import BuildError, JaxcpError


class Library:
    """A loaded library. Methods raise `JaxcpError` with the system's own words.

    Attributes:
      path: file.
      variant: a name in `builder.SOURCES`.
    """

    def __init__(self, path: Path, variant: str, key: str):
        self.path, self.variant = path, variant
        try:
            _check_whole(path)
            self._lib = ctypes.CDLL(str(path))
            self._lib.jaxcp_build_key.restype = ctypes.c_char_p
            found = self._lib.jaxcp_build_key().decode()
        except (OSError, AttributeError) as error:
            raise BuildError(
                f"library: {path} does not load ({error}); expected the {variant} library. Delete the "
                "file, it will be "
                "built again."
            ) from error
        if found != key:
            raise BuildError(
                f"library: {path} was built as {found}; expected {key} (this source, compiler, jaxlib "
                "and architecture). "
                "Delete the file, it will be built again."
            )

    def capsule(self, symbol: str):
        """FFI handler `symbol` as jax.ffi.register_ffi_target takes it."""
        return jax.ffi.pycapsule(getattr(self._lib, symbol))

    def preload(self, device: int) -> None:
        """Loads every kernel on GPU `device`: a first launch that loads code waits for peers' kernels to end."""
        self._call("preload", ctypes.c_int32(device))

    def _call(self, name: str, *arguments) -> None:
        function = getattr(self._lib, f"jaxcp_{name}")
        function.restype = ctypes.c_char_p
        by_reference = (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        if message := function(*by_reference):
            raise JaxcpError(message.decode())


def _check_whole(path: Path) -> None:
    """Raises OSError for a file that was cut off (a full disk, a crash): to map it would end the process (SIGBUS)."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        raise OSError("not an ELF file")
    # The section headers are an ELF file's last part: their offset at 40, the size of one at 58, their number at 60.
    offset, (width, count) = struct.unpack_from("<Q", header, 40)[0], struct.unpack_from("<HH", header, 58)
    if size < offset + width * count:
        raise OSError(f"{size} bytes of at least {offset + width * count}")
