"""Episodes in other projects' formats. A new format is one new module here and one line in `MODULES`; in another
package it is an entry point of the group `nightshift.formats`, a module or an object.

A format that can be read has `list_episodes(path, task, limits)`; one that can be written has `write(path, episodes)`.
Readers do not guess: if a file does not contain the task, the user has to name it. They open files through
`symlinks.check`, compute what an episode unpacks to before they unpack it (`limits`), and raise only DataError.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NoReturn, Protocol, cast

from nightshift import plugins
from nightshift.data.episode import Episode
from nightshift.data.limits import Limits
from nightshift.errors import DataError, NightshiftError

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
    """One episode of a source: a key that is stable between listings, and how to read it."""

    key: str
    where: str  # file and episode, for messages
    read: Callable[[], Episode]
    error: DataError | None = None  # known from the listing: why this part of the source cannot be read

    @classmethod
    def broken(cls, key: str, error: DataError) -> EpisodeRef:
        """A part of a source that cannot be listed, such as one damaged file of many. It fails to load."""
        return cls(key=key, where="", read=partial(_raise, error), error=error)

    def load(self) -> Episode:
        with reading(self.where):
            return self.read()


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Let only NightshiftError out of the block that reads `where`.

    The readers refuse by name what they know to be wrong. What is left is damage that a library notices (h5py, Arrow,
    PIL, FFmpeg, protobuf, …), and the types of their errors have no common base.
    """
    try:
        yield
    except NightshiftError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {error.filename or where}", "download the data again") from None
    except PermissionError as error:
        raise DataError(f"{error.filename or where} cannot be read: permission denied", "allow yourself to") from None
    except MemoryError:
        raise DataError(f"{where} does not fit into memory", "download it again, or leave it out") from None
    except Exception as error:
        said = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise DataError(f"{where} is damaged or has another layout: {said}", "download it again") from error


class Reader(Protocol):
    def list_episodes(self, path: Path, task: str, limits: Limits = ...) -> Sequence[EpisodeRef]:
        """The episodes of a file or folder, in order; `task` is used where the source has none ("": not given)."""
        ...


class Writer(Protocol):
    def write(self, path: Path, episodes: Iterable[Episode]) -> None:
        """Write these episodes to a new folder at `path`, atomically."""
        ...


def reader(name: str) -> Reader:
    return cast(Reader, _module(name, tuple(MODULES), "list_episodes"))


def writer(name: str) -> Writer:
    return cast(Writer, _module(name, WRITABLE, "write"))


def plug_in(name: str) -> EntryPoint | None:
    """The entry point of a format of another package; None for one of ours."""
    return plugins.find(plugins.FORMATS, MODULES).get(name)


def _module(name: str, known: Sequence[str], function: str) -> object:
    """Imported on demand, because each format needs another library."""
    others = plugins.find(plugins.FORMATS, MODULES)
    if name in others:
        found = plugins.load(others[name])
        if not callable(getattr(found, function, None)):
            raise plugins.unfit(others[name], f"a format with the function {function}")
        return cast(object, found)
    if name not in known:
        raise DataError(f"the format {name!r} is not supported", f"use one of {', '.join([*known, *others])}")
    return importlib.import_module(MODULES[name])


def _raise(error: DataError) -> NoReturn:
    raise error
