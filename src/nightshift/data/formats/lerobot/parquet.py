"""Reads Parquet files of unknown origin: what they unpack to is checked before and while they are unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nightshift.data.formats.lerobot import parquet_pages
from nightshift.data.limits import Limits
from nightshift.errors import DataError

_BATCH = 1024
_OBJECT_BYTES = 64
"""The memory of a small Python object."""


def read_rows(path: Path, left_out: str, limits: Limits) -> list[dict[str, Any]]:
    """All rows of a small table, without the columns whose names begin with `left_out`."""
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if not name.startswith(left_out)]
        limits.check_episode(_OBJECT_BYTES * file.metadata.num_rows * len(names), path.stat().st_size, str(path))
        rows: list[dict[str, Any]] = _read(file, path, names, range(file.num_row_groups), limits).to_pylist()
        return rows


def read_where(path: Path, key: str, value: int, columns: Sequence[str], limits: Limits) -> pa.Table:
    """These columns of the rows with this value in the integer column `key`, which selects the row groups to read."""
    with pq.ParquetFile(path) as file:
        if missing := [name for name in (key, *columns) if name not in file.schema_arrow.names]:
            raise DataError(
                f"{path} has no column {', '.join(missing)}, though meta/info.json declares it", "convert it again"
            )
        groups = [group for group in range(file.num_row_groups) if _may_hold(file.metadata, group, key, value)]
        names = list(dict.fromkeys((key, *columns)))
        return _read(file, path, names, groups, limits, pc.field(key) == value).select(list(columns))


def _read(
    file: pq.ParquetFile,
    path: Path,
    names: Sequence[str],
    groups: Sequence[int],
    limits: Limits,
    rows: pc.Expression | None = None,
) -> pa.Table:
    """Read in batches so small that not even a dictionary of images, expanded, exceeds the limit."""
    measured = parquet_pages.measure(path, file.metadata, names, groups)
    limits.check_episode(measured.total, measured.stored, str(path))
    size = max(1, min(_BATCH, limits.floor // max(1, measured.dictionary)))
    kept: list[pa.Table] = []
    taken = 0
    for batch in file.iter_batches(size, row_groups=list(groups), columns=list(names)):
        table = pa.Table.from_batches([batch])
        kept.append(table if rows is None else table.filter(rows))
        taken += kept[-1].nbytes
        limits.check_episode(taken, measured.stored, str(path))
    return pa.concat_tables(kept) if kept else file.schema_arrow.empty_table().select(list(names))


def _may_hold(metadata: pq.FileMetaData, group: int, key: str, value: int) -> bool:
    """Whether the statistics of a row group allow this value; most files have one episode in a row group."""
    for index in range(metadata.num_columns):
        column = metadata.row_group(group).column(index)
        if column.path_in_schema == key:
            bounds = column.statistics
            return (
                bounds is None
                or not bounds.has_min_max
                or bool(np.less_equal(bounds.min, value) & (value <= bounds.max))
            )
    return True
