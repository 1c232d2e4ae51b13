"""Episodes in other projects' formats. A new format is one new module here and one line in `MODULES`.

A format that can be read has `entries(path, task)`; one that can be written has `write(path, episodes)`. Reading never
guesses: what a file does not say (the task, if it has none) is asked of the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from nightshift.data.episode import Episode
from nightshift.errors import DataError

MODULES = {
    "hdf5": "nightshift.data.formats.hdf5",
    "hil-serl": "nightshift.data.formats.hil_serl",
    "lerobot": "nightshift.data.formats.lerobot",
    "rlds": "nightshift.data.formats.rlds_tfrecord",
}
WRITABLE = ("lerobot", "rlds")

REPEATED_FINAL = "final_observation_repeated"
"""In an episode's metadata, as the others here: the source has no observation after its last action, so that the one
before it stands in. Harmless where the episode terminated: nothing is bootstrapped from it."""
MOVED = "observations_moved_to_the_next_action"
"""The source shows what each action led to."""
SUCCESS_ASSUMED = "success_assumed"
"""The source has no rewards: it is one of demonstrations, and whoever recorded them kept what worked."""
STARTS_MID_EPISODE = "starts_mid_episode"
"""The transition before it in the source was not done and does not lead to it."""
ENDS_MID_EPISODE = "ends_mid_episode"
"""Its last transition is not done."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One episode of a source: a key that is the same every time it is listed, and how to load it."""

    key: str
    load: Callable[[], Episode]


class Reader(Protocol):
    def entries(self, path: Path, task: str) -> Sequence[Entry]:
        """The episodes of a file or folder, in order; `task` names theirs where the source does not ("" = it must)."""
        ...


class Writer(Protocol):
    def write(self, path: Path, episodes: Iterable[Episode]) -> None:
        """A new folder at `path` with these episodes, complete or not there."""
        ...


def reader(name: str) -> Reader:
    return cast(Reader, _module(name, tuple(MODULES)))


def writer(name: str) -> Writer:
    return cast(Writer, _module(name, WRITABLE))


def _module(name: str, known: Sequence[str]) -> object:
    """Imported when it is asked for: each brings a library of its own."""
    if name not in known:
        raise DataError(f"there is no format {name!r} here", f"use one of {', '.join(known)}")
    return importlib.import_module(MODULES[name])
