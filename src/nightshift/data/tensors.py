"""Arrays in safetensors files: written without copies, read as memory-mapped views.

The files are standard safetensors (a length, a JSON header, the arrays), so any other reader can open them. Our own
writer saves two copies of every array and is deterministic: the same content gives the same bytes. Our own reader
returns views, so reading one row of a large array does not read the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import files
from nightshift.data import mmap
from nightshift.errors import DataError

Column = NDArray[Any]
Content = NDArray[np.uint8]

SUFFIX = ".safetensors"

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}
DTYPES = tuple(_CODES)

_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""Alignment of the first array. Larger dtypes come first, so views of every dtype are aligned."""
_MAX_HEADER_BYTES = 100 * 2**20
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Raised for a header that is not JSON or not that of a safetensors file."""


def write(path: Path, columns: Mapping[str, Column], note: str) -> None:
    """Write these arrays to `path` atomically; `note` is a text in the header."""
    files.write_chunks(path, chunks(columns, note))


def to_bytes(columns: Mapping[str, Column], note: str) -> bytes:
    return b"".join(chunks(columns, note))


def read(path: Path, verify: Callable[[Content], None] | None = None) -> tuple[dict[str, Column], str]:
    """The arrays of a file as read-only memory-mapped views, and its note; `verify` may read all of it first."""
    content = mmap.view(path)
    if verify is not None:
        verify(content)
    try:
        return _parse(content)
    except _PARSE_ERRORS as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from None


def from_bytes(content: bytes | bytearray | memoryview) -> tuple[dict[str, Column], str]:
    """`read` for a file in memory; the arrays are views of `content`."""
    try:
        return _parse(np.frombuffer(content, np.uint8))
    except _PARSE_ERRORS as error:
        raise DataError(f"these {len(content)} bytes are not a readable safetensors file: {error}") from None


def chunks(columns: Mapping[str, Column], note: str) -> Iterator[bytes | memoryview]:
    """The bytes of a file in pieces; only arrays that are not contiguous are copied."""
    ordered = sorted(columns, key=lambda name: (-columns[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"note": note}}
    offset = 0
    for name in ordered:
        column = columns[name]
        if column.dtype.name not in _CODES or not column.dtype.isnative:
            raise DataError(
                f"{name} is of dtype {column.dtype}; files hold {', '.join(DTYPES)}, in this machine's byte order"
            )
        header[name] = {
            "dtype": _CODES[column.dtype.name],
            "shape": list(column.shape),
            "data_offsets": [offset, offset + column.nbytes],
        }
        offset += column.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for name in ordered:
        if columns[name].size:
            yield np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data


def _parse(content: Content) -> tuple[dict[str, Column], str]:
    length = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    if len(content) < _LENGTH_BYTES or length > min(len(content) - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError("its header does not fit into it")
    header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    data = content[_LENGTH_BYTES + length :]
    note = header.pop("__metadata__", {}).get("note", "")
    expected = 0
    columns = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != expected:
            raise ValueError(f"{name} does not begin where the array before it ends")
        columns[name] = _column(name, entry, data[begin:end], end - begin)
        expected = end
    if expected != len(data):
        raise ValueError(f"its arrays take {expected} bytes and it has {len(data)}")
    return columns, note


def _column(name: str, entry: Mapping[str, Any], data: Content, nbytes: int) -> Column:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    if len(data) != nbytes or nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} does not have the bytes its shape {list(shape)} needs")
    column = data.view(np.ndarray).view(dtype).reshape(shape)
    column.flags.writeable = False
    return column
