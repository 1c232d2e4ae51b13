"""Episodes in other projects' formats. A new format is one new module here and one line in `MODULES`.

A format that can be read has `list_episodes(path, task)`; one that can be written has `write(path, episodes)`. Readers
do not guess: if a file does not contain the task, the user has to name it.
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
"""Metadata flag, as the following ones: the source has no observation after the last action, so the last observation is
repeated. Harmless where the episode terminated, because nothing is bootstrapped from it."""
OBSERVATIONS_SHIFTED = "observations_moved_to_the_next_action"
"""The source stores the observation after each action, so observations were shifted to the next action."""
SUCCESS_ASSUMED = "success_assumed"
"""The source has no rewards; its episodes count as successful demonstrations."""
STARTS_MID_EPISODE = "starts_mid_episode"
"""The previous transition in the source is not done, and its next observation is not the first of this episode."""
ENDS_MID_EPISODE = "ends_mid_episode"
"""The last transition of the episode is not done."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRef:
    """One episode of a source: a key that is stable between listings, and a function that loads it."""

    key: str
    load: Callable[[], Episode]


class Reader(Protocol):
    def list_episodes(self, path: Path, task: str) -> Sequence[EpisodeRef]:
        """The episodes of a file or folder, in order; `task` is used where the source has none ("": not given)."""
        ...


class Writer(Protocol):
    def write(self, path: Path, episodes: Iterable[Episode]) -> None:
        """Write these episodes to a new folder at `path`, atomically."""
        ...


def reader(name: str) -> Reader:
    return cast(Reader, _module(name, tuple(MODULES)))


def writer(name: str) -> Writer:
    return cast(Writer, _module(name, WRITABLE))


def _module(name: str, known: Sequence[str]) -> object:
    """Imported on demand, because each format needs another library."""
    if name not in known:
        raise DataError(f"the format {name!r} is not supported", f"use one of {', '.join(known)}")
    return importlib.import_module(MODULES[name])
