"""Helpers of all formats: the key, the task and the provenance of an episode."""

from __future__ import annotations

import re
from pathlib import Path

from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError
from nightshift.types import Provenance

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]+")


def episode_key(position: int, name: str) -> str:
    """The key of the episode at a position in its source; keys sort by position."""
    return f"{position:06d}-{_NOT_IN_A_KEY.sub('_', name)[:100]}"


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """A sort key that puts "demo_10" after "demo_9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


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
