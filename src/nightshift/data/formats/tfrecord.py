"""Records in a TFRecord file: a length, a checksum of it, the record, a checksum of that.

Every checksum that is read is checked: what is cut short or has a flipped bit is refused by file and record number.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from nightshift.errors import DataError

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_MASK = 0xA282EAD8
_REMEDY = "fetch the file again, or restore it from where it came"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Where one record lies."""

    path: Path
    number: int  # its place in the file, from 0
    offset: int  # of the record itself, after its head
    length: int

    @property
    def label(self) -> str:
        return f"{self.path}, record {self.number}"


def framed(record: bytes) -> bytes:
    """The record as it stands in a file."""
    length = struct.pack("<Q", len(record))
    return length + _TAIL.pack(_masked_crc(length)) + record + _TAIL.pack(_masked_crc(record))


def scan(path: Path) -> list[Record]:
    """Where the records of a file lie; reads the 12 bytes before each and no record."""
    found: list[Record] = []
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", _REMEDY) from None
    with stream:
        size = os.fstat(stream.fileno()).st_size
        offset = 0
        while offset < size:
            record = _next(stream, path, len(found), offset, size)
            found.append(record)
            offset = record.offset + record.length + _TAIL.size
    return found


def read(record: Record) -> bytes:
    try:
        with record.path.open("rb") as stream:
            stream.seek(record.offset)
            content = stream.read(record.length + _TAIL.size)
    except OSError as error:
        raise DataError(f"{record.label} cannot be read: {error.strerror}", _REMEDY) from None
    body, tail = content[: record.length], content[record.length :]
    if len(tail) != _TAIL.size or _TAIL.unpack(tail)[0] != _masked_crc(body):
        raise DataError(f"{record.label} is damaged: its checksum does not match", _REMEDY)
    return body


def _next(stream: BinaryIO, path: Path, number: int, offset: int, size: int) -> Record:
    stream.seek(offset)
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise _torn(path, number, offset)
    length, crc = _HEAD.unpack(head)
    if crc != _masked_crc(head[:8]):
        raise DataError(f"{path}, record {number} is damaged: the checksum of its length does not match", _REMEDY)
    record = Record(path=path, number=number, offset=offset + _HEAD.size, length=length)
    if record.offset + length + _TAIL.size > size:
        raise _torn(path, number, offset)
    return record


def _torn(path: Path, number: int, offset: int) -> DataError:
    return DataError(
        f"{path} ends inside record {number}, which begins at byte {offset}: whoever wrote it was cut off", _REMEDY
    )


def _masked_crc(content: bytes) -> int:
    """CRC-32C, turned and shifted, so that checksums of checksums are sound."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
