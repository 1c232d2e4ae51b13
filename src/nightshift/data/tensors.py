"""Arrays in safetensors files: written straight from memory, read as views of the file that cost nothing until used.

The layout is safetensors' own (a length, a JSON header, the arrays end to end), so every other reader opens them.
Writing them here saves two copies of every array, and gives the same bytes for the same content; reading them here
gives views: one row of a large array is read from disk without the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import files
from nightshift.data import mmap
from nightshift.errors import DataError

Column = NDArray[Any]

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
"""Of the first array: views of every dtype are aligned, since larger dtypes come first."""
_LARGEST_HEADER = 100 * 2**20
_NOT_A_FILE_OF_ARRAYS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What Python says when the header is not JSON, or is other JSON than it should be."""


def write(path: Path, columns: Mapping[str, Column], note: str) -> None:
    """Replace `path` by a file of these arrays; `note` is a text that comes back with them."""
    files.write_chunks(path, chunks(columns, note))


def to_bytes(columns: Mapping[str, Column], note: str) -> bytes:
    return b"".join(chunks(columns, note))


def read(path: Path) -> tuple[dict[str, Column], str]:
    """The arrays of a file, as read-only views of it, and its note."""
    try:
        return _parse(mmap.view(path))
    except _NOT_A_FILE_OF_ARRAYS as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from None


def from_bytes(content: bytes | bytearray | memoryview) -> tuple[dict[str, Column], str]:
    """As `read`, of a file that is in memory; views of `content`."""
    try:
        return _parse(np.frombuffer(content, np.uint8))
    except _NOT_A_FILE_OF_ARRAYS as error:
        raise DataError(f"these {len(content)} bytes are not a readable safetensors file: {error}") from None


def chunks(columns: Mapping[str, Column], note: str) -> Iterator[bytes | memoryview]:
    """The bytes of a file, piece by piece; arrays are not copied unless they lie scattered in memory."""
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


def _parse(content: NDArray[np.uint8]) -> tuple[dict[str, Column], str]:
    length = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    if len(content) < _LENGTH_BYTES or length > min(len(content) - _LENGTH_BYTES, _LARGEST_HEADER):
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


def _column(name: str, entry: Mapping[str, Any], data: NDArray[np.uint8], nbytes: int) -> Column:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    if len(data) != nbytes or nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} does not have the bytes its shape {list(shape)} needs")
    column = data.view(np.ndarray).view(dtype).reshape(shape)
    column.flags.writeable = False
    return column
