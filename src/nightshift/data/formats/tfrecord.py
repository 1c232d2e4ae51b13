"""TFRecord files: every record is a length, the checksum of the length, the data, and the checksum of the data.

Checksums are always verified; a truncated or damaged record is reported with file and record number.
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
_REMEDY = "download the file again, or restore it from its source"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The location of one record."""

    path: Path
    number: int  # position in the file, from 0
    offset: int  # of the data, after the header
    length: int

    @property
    def label(self) -> str:
        return f"{self.path}, record {self.number}"


def frame_record(record: bytes) -> bytes:
    """The record with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return length + _TAIL.pack(_masked_crc(length)) + record + _TAIL.pack(_masked_crc(record))


def scan(path: Path) -> list[Record]:
    """The locations of all records of a file; reads only their 12-byte headers."""
    found, damage = scan_until_damage(path)
    if damage:
        raise damage
    return found


def scan_until_damage(path: Path) -> tuple[list[Record], DataError | None]:
    """The locations of the records before the first damage, and the damage: after it no record can be found."""
    found: list[Record] = []
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            offset = 0
            while offset < size:
                record = _next(stream, path, len(found), offset, size)
                found.append(record)
                offset = record.offset + record.length + _TAIL.size
    except OSError as error:
        return found, DataError(f"{path} cannot be read: {error.strerror}", _REMEDY)
    except DataError as error:
        return found, error
    return found, None


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
        raise _truncated_file(path, number, offset)
    length, crc = _HEAD.unpack(head)
    if crc != _masked_crc(head[:8]):
        raise DataError(f"{path}, record {number} is damaged: the checksum of its length does not match", _REMEDY)
    record = Record(path=path, number=number, offset=offset + _HEAD.size, length=length)
    if record.offset + length + _TAIL.size > size:
        raise _truncated_file(path, number, offset)
    return record


def _truncated_file(path: Path, number: int, offset: int) -> DataError:
    return DataError(
        f"{path} ends inside record {number}, which begins at byte {offset}: the file is truncated", _REMEDY
    )


def _masked_crc(content: bytes) -> int:
    """TFRecord's masked CRC-32C: rotated and offset."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
