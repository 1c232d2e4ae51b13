"""Helpers of all formats: files, keys, actions, the task and the provenance of an episode."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nightshift.data import limits, symlinks
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError
from nightshift.types import Provenance

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]+")


def episode_key(position: int, name: str) -> str:
    """The key of the episode at a position in its source; keys sort by position."""
    return f"{position:06d}-{name_in_key(name)}"


def name_in_key(name: str) -> str:
    """A name as a part of a key."""
    return _NOT_IN_A_KEY.sub("_", name)[:100]


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """A sort key that puts "demo_10" after "demo_9"."""
    parts = re.split(r"([0-9]+)", name)  # numbers are at odd positions; the length orders those of thousands of digits
    return [(len(part.lstrip("0")), part.lstrip("0")) if odd % 2 else (-1, part) for odd, part in enumerate(parts)]


def files_of(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The file at `path`, or the files of the folder at `path` in natural order."""
    if not path.is_dir():
        return [path]
    found = sorted((f for f in path.iterdir() if f.suffix in suffixes), key=lambda file: natural_sort_key(file.name))
    if not found:
        raise DataError(f"{path} has no {' or '.join(suffixes)} files", "give the folder that holds them")
    return found


def read_json(path: Path, root: Path) -> Any:
    """A JSON file of the source at `root`."""
    try:
        return json.loads(read_text(symlinks.check(path, root)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}", "download the dataset again") from None


def read_text(path: Path) -> str:
    """The text of a file of metadata."""
    if (size := path.stat().st_size) > limits.METADATA_BYTES:
        raise DataError(
            f"{path} has {limits.size(size)} of text; at most {limits.size(limits.METADATA_BYTES)} are read",
            "download the dataset again",
        )
    return path.read_text(encoding="utf-8")


def resolve_task(in_source: str, from_user: str, where: str) -> str:
    """The task in the source or, if it has none, the task that the user named."""
    if in_source and from_user not in ("", in_source):
        raise DataError(f"{where} has the task {in_source}, not {from_user}", "leave out --task")
    if not (in_source or from_user):
        raise DataError(f"{where} does not contain the name of its task", "name it: --task NAME")
    return in_source or from_user


def provenance(*, source: str, path: Path, location: str, task: str, suite: str = "", language: str = "") -> Provenance:
    """The provenance of an imported episode; `location` is its position in the file or folder at `path`."""
    return Provenance(
        source=source,
        suite=suite or source,
        task=task,
        language=language,
        split="train",
        init_state=None,
        seed=None,
        versions={},
        commit="",
        origin=f"{path.name}#{location}",
    )


def native_dtype(column: Column, where: str) -> Column:
    """The array in native byte order; raises DataError if episodes cannot hold its dtype. Nothing is cast."""
    if column.dtype.name not in DTYPES:
        raise DataError(f"{where} is of dtype {column.dtype}; episodes hold {', '.join(DTYPES)}")
    return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))


def action_matrix(actions: Column, where: str) -> Column:
    """Actions as [N, A]; single numbers are vectors of length 1."""
    matrix = actions[:, None] if actions.ndim == 1 else actions
    if matrix.ndim != 2 or not matrix.shape[1]:  # noqa: PLR2004
        raise DataError(
            f"{where} has shape {list(actions.shape)}; actions are [N, A], one vector per step",
            "flatten the action at its source",
        )
    return matrix
