"""Files of published checkpoints: weights in safetensors, in one file or in shards, and JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nightshift.errors import DataError

Shape = tuple[int, ...]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
INCOMPLETE = "download the checkpoint again"
QUANTISED = "take the files whose weights are floating-point numbers: quantised ones cannot be trained"
_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGEST = torch.finfo(torch.float32).max
"""Policies hold numbers in float32."""


def read_headers(folder: Path) -> tuple[dict[str, Shape], dict[str, Path]]:
    """The shape of every tensor of a checkpoint by name, and the file that has it. DataError: it is incomplete."""
    if not folder.is_dir():
        raise DataError(f"there is no checkpoint folder {folder}", "set policy.checkpoint.path in params.yaml")
    shapes: dict[str, Shape] = {}
    files: dict[str, Path] = {}
    for path, names in _shards(folder):
        if not path.exists():
            raise DataError(f"the shard {path} is missing", INCOMPLETE)
        for name, shape in read_header(path, INCOMPLETE).items():
            shapes[name], files[name] = shape, path
        missing = [name for name in names if name not in shapes]
        if missing:
            raise DataError(f"{path} lacks {missing[0]}, which {INDEX} says it has", INCOMPLETE)
    return shapes, files


def read_header(path: Path, next_step: str) -> dict[str, Shape]:
    """The shapes of the tensors of a file. DataError: it is damaged, or its weights are integers."""
    try:
        with safe_open(path, "pt") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            types = {name: tensor.get_dtype() for name, tensor in tensors.items()}
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", next_step) from None
    except SafetensorError as error:
        raise DataError(f"{path} is truncated or damaged: {error}", next_step) from None
    strange = next((name for name in types if types[name] not in _FLOATS), None)
    if strange is not None:
        raise DataError(
            f"{strange} in {path} is of type {types[strange]}, and floating-point numbers are expected", QUANTISED
        )
    return shapes


def shape_of(shapes: Mapping[str, Shape], name: str, rank: int, next_step: str) -> Shape:
    """Of a tensor that tells the sizes of a network; DataError: it is missing or of another rank."""
    if name not in shapes:
        raise DataError(f"the checkpoint has no {name}", next_step)
    shape = shapes[name]
    if len(shape) != rank or 0 in shape:
        raise DataError(
            f"{name} has shape {list(shape)} in the checkpoint, and {rank} dimensions, none of them 0, are expected",
            next_step,
        )
    return shape


def require_multiple(width: int, of: int, name: str, why: str, next_step: str) -> None:
    if width % of:
        raise DataError(
            f"{name} has width {width} in the checkpoint, and a multiple of {of} is expected: {why}", next_step
        )


def read_tensor(path: Path, name: str, rows: slice | None = None) -> Tensor:
    """A tensor of a file, or some rows of it. The file is closed after each one: what was read of an open file stays in
    memory."""
    with safe_open(path, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        return tensor


def read_object(path: Path, next_step: str) -> Mapping[str, Any]:
    """A JSON file. DataError: it cannot be read, or is no object."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", next_step) from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise DataError(f"{path} is not JSON: {error}", next_step) from None
    return as_object(content, str(path), next_step)


def as_object(content: Any, where: str, next_step: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise DataError(f"{where} is no JSON object", next_step)
    return content


def finite_numbers(found: Any, where: str, next_step: str) -> list[float]:
    """DataError: one would be NaN or infinite in float32, or there is no list."""
    if not isinstance(found, Sequence) or not all(_is_finite(value) for value in found):
        raise DataError(f"{where} is no list of finite numbers", next_step)
    return [float(value) for value in found]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def _shards(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every file of weights, and the tensors that it has to have."""
    if (folder / SINGLE).exists():
        yield folder / SINGLE, []
        return
    if not (folder / INDEX).exists():
        raise DataError(
            f"{folder} has neither {SINGLE} nor {INDEX}", "set policy.checkpoint.path to a published checkpoint"
        )
    index = read_object(folder / INDEX, INCOMPLETE)
    weight_map = as_object(index.get("weight_map"), f"weight_map in {folder / INDEX}", INCOMPLETE)
    strange = next((name for name, file in weight_map.items() if not isinstance(file, str)), None)
    if strange is not None:
        raise DataError(f"weight_map in {folder / INDEX} names no file for {strange}", INCOMPLETE)
    for shard in sorted(set(weight_map.values())):
        yield folder / shard, [name for name, file in weight_map.items() if file == shard]
