"""Memory-mapped files without open file descriptors, so more files can be mapped than a process may have open.

Python's own mmap keeps a descriptor for each file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.errors import DataError

_NEXT_STEPS = {
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "raise the limit of open files: sysctl fs.file-max",
    errno.ENOMEM: "map fewer files at once, or raise the limit of mappings: sysctl vm.max_map_count",
}


def view(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, read-only. They stay readable if the file is deleted; the last view unmaps them."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                return np.zeros(0, np.uint8)
            if sys.platform != "linux":
                return np.memmap(stream, dtype=np.uint8, mode="r")
            return np.asarray(MappedFile(stream.fileno(), size))
    except OSError as error:
        if error.errno not in _NEXT_STEPS:
            raise
        raise DataError(f"{path} cannot be opened: {error.strerror}", _NEXT_STEPS[error.errno]) from None


class MappedFile:
    """The read-only base object of the numpy views; unmapped when the last view is deleted."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        weakref.finalize(self, _LIBC.munmap, address, size).atexit = False
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_LIBC: Any = _libc() if sys.platform == "linux" else None
_FAILED = ctypes.c_void_p(-1).value
