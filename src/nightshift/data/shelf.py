"""Episodes in a folder, one file each under a key: an episode is there whole, or it is not there.

The first one declares the schema of all; what breaks it is refused before anything is written. An episode that is on
the shelf has reached the disk, so whoever put it there may forget it. Demos in the making, imports, an actor's spool
and a learner's inbox are all shelves.
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


class Shelf:
    def __init__(self, folder: Path, *, ranges: Mapping[str, Range] | None = None) -> None:
        """`ranges` are declared with the first episode."""
        self.folder = folder
        self._ranges = ranges
        files.sweep_temporaries(folder)
        self._schema = _read_schema(folder / SCHEMA)

    @property
    def schema(self) -> Schema | None:
        """What every episode here looks like; None until there is one."""
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
        """Keep an episode; when this returns it survives a power cut."""
        path = self.path(key)
        self.admit(episode, str(path))
        episodes.save(episode, path)

    def admit(self, episode: Episode, where: str) -> None:
        """Refuse an episode that does not belong here; the first one declares which do."""
        self.check(episode, where)
        if self._schema is None:
            self._declare(Schema.of(episode, self._ranges))

    def check(self, episode: Episode, where: str) -> None:
        """Refuse an episode that does not belong here."""
        (self._schema or Schema.of(episode, self._ranges)).check(episode, where)

    def path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise DataError(f"{key!r} cannot be the name of an episode", "use letters, digits, dots and dashes")
        return self.folder / f"{key}{SUFFIX}"

    def _declare(self, schema: Schema) -> None:
        files.write_json(self.folder / SCHEMA, schema.to_json())
        self._schema = schema


def _read_schema(path: Path) -> Schema | None:
    if not path.exists():
        return None
    try:
        return Schema.from_json(json.loads(path.read_text()), str(path))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", "restore it, or delete the folder and make it again") from None
