"""What every format needs on the way to an episode: its key, its task and its origin."""

from __future__ import annotations

import re
from pathlib import Path

from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError
from nightshift.types import Provenance

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]+")


def key(position: int, name: str) -> str:
    """Of the episode at a place in its source; keys sort as places do."""
    return f"{position:06d}-{_NOT_IN_A_KEY.sub('_', name)[:100]}"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts "demo_10" after "demo_9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def chosen_task(said: str, asked: str, where: str) -> str:
    """The task that the source says or, where it says none, the one the user gave."""
    if said and asked not in ("", said):
        raise DataError(f"{where} says that its task is {said}, not {asked}", "leave out --task")
    if not (said or asked):
        raise DataError(f"{where} does not say which task it shows", "say it: --task NAME")
    return said or asked


def provenance(*, source: str, path: Path, place: str, task: str, suite: str = "", language: str = "") -> Provenance:
    """Of an episode that was made elsewhere; `place` is where it stands in the file or folder at `path`."""
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
        origin=f"{path.name}#{place}",
    )


def checked(column: Column, where: str) -> Column:
    """An array that an episode can hold, in this machine's byte order; any other is refused, not cast."""
    if column.dtype.name not in DTYPES:
        raise DataError(f"{where} is of dtype {column.dtype}; episodes hold {', '.join(DTYPES)}")
    return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))
