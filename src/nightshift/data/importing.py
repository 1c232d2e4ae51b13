"""Imports episodes of another format; a killed import resumes where it stopped.

Episodes are collected in an episode store in the state folder. When all are converted, the import is moved to
data/imports atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nightshift import files
from nightshift.data import formats
from nightshift.data import limits as unpacking
from nightshift.data.episode import Episode, columns
from nightshift.data.episode_store import SCHEMA, EpisodeStore
from nightshift.data.formats import EpisodeRef
from nightshift.data.limits import Limits
from nightshift.data.sources import ALL_IMPORTS, DEMOS, ROLLOUTS
from nightshift.errors import DataError
from nightshift.project import locks, packages, paths

UNSOLVED = "unsolved.jsonl"
"""Keys of the unsuccessful episodes, so that a resumed import does not decode them again."""

LONGEST_NAME = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{LONGEST_NAME - 1}}}")


@dataclass(frozen=True, kw_only=True)
class Import:
    """What to import: the path and format of a source, a name, and the task if the source does not contain it."""

    path: Path
    format: str
    name: str
    task: str = ""
    limits: Limits = unpacking.DEFAULT

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in (DEMOS, ROLLOUTS, ALL_IMPORTS):
            raise DataError(
                f"{self.name!r} cannot be the name of an import",
                f"use up to {LONGEST_NAME} letters, digits, _ and -; {DEMOS} is taken by the stage collect, {ROLLOUTS} "
                f"by the success classifier, {ALL_IMPORTS} means all of them",
            )
        with formats.reading(str(self.path)):
            if not self.path.exists():
                raise DataError(f"{self.path} does not exist", "give a file or folder that does")
        if self.target.exists() or self.pointer.exists():
            raise DataError(
                f"{self.target if self.target.exists() else self.pointer} already exists",
                _join(self._completion(), f"remove it (rm -rf {self.target} {self.pointer})", "choose another --name"),
            )

    @property
    def target(self) -> Path:
        return paths.IMPORTS / self.name

    @property
    def pointer(self) -> Path:
        """DVC's file about the import, which git tracks."""
        return paths.IMPORTS / f"{self.name}.dvc"

    def _completion(self) -> str:
        """What is missing of an import that is there in part."""
        if not self.target.exists():
            return f"get the data with `dvc pull {self.pointer}`"
        return "" if self.pointer.exists() else f"track it with `dvc add {self.target}`"

    @cached_property
    def state(self) -> Path:
        """The folder for episodes until the import is complete; it depends on the content of the source, and on the
        code of a reader of another package."""
        entry = formats.plug_in(self.format)
        reader = [self.format, packages.plug_in(entry)] if entry else [self.format]
        content = json.dumps([*reader, self.task, self.source_digest])
        return paths.stage_state("import", hashlib.sha256(content.encode()).hexdigest())

    @cached_property
    def source_digest(self) -> str:
        """As it was when this was first asked for."""
        return source_digest(self.path)

    @cached_property
    def stored(self) -> int:
        """The bytes of the source; a file with several names counts once."""
        return sum({(status.st_dev, status.st_ino): status.st_size for _, status in _files(self.path)}.values())


def source_digest(path: Path) -> str:
    """Of the names, sizes and times of all files of a source."""
    stamps = [(str(file.resolve()), status.st_size, status.st_mtime_ns) for file, status in _files(path)]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def _files(path: Path) -> list[tuple[Path, os.stat_result]]:
    with formats.reading(str(path)):
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [(file, file.stat()) for file in found if file.is_file()]


@dataclass(kw_only=True)
class Progress:
    """The progress and the result of an import."""

    entries: Sequence[EpisodeRef]
    kept: set[str]
    unsolved: set[str]
    broken: dict[str, str] = field(default_factory=dict)
    """Error messages of the episodes and files that were left out because they are invalid, by key."""
    other_splits: set[str] = field(default_factory=set)
    """Keys of the episodes that their dataset sets aside for validation or testing."""
    unpacked: int = 0
    """The bytes of all episodes so far."""

    @property
    def done(self) -> int:
        return len(self.kept) + len(self.unsolved)

    @property
    def left_out(self) -> dict[str, int]:
        """How many episodes, by the reason."""
        found = {
            "that did not succeed": len(self.unsolved),
            "that are broken": len(self.broken),
            "of splits that are not for training": len(self.other_splits),
        }
        return {reason: count for reason, count in found.items() if count}


@contextlib.contextmanager
def alone(job: Import) -> Iterator[None]:
    """One process at a time imports a source: each would remove the other's temporary files."""
    job.state.mkdir(parents=True, exist_ok=True)
    lock = locks.acquire(
        job.state / locks.LOCK,
        lambda holder: DataError(f"another import of {job.path} is under way (process {holder})", "wait for it"),
    )
    try:
        yield
    finally:
        lock.release()


def begin(job: Import) -> Progress:
    """List the episodes of the source and those that an earlier attempt has already imported."""
    entries = formats.reader(job.format).list_episodes(job.path, job.task, job.limits)
    listed = {entry.key for entry in entries}
    store = EpisodeStore(job.state)
    kept = listed & set(store.keys())
    return Progress(
        entries=entries,
        kept=kept,
        unsolved=listed & set(files.read_journal(job.state / UNSOLVED)),
        unpacked=sum(store.path(key).stat().st_size for key in kept),
    )


def gather(job: Import, progress: Progress, *, skip_broken: bool, watch: Callable[[str], None]) -> None:
    """Import the remaining episodes; an invalid one raises DataError, or is left out if `skip_broken` is set.

    What the listing found to be broken is reported first, before hours of decoding.
    """
    store = EpisodeStore(job.state)
    if not skip_broken and (errors := [entry.error for entry in progress.entries if entry.error]):
        raise _with_remedy(errors[0])
    for entry in progress.entries:
        if entry.key in progress.kept or entry.key in progress.unsolved:
            continue
        try:
            _take(entry, job, store, progress)
        except DataError as error:
            if not skip_broken:
                raise _with_remedy(error) from None
            progress.broken[entry.key] = error.what
        watch(f"{len(progress.kept)} kept")


def _with_remedy(error: DataError) -> DataError:
    return DataError(error.what, _join(error.next_step, "leave such episodes out: --skip-broken"))


def finish(job: Import, progress: Progress) -> Mapping[str, int]:
    """Move the import to data/imports, and count the metadata flags of its episodes."""
    if not progress.kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in progress.left_out.items()) or "it has none at all"
        first = next(iter(progress.broken.values()), "")
        raise DataError(
            f"{job.path} has no successful episodes to train on: {reasons}", first and f"the first broken one: {first}"
        )
    store = EpisodeStore(job.state)
    admitted: Counter[str] = Counter()
    with files.new_folder(job.target) as new:
        for key in sorted(progress.kept):
            files.link_or_copy(store.path(key), new / store.path(key).name)
            admitted.update(name for name, value in store.get(key).metadata.items() if value is True)
        files.link_or_copy(job.state / SCHEMA, new / SCHEMA)
    _record(job)
    shutil.rmtree(job.state)
    return dict(admitted)


def _record(job: Import) -> None:
    """Of what the import was made; the import is part of it, since another one may take its name."""
    about = {"path": str(job.path.resolve()), "source": job.source_digest, "import": files.identity(job.target)}
    files.write_json(paths.imported(job.name), about)


def has_changed(path: Path, name: str) -> bool:
    """Whether this machine made the import of this file or folder, and that is not what it was then."""
    record, target = paths.imported(name), paths.IMPORTS / name
    if not (record.exists() and target.exists()):
        return False
    about: dict[str, str] = json.loads(record.read_text())
    made_of_it = about.get("path") == str(path.resolve()) and about.get("import") == files.identity(target)
    return made_of_it and about["source"] != source_digest(path)


def _take(entry: EpisodeRef, job: Import, store: EpisodeStore, progress: Progress) -> None:
    episode: Episode = entry.load()
    if episode.provenance.split != "train":
        progress.other_splits.add(entry.key)
        return
    if not episode.success:
        files.append_json(job.state / UNSOLVED, entry.key)
        progress.unsolved.add(entry.key)
        return
    with formats.reading(entry.where):
        if episode.actions.ndim != 2:  # noqa: PLR2004
            raise DataError(f"{entry.where}: actions has shape {list(episode.actions.shape)}, not [N, A]")
        if episode.length == 1:
            raise DataError(f"{entry.where}: the episode has no action")
        store.check(episode, str(job.path))
        _check_texts(episode, entry.where)
        progress.unpacked += sum(column.nbytes for column in columns(episode).values())
        job.limits.check_source(progress.unpacked, job.stored, str(job.path))
    store.put(entry.key, episode)
    progress.kept.add(entry.key)


def _check_texts(episode: Episode, where: str) -> None:
    """JSON and HDF5 can hold half of a surrogate pair, which no file of an export and no terminal can."""
    for name in ("task", "language", "suite"):
        text = getattr(episode.provenance, name)
        try:
            text.encode()
        except UnicodeEncodeError:
            said = f"{where}: {name} is {text!r}, which is not valid Unicode"
            raise DataError(said, "correct it in the source") from None


def _join(*steps: str) -> str:
    return ", or ".join(step for step in steps if step)
