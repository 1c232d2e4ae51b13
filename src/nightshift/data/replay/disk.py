"""Trajectories in files that one thread writes behind whoever adds.

    put ──▶ pending (in memory) ──▶ writer thread: file, fsync ──▶ open files, at most `cache_size`, first in first out
                                          └─ failure: stays in memory, is raised to the next caller, flush tries again

An open file is views of it, so the operating system keeps in memory what is used and lets go of it when it must.
Sampling reads the rows it needs and no more, so it checks that a file has the right form and not its sha256; that is
checked where the whole file is read or vouched for: before it goes into a checkpoint, and when a folder is loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.data.replay import formats
from nightshift.data.replay.incoming import arriving, link, link_checked, settle
from nightshift.data.replay.index import INDEX, METADATA, OLDEST, Entry, Index, to_json
from nightshift.data.replay.keeping import Export, Source, open_file
from nightshift.data.replay.table import Flat, Table
from nightshift.data.replay.trajectory import NONE, TrajectoryBatch
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError
from nightshift.project.locks import Claim

HEAD = 64 * 1024
"""Of a file: its header and all that is not a picture, for trajectories of ordinary length."""
MOST_PENDING = 64
"""Trajectories waiting to be written before whoever adds has to wait too."""
LISTED_SHARE = 0.01
"""The index on disk is written again once this share of it is out of date: its cost per trajectory stays the same."""


class OnDisk:
    """A file per trajectory in a folder, with an index beside them that lists only what is there. See `Keeping`.

    The index comes after the files, so it may lag behind them: see `OLDEST` for what is taken up after a kill.
    """

    def __init__(
        self,
        folder: Path,
        cache_size: int,
        index: Index,
        lock: threading.RLock,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`lock` is the buffer's; `describe` gives the content of the JSON files, and is called by the writer."""
        self.table = Table()
        self._folder = folder
        self._cache_size = cache_size
        self._index = index
        self._lock = lock
        self._describe = describe
        self._pending: dict[int, tuple[Entry, int]] = {}  # by id: what is to be written, and its slot
        self._opened: dict[int, int] = {}  # by id: slots of open files, first opened first
        self._sums: dict[int, str] = {}  # by id: sha256 of the files that are there
        self._doomed: list[Path] = []  # files to remove once the index on disk no longer lists them
        self._unlisted = 0
        self._is_closed = False
        self._folder_lock = threading.Lock()  # taken before the buffer's lock, never after
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay-writer")
        self._writes: deque[Future[None]] = deque()
        self._claim = Claim(folder, DataError)
        files.sweep_temporaries(folder)
        settle(folder)
        self._holds_other_data = (folder / INDEX).exists()

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None:
        slot = self.table.put(Flat(trajectory))
        self._pending[entry.trajectory_id] = (entry, slot)
        self._index.set_slot(entry.trajectory_id, slot)
        self._submit(partial(self._write, entry))

    def open(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        for entry in entries:
            _announce_head(self._path(entry))
        for entry in entries:
            self._hold(entry, open_file(self._path(entry), entry))

    def trim(self) -> None:
        while len(self._opened) > self._cache_size:
            trajectory_id = next(iter(self._opened))
            self.table.remove(self._opened.pop(trajectory_id))
            self._index.set_slot(trajectory_id, NONE)

    def drop(self, entry: Entry) -> None:
        trajectory_id = entry.trajectory_id
        if trajectory_id in self._pending:
            self.table.remove(self._pending.pop(trajectory_id)[1])
        if trajectory_id in self._opened:
            self.table.remove(self._opened.pop(trajectory_id))
        if self._sums.pop(trajectory_id, None):
            self._doomed.append(self._path(entry))
        self._unlisted += 1

    def export(self, entry: Entry) -> Export:
        if entry.trajectory_id in self._pending:
            _, slot = self._pending[entry.trajectory_id]
            return partial(formats.write, trajectory=self.table.flat(slot).trajectory)
        return partial(link_checked, source=self._path(entry), sha256=self._sums[entry.trajectory_id])

    def listed(self) -> list[Entry]:
        """Those whose files are there, with their sums."""
        sums = self._sums
        return [replace(e, sha256=sums[e.trajectory_id]) for e in self._index if e.trajectory_id in sums]

    def adopt(self, entries: Sequence[Entry], source: Source, metadata: Mapping[str, Any]) -> None:
        with arriving(self._folder) as stage:
            listed = [_staged(stage, entry, source(entry)) for entry in entries]
            files.write_json(stage / METADATA, metadata)
            oldest = entries[0].trajectory_id if entries else metadata["trajectory_counter"]
            files.write_json(stage / INDEX, {**to_json(listed), OLDEST: oldest})
        self._holds_other_data = True  # if what comes next fails, loading the folder again goes on with it
        settle(self._folder)
        self._holds_other_data = False
        self.table, self._opened, self._pending, self._doomed = Table(), {}, {}, []
        self._sums = {entry.trajectory_id: entry.sha256 for entry in listed}
        self._index.reset(entries)
        self.open(entries[:1])  # so that what is added next must have the same fields

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        return self._folder_lock

    def keep_up(self) -> None:
        if self._holds_other_data:
            raise DataError(
                f"{self._folder} holds the trajectories of an earlier buffer",
                "load them with load_checkpoint, or choose another folder",
            )
        while len(self._writes) > MOST_PENDING:
            wait(list(self._writes)[:1])
            self._raise_failures()
        self._raise_failures()

    def flush(self) -> None:
        if self._is_closed:
            return
        self._wait()
        if self._holds_other_data:
            settle(self._folder)
            return
        with self._lock:
            unwritten = [entry for entry, _ in self._pending.values()]
        for entry in unwritten:
            self._submit(partial(self._write, entry))
        self._submit(self._list)
        self._wait()

    def close(self) -> None:
        self.flush()  # if that fails nothing is closed, and there is another try
        self._is_closed = True
        self._writer.shutdown()
        self._claim.release()

    def _path(self, entry: Entry) -> Path:
        return self._folder / entry.file_name(SUFFIX)

    def _hold(self, entry: Entry, flat: Flat) -> None:
        slot = self.table.put(flat)
        self._opened[entry.trajectory_id] = slot
        self._index.set_slot(entry.trajectory_id, slot)

    def _submit(self, job: Callable[[], None]) -> None:
        self._writes.append(self._writer.submit(job))

    def _write(self, entry: Entry) -> None:
        if not (self._folder / INDEX).exists():
            self._list()  # so that after a kill the folder can be loaded, with what was not listed yet
        with self._folder_lock:
            with self._lock:
                if entry.trajectory_id not in self._pending:
                    return  # dropped before its turn came, or written when a flush tried again
                _, slot = self._pending[entry.trajectory_id]
                trajectory = self.table.flat(slot).trajectory
            path = self._path(entry)
            sha256 = formats.write(path, trajectory)
            written = open_file(path, entry)
            with self._lock:
                is_wanted = self._pending.pop(entry.trajectory_id, None) is not None
                if is_wanted:
                    self.table.remove(slot)
                    self._sums[entry.trajectory_id] = sha256
                    self._hold(entry, written)
                    self.trim()
                else:
                    self._doomed.append(path)
                self._unlisted += 1
                is_due = self._unlisted > LISTED_SHARE * len(self._sums)
        if is_due:
            self._list()

    def _list(self) -> None:
        """Write the index, then remove the files that it no longer lists."""
        with self._folder_lock:
            with self._lock:
                content, doomed = self._describe(), list(self._doomed)
                self._unlisted = 0
            for name in (METADATA, INDEX):
                files.write_json(self._folder / name, content[name])
            for path in doomed:
                path.unlink(missing_ok=True)
            with self._lock:
                self._doomed = self._doomed[len(doomed) :]

    def _wait(self) -> None:
        wait(list(self._writes))
        self._raise_failures()

    def _raise_failures(self) -> None:
        failures = []
        with self._lock:
            while self._writes and self._writes[0].done():
                failure = self._writes.popleft().exception()
                if failure is not None:
                    failures.append(failure)
        if not failures:
            return
        if not isinstance(failures[0], OSError | NightshiftError):
            raise failures[0]
        raise DataError(
            f"{len(failures)} writes to {self._folder} failed, the first because: {failures[0]}",
            "what was not written is still in memory: remove the cause, and flush() or the next checkpoint writes it",
        ) from failures[0]


def _staged(stage: Path, entry: Entry, origin: TrajectoryBatch | Path) -> Entry:
    path = stage / entry.file_name(SUFFIX)
    if isinstance(origin, Path):
        link(path, origin)
        return replace(entry, sha256=entry.sha256 or files.sha256(path))
    return replace(entry, sha256=formats.write(path, origin))


def _announce_head(path: Path) -> None:
    """Have the operating system read it in the background, while those of other files are read too."""
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, HEAD, os.POSIX_FADV_WILLNEED)
