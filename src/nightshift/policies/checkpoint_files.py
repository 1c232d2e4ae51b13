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
_LARGEST = torch.finfo(torch.float32).max
"""What policies hold numbers in."""


def read_headers(folder: Path) -> tuple[dict[str, Shape], dict[str, Path]]:
    """The shape of every tensor of a checkpoint by name, and the file that has it. DataError: it is incomplete."""
    if not folder.is_dir():
        raise DataError(f"there is no checkpoint folder {folder}", "set policy.checkpoint.path in params.yaml")
    shapes: dict[str, Shape] = {}
    files: dict[str, Path] = {}
    for path, names in _shards(folder):
        for name, shape in _header(path).items():
            shapes[name], files[name] = shape, path
        missing = [name for name in names if name not in shapes]
        if missing:
            raise DataError(f"{path} lacks {missing[0]}, which {INDEX} says it has", INCOMPLETE)
    return shapes, files


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


def _header(path: Path) -> dict[str, Shape]:
    try:
        with safe_open(path, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"the shard {path} is missing", INCOMPLETE) from None
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error}", INCOMPLETE) from None
    except SafetensorError as error:
        raise DataError(f"{path} is truncated or damaged: {error}", INCOMPLETE) from None
