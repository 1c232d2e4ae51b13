"""What a night does before and after the pipeline: bring in new demos and the champion, commit the new versions.

inbox, DVC's remote ──▶ data/imports ─┐
registry ──▶ data/champion/start ─────┴─▶ pipeline ─▶ dvc.lock, .dvc files ─▶ git commit
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from nightshift import config, interrupts
from nightshift.data import formats, importing
from nightshift.errors import Busy, NightshiftError
from nightshift.pipeline import notify
from nightshift.pipeline.run import Session, renew, stale, statuses
from nightshift.project import paths, quiet_nights, repository
from nightshift.telemetry import progress

NOTHING_TO_DO = "nothing to do: no new demos, and params, code, versions and data are those of the last run"
NOTHING_TO_DO_WITHOUT = "nothing to do without what could not be brought in"
_MET = "_nightshift_night_failed"
"""Attribute of an error that `failed` or `refused` has handled already."""
SETTLED_SECONDS = 60
_ENDING = 8
"""What was written to later than this is still being copied: the next night takes it."""


def play(root: Path, pipeline: Callable[[], None], tell: Callable[[str], None]) -> str:
    """Do the steps of a night, and pass a sentence about each to `tell`. Returns why there was nothing to do, and then
    the caller sends the notification; empty if the pipeline ran.

    A night that cannot bring something in, or whose versions cannot be committed, is not a failed one: people are told,
    and the next night tries again.
    """
    started = datetime.now(UTC)
    notes = prepare(root)
    for note in notes:
        tell(note.sentence)
    if failures := [note.sentence for note in notes if note.failed]:
        notify.not_brought_in(root, failures)
    idle = ""
    if stale(statuses(root)):
        pipeline()
    else:
        idle = f"{NOTHING_TO_DO_WITHOUT}: {'; '.join(failures)}" if failures else NOTHING_TO_DO
        quiet_nights.add(root, started, "idle", idle)
        tell(idle)
    _commit(root, tell)
    return idle


def _commit(root: Path, tell: Callable[[str], None]) -> None:
    try:
        if sentence := conclude(root):
            tell(sentence)
    except NightshiftError as error:
        tell(f"not committed: {error.what}")
        notify.not_committed(root, error)


def failed(root: Path, started: datetime, error: Exception) -> None:
    """Notify people, and record the night for the page of all nights. An error that is passed again is ignored.

    The page may be published, and the words of an error that is not ours may hold an address with a password.
    """
    if _was_met(error):
        return
    notify.failed(root, error)
    why = error.what if isinstance(error, NightshiftError) else f"{type(error).__name__}: the log says more"
    quiet_nights.add(root, started, "failed", why)


def missed(root: Path, why: str) -> None:
    """Tell people that a night was left out, and keep it for the page of all nights."""
    notify.missed(root, why)
    quiet_nights.add(root, datetime.now(UTC), "missed", f"a night was missed: {why}")


def refused(root: Path, started: datetime, busy: Busy) -> None:
    """Record a night that did not run, because another run was working in the folder. An error that is passed again is
    ignored."""
    if not _was_met(busy):
        quiet_nights.add(root, started, "refused", busy.what)


def _was_met(error: BaseException) -> bool:
    """Whether the error, or one that it came from, was passed here before; from now on it was."""
    known = any(hasattr(each, _MET) for each in interrupts.chain(error))
    setattr(error, _MET, True)
    return known


class Note(NamedTuple):
    """On what a night brings in."""

    sentence: str
    failed: bool = False


def prepare(root: Path) -> list[Note]:
    """Bring in what is new. What cannot be brought in is said, and does not end the night."""
    with Session(root) as session:
        settings = session.params.nightly
        notes = [*_pull(session)] if settings.pull else []
        if settings.inbox is not None:
            notes += _import_inbox(session, Path(os.path.expanduser(settings.inbox)), settings)
        if session.params.start == "champion":
            notes += _renew_start(session)
        return notes


def conclude(root: Path) -> str:
    """Commit what the night made new, if params.yaml says so; a sentence, or empty if nothing was new."""
    if not config.load(root / paths.PARAMS).nightly.commit:
        return ""
    imports = sorted(path.relative_to(root) for path in (root / paths.IMPORTS).glob("*.dvc"))
    versions = [paths.DVC_LOCK, paths.REPORT_POINTER, *imports]
    made = repository.commit_files(root, versions, f"nightly {date.today().isoformat()}")
    return f"committed {paths.DVC_LOCK}, report and imports as {made}" if made else ""


def _pull(session: Session) -> Iterator[Note]:
    for pointer in sorted((session.root / paths.IMPORTS).glob("*.dvc")):
        try:
            if session.store.pull([pointer.relative_to(session.root)]):
                yield Note(f"pulled {pointer.stem} from DVC's remote")
        except NightshiftError as error:
            yield Note(f"could not pull {pointer.stem}: {error.what}", failed=True)


def _import_inbox(session: Session, inbox: Path, settings: config.Nightly) -> Iterator[Note]:
    folder = session.root / inbox
    if not folder.is_dir():
        yield Note(f"nightly.inbox {inbox} is not a folder", failed=True)
        return
    taken: dict[str, Path] = {}
    for entry in sorted(folder.glob("[!.]*")):
        name = import_name(entry)
        first = taken.setdefault(name, entry)
        if first != entry:
            both = f"{first.name} and {entry.name} would both be the import {name}"
            yield Note(f"{both}: one is taken, so rename the other", failed=True)
            continue
        try:
            yield from _take(session, entry, settings)
        except NightshiftError as error:
            reason = "; ".join(filter(None, (error.what, error.next_step)))
            yield Note(f"could not import {entry.name}: {reason}", failed=True)


def _take(session: Session, entry: Path, settings: config.Nightly) -> Iterator[Note]:
    """Import an entry of the inbox; nothing is said where an earlier night has done it."""
    name = import_name(entry)
    if (paths.IMPORTS / f"{name}.dvc").exists():
        if importing.has_changed(entry, name):
            yield Note(
                f"{entry.name} is not what the import {name} was made of: rename it, and it is taken", failed=True
            )
    elif (paths.IMPORTS / name).exists():
        session.store.track(paths.IMPORTS / name)
        yield Note(f"tracked {name}, whose import was interrupted")
    elif time.time() - _last_written(entry) < SETTLED_SECONDS:
        yield Note(f"{entry.name} is still being written: the next night takes it")
    else:
        job = importing.Import(path=entry, format=settings.format, name=name, task=settings.task or "")
        yield Note(_import(session, job))


def import_name(entry: Path) -> str:
    """The name of a file or folder as the name of an import; of a long one the end is replaced by its digest."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", entry.stem).lstrip("-") or "_"
    if len(name) <= importing.LONGEST_NAME:
        return name
    ending = "_" + hashlib.sha256(entry.stem.encode()).hexdigest()[:_ENDING]
    return name[: importing.LONGEST_NAME - len(ending)] + ending


def _last_written(entry: Path) -> float:
    """When a file of the entry was last written. A file that vanishes meanwhile is being written, as the temporary
    files of rsync are."""
    with formats.reading(str(entry)):
        try:
            return max(_stat(path).st_mtime for path in (entry, *entry.rglob("*")))
        except FileNotFoundError:
            return time.time()


def _stat(path: Path) -> os.stat_result:
    """Of what a link points to, or else of the link."""
    try:
        return path.stat()
    except FileNotFoundError:
        return path.lstat()


def _import(session: Session, job: importing.Import) -> str:
    with importing.alone(job):
        state = importing.begin(job)
        with progress.bar("import", len(state.entries), state.done) as advance:
            importing.gather(job, state, skip_broken=True, watch=advance)
        importing.finish(job, state)
    session.store.track(job.target)
    left_out = ", ".join(f"{count} {reason}" for reason, count in state.left_out.items())
    return f"imported {job.name}: {len(state.kept)} episodes" + (f"; left out: {left_out}" if left_out else "")


def _renew_start(session: Session) -> Iterator[Note]:
    """Training starts from the champion there is now; the same one again makes nothing stale."""
    from nightshift.adapters import mlflow_registry

    champion = mlflow_registry.champion(session.root, session.params.section("register").model)
    recorded = session.root / paths.START / paths.CHAMPION_VERSION
    before = json.loads(recorded.read_text())["version"] if recorded.exists() else ""
    if champion and champion.version != before:
        renew("start", session)
        yield Note(f"training starts from version {champion.version}, the champion")
