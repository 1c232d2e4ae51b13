"""Conversion between arrays and Arrow columns in the form that LeRobot expects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nightshift.data.tensors import Column
from nightshift.errors import DataError

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def numbers(column: Column) -> pa.Array:
    """[T] as numbers, [T, n] as fixed-size lists, more dimensions as nested lists."""
    array = pa.array(np.ascontiguousarray(column).reshape(-1))
    if column.ndim == 2:  # noqa: PLR2004 - a vector per frame
        return pa.FixedSizeListArray.from_arrays(array, column.shape[1])
    for axis in range(column.ndim - 1, 0, -1):
        offsets = np.arange(0, len(array) + 1, column.shape[axis], dtype=np.int32)
        array = pa.ListArray.from_arrays(pa.array(offsets), array)
    return array


def images(files: Sequence[bytes]) -> pa.Array:
    return pa.array([{"bytes": content, "path": None} for content in files], IMAGE)


def to_numpy(column: pa.ChunkedArray, shape: tuple[int, ...], where: str) -> Column:
    """The numbers of a column as [T, *shape]; DataError if its rows do not have this shape."""
    array = column.combine_chunks()
    array = array.storage if isinstance(array.type, pa.ExtensionType) else array
    sizes: list[int] = []
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type) or pa.types.is_large_list(array.type):
        size = _row_length(array, math.prod(sizes), where)
        sizes.append(size)
        array = array.flatten()
    if array.null_count:
        raise DataError(f"{where} has {array.null_count} empty values", "fill them, or convert the dataset again")
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
        raise DataError(f"{where} is a column of {array.type}, not of numbers", "convert the dataset again")
    count = math.prod(shape)
    if tuple(sizes) not in (shape, (count,), () if count == 1 else (count,)):
        raise DataError(f"{where} has rows of shape {sizes}, but {list(shape)} is declared", "correct meta/info.json")
    found: Column = array.to_numpy(zero_copy_only=False)
    return found.reshape(len(column), *shape)


def _row_length(array: pa.Array, rows_per_step: int, where: str) -> int:
    """The length that all lists of a column have."""
    lengths = pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != (lengths[0] if len(lengths) else 0))
    if not len(lengths) or not len(wrong):
        return int(lengths[0]) if len(lengths) else 0
    step = int(wrong[0]) // max(1, rows_per_step)
    raise DataError(
        f"{where} is ragged: its lists have {lengths[0]} entries, and {max(0, lengths[wrong[0]])} at step {step}",
        "convert the dataset again with rows of one length",
    )


def with_index(table: pa.Table, index: str) -> pa.Table:
    """Add the schema metadata with which pandas restores this index."""
    columns = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": "unicode" if pa.types.is_string(table[name].type) else "int64",
            "numpy_type": "object" if pa.types.is_string(table[name].type) else "int64",
            "metadata": None,
        }
        for name in table.column_names
    ]
    note = {"index_columns": [index], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def with_features(table: pa.Table, features: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Add the schema metadata with which the `datasets` library recognises images."""
    described = {name: _described(features[name]) for name in table.column_names}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": described}})})


def _described(feature: Mapping[str, Any]) -> dict[str, Any]:
    shape = feature["shape"]
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    if shape == [1]:
        return {"dtype": feature["dtype"], "_type": "Value"}
    if len(shape) == 1:
        return {"feature": {"dtype": feature["dtype"], "_type": "Value"}, "length": shape[0], "_type": "Sequence"}
    return {"shape": shape, "dtype": feature["dtype"], "_type": f"Array{len(shape)}D"}
