"""A folder of episodes, one file per key. Files are written atomically, so an episode is complete or absent.

The first episode declares the schema of the store; an episode that violates it is refused before anything is written.
After put() returns the episode is durable, so the caller may drop its copy. Demos, imports, an actor's spool and a
learner's inbox are episode stores. One process writes a store; any number may read it meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.schema import Range, Schema
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

SCHEMA = "schema.json"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class EpisodeStore:
    def __init__(self, folder: Path, *, ranges: Mapping[str, Range] | None = None) -> None:
        """`ranges` of fields become part of the schema that the first episode declares."""
        self.folder = folder
        self._ranges = ranges
        self._is_swept = False
        self._schema = _read_schema(folder / SCHEMA)

    @property
    def schema(self) -> Schema | None:
        """The schema of all episodes; None while the store is empty."""
        return self._schema

    def keys(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob(f"*{SUFFIX}"))

    def __contains__(self, key: str) -> bool:
        return self.path(key).exists()

    def __iter__(self) -> Iterator[Episode]:
        return (self.get(key) for key in self.keys())

    def get(self, key: str) -> Episode:
        return episodes.load(self.path(key))

    def put(self, key: str, episode: Episode) -> None:
        """Store an episode; it is durable when this returns. An episode is never replaced by another."""
        path = self.path(key)
        if path.exists():
            self._check_same(episode, path)
            return
        self.sweep()
        self.admit(episode, str(path))
        episodes.save(episode, path)

    def sweep(self) -> None:
        """Delete the temporary files of a killed writer, once; for the one process that writes this store."""
        if not self._is_swept:
            files.sweep_temporaries(self.folder)
            self._is_swept = True

    def admit(self, episode: Episode, where: str) -> None:
        """Check an episode, and declare its schema if it is the first."""
        self.check(episode, where)
        if self._schema is None:
            self._declare(Schema.of(episode, self._ranges))

    def check(self, episode: Episode, where: str) -> None:
        """Raise DataError if an episode violates the schema."""
        (self._schema or Schema.of(episode, self._ranges)).check(episode, where)

    def path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise DataError(f"{key!r} cannot be the name of an episode", "use letters, digits, dots and dashes")
        return self.folder / f"{key}{SUFFIX}"

    def _check_same(self, episode: Episode, path: Path) -> None:
        if episodes.to_bytes(episode) != path.read_bytes():
            raise DataError(f"{path} holds another episode", "use another key, or delete that file first")

    def _declare(self, schema: Schema) -> None:
        files.write_json(self.folder / SCHEMA, schema.to_json())
        self._schema = schema


def _read_schema(path: Path) -> Schema | None:
    if not path.exists():
        return None
    try:
        return Schema.from_json(json.loads(path.read_text()), str(path))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", "restore it, or delete the folder and create it again") from None
