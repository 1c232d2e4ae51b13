"""What the columns of a Parquet file unpack to, from the headers of their pages.

The footer of a Parquet file is no bound: it states sizes before dictionaries and run lengths are expanded, so a column
of one value repeated a billion times has a few bytes there, and it may simply be wrong. The header of every page states
the size that Arrow allocates to decompress it and the number of values in it. Headers are Thrift structs in the compact
protocol; `_struct` reads their integers and skips the rest.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_OFFSET = 4
"""Bytes per list, text or image beside its content."""
_DICTIONARY_PAGE = 2
_KINDS = (5, 7, 8)
"""Fields of a page header with what is special to data, dictionary and second-version data pages; in each, the first
field is the number of values."""
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, 12
"""Types of Thrift's compact protocol. Page headers have no lists and maps."""
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Upper bounds, in bytes, for the chosen columns of some row groups."""

    stored: int
    total: int  # without the expansion of dictionaries of texts and images
    dictionary: int  # the largest dictionary of such a column; one value cannot be larger


def measure(path: Path, metadata: pq.FileMetaData, columns: Sequence[str], groups: Sequence[int]) -> Unpacked:
    """ValueError if the pages do not fit into the file."""
    prefixes = tuple(f"{name}." for name in columns)  # of the leaves of lists and structs
    stored = total = dictionary = 0
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for group in groups:
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                if not f"{column.path_in_schema}.".startswith(prefixes):
                    continue
                width = _width(metadata, index)
                total += _OFFSET * metadata.row_group(group).num_rows
                for page in _pages(content, column):
                    values = page.values * (width or _OFFSET)
                    stored += page.compressed
                    total += max(values, page.uncompressed) if width else values + page.uncompressed
                    dictionary = max(dictionary, page.uncompressed if page.is_dictionary and not width else 0)
        return Unpacked(stored=min(stored, len(content)), total=total, dictionary=dictionary)


@dataclass(frozen=True, kw_only=True)
class _Page:
    is_dictionary: bool
    uncompressed: int
    compressed: int
    values: int


def _width(metadata: pq.FileMetaData, column: int) -> int:
    """The bytes of one value; 0 for texts and images."""
    described = metadata.schema.column(column)
    if described.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(described.length)
    return _WIDTHS.get(described.physical_type, 0)


def _pages(content: mmap.mmap, column: pq.ColumnChunkMetaData) -> Iterator[_Page]:
    start = column.data_page_offset
    if column.has_dictionary_page:
        start = min(start, column.dictionary_page_offset)
    end = start + column.total_compressed_size
    if not 0 <= start <= end <= len(content):
        raise ValueError(f"the column {column.path_in_schema} lies outside of the file")
    while start < end:
        header, body = _struct(content, start, _DEEPEST)
        kind, uncompressed, compressed = (_natural(header.get(field)) for field in (1, 2, 3))
        inner: dict[int, Any] = next((header[field] for field in _KINDS if isinstance(header.get(field), dict)), {})
        yield _Page(
            is_dictionary=kind == _DICTIONARY_PAGE,
            uncompressed=uncompressed,
            compressed=compressed,
            values=_natural(inner.get(1, 0)),
        )
        start = body + compressed


def _natural(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a page header has {value!r} where it should have a size")
    return value


def _struct(content: mmap.mmap, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The integers and structs of a Thrift struct by field number, and the position after it."""
    if not depth:
        raise ValueError("a page header is nested too deeply")
    fields: dict[int, Any] = {}
    field = 0
    while (head := content[at]) != 0:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(content, at)
        fields[field], at = _value(content, at, head & 15, depth)
    return fields, at + 1


def _value(content: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value and the position after it; None for values that are skipped."""
    if kind in _BOOLEANS:
        return None, at
    if kind in _INTEGERS:
        return _zigzag(content, at)
    if kind == _STRUCT:
        return _struct(content, at, depth - 1)
    if kind == _BINARY:
        length, at = _varint(content, at)
        return None, at + length
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise ValueError(f"a page header has a field of type {kind}")


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:  # noqa: PLR2004
            return value, at
        if shift > 63:  # noqa: PLR2004
            raise ValueError("a page header has a number of more than 64 bits")


def _zigzag(content: mmap.mmap, at: int) -> tuple[int, int]:
    value, at = _varint(content, at)
    return (value >> 1) ^ -(value & 1), at
