"""Trajectories in files, written by a background thread.

    put ──▶ pending (in memory) ──▶ writer thread: file, fsync ──▶ open files, at most `cache_size`, first in first out
                                          └─ failure: stays in memory, the next call raises it, flush retries

Open files are memory-mapped, so the page cache holds what is used and the operating system can reclaim it.
Sampling reads only the rows that it needs and does not verify the sha256 of files. That is verified before a file goes
into a checkpoint, and when a folder is loaded.
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
from nightshift.data.replay import trajectory_file
from nightshift.data.replay.address_table import AddressTable, FlatTrajectory
from nightshift.data.replay.index import INDEX, METADATA, OLDEST, TrajectoryEntry, TrajectoryIndex, to_json
from nightshift.data.replay.staging import commit_staged, link, link_checked, stage_files
from nightshift.data.replay.storage import OpenFiles, TrajectoryExport, TrajectoryLoader, open_file
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError
from nightshift.project.locks import Claim

HEADER_BYTES = 64 * 1024
"""Read-ahead at the start of a file: the header and all arrays but images, for trajectories of typical length."""
MAX_PENDING_WRITES = 64
"""`add_trajectories` blocks while more trajectories than this are waiting for the writer."""
INDEX_REWRITE_SHARE = 0.01
"""The index file is rewritten once this share of it is out of date, so its cost per trajectory is constant."""


class OnDiskStorage:
    """A `Storage` with a file per trajectory in a folder, and an index that lists only existing files.

    The index is written after the files and may lag behind them; see `OLDEST` for how unlisted files are recovered.
    """

    def __init__(
        self,
        folder: Path,
        cache_size: int,
        index: TrajectoryIndex,
        lock: threading.RLock,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`lock` is the buffer's lock. The writer thread calls `describe` for the content of the JSON files."""
        self.table = AddressTable()
        self._folder = folder
        self._cache_size = cache_size
        self._index = index
        self._lock = lock
        self._describe = describe
        self._pending: dict[int, tuple[TrajectoryEntry, int]] = {}  # by id: not written yet, with their slots
        self._open = OpenFiles(self.table, index, cache_size)
        self._sums: dict[int, str] = {}  # by id: sha256 of existing files
        self._to_delete: list[Path] = []  # files to delete once the index on disk no longer lists them
        self._unlisted = 0  # changes since the index was written
        self._is_closed = False
        self._folder_lock = threading.Lock()  # always acquired before the buffer's lock
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay-writer")
        self._writes: deque[Future[None]] = deque()
        self._claim = Claim(folder, DataError)
        files.sweep_temporaries(folder)
        commit_staged(folder)
        self._holds_other_data = (folder / INDEX).exists()

    def put(self, entry: TrajectoryEntry, trajectory: TrajectoryBatch) -> None:
        slot = self.table.put(FlatTrajectory(trajectory))
        self._pending[entry.trajectory_id] = (entry, slot)
        self._index.set_slot(entry.trajectory_id, slot)
        self._submit(partial(self._write, entry))

    def open(self, entries: Iterable[TrajectoryEntry]) -> None:
        entries = list(entries)
        for entry in entries:
            _prefetch_header(self._path(entry))
        for entry in entries:
            self._open.add(entry.trajectory_id, open_file(self._path(entry), entry))

    def evict(self) -> None:
        self._open.evict()

    def remove(self, entry: TrajectoryEntry) -> None:
        trajectory_id = entry.trajectory_id
        if trajectory_id in self._pending:
            self.table.remove(self._pending.pop(trajectory_id)[1])
        self._open.close(trajectory_id)
        if self._sums.pop(trajectory_id, None):
            self._to_delete.append(self._path(entry))
        self._unlisted += 1

    def export(self, entry: TrajectoryEntry) -> TrajectoryExport:
        if entry.trajectory_id in self._pending:
            _, slot = self._pending[entry.trajectory_id]
            return partial(trajectory_file.write, trajectory=self.table.flat(slot).trajectory)
        return partial(link_checked, source=self._path(entry), sha256=self._sums[entry.trajectory_id])

    def entries_on_disk(self) -> list[TrajectoryEntry]:
        """Trajectories whose files exist, with their sha256."""
        sums = self._sums
        return [replace(e, sha256=sums[e.trajectory_id]) for e in self._index if e.trajectory_id in sums]

    def replace_all(
        self, entries: Sequence[TrajectoryEntry], source: TrajectoryLoader, metadata: Mapping[str, Any]
    ) -> None:
        with stage_files(self._folder) as stage:
            listed = [_stage_entry(stage, entry, source(entry)) for entry in entries]
            files.write_json(stage / METADATA, metadata)
            oldest = entries[0].trajectory_id if entries else metadata["trajectory_counter"]
            files.write_json(stage / INDEX, {**to_json(listed), OLDEST: oldest})
        self._holds_other_data = True  # if the commit fails, loading the folder again completes it
        commit_staged(self._folder)
        self._holds_other_data = False
        self.table, self._pending, self._to_delete = AddressTable(), {}, []
        self._open = OpenFiles(self.table, self._index, self._cache_size)
        self._sums = {entry.trajectory_id: entry.sha256 for entry in listed}
        self._index.reset(entries)
        self.open(entries[:1])  # sets the schema for trajectories that are added next

    def files_frozen(self) -> contextlib.AbstractContextManager[Any]:
        return self._folder_lock

    def wait_for_writer(self) -> None:
        if self._holds_other_data:
            raise DataError(
                f"{self._folder} contains the trajectories of an earlier buffer",
                "load them with load_checkpoint, or choose another folder",
            )
        while len(self._writes) > MAX_PENDING_WRITES:
            wait(list(self._writes)[:1])
            self._raise_failures()
        self._raise_failures()

    def flush(self) -> None:
        if self._is_closed:
            return
        self._wait()
        if self._holds_other_data:
            commit_staged(self._folder)
            return
        with self._lock:
            unwritten = [entry for entry, _ in self._pending.values()]
        for entry in unwritten:
            self._submit(partial(self._write, entry))
        self._submit(self._write_index)
        self._wait()

    def close(self) -> None:
        self.flush()  # if this raises, the storage stays open and close() can be retried
        self._is_closed = True
        self._writer.shutdown()
        self._claim.release()

    def _path(self, entry: TrajectoryEntry) -> Path:
        return self._folder / entry.file_name(SUFFIX)

    def _submit(self, job: Callable[[], None]) -> None:
        self._writes.append(self._writer.submit(job))

    def _write(self, entry: TrajectoryEntry) -> None:
        if not (self._folder / INDEX).exists():
            self._write_index()  # a folder with an index can be loaded after a kill, with its unlisted files
        with self._folder_lock:
            with self._lock:
                if entry.trajectory_id not in self._pending:
                    return  # removed before it was written, or already written by a retry
                _, slot = self._pending[entry.trajectory_id]
                trajectory = self.table.flat(slot).trajectory
            path = self._path(entry)
            sha256 = trajectory_file.write(path, trajectory)
            written = open_file(path, entry)
            with self._lock:
                is_wanted = self._pending.pop(entry.trajectory_id, None) is not None
                if is_wanted:
                    self.table.remove(slot)
                    self._sums[entry.trajectory_id] = sha256
                    self._open.add(entry.trajectory_id, written)
                    self.evict()
                else:
                    self._to_delete.append(path)
                self._unlisted += 1
                is_due = self._unlisted > INDEX_REWRITE_SHARE * len(self._sums)
        if is_due:
            self._write_index()

    def _write_index(self) -> None:
        """Write the index, then delete the files that it no longer lists."""
        with self._folder_lock:
            with self._lock:
                content, to_delete = self._describe(), list(self._to_delete)
                self._unlisted = 0
            for name in (METADATA, INDEX):
                files.write_json(self._folder / name, content[name])
            for path in to_delete:
                path.unlink(missing_ok=True)
            with self._lock:
                self._to_delete = self._to_delete[len(to_delete) :]

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
            "these trajectories are still in memory: fix the cause, then flush() or the next checkpoint writes them",
        ) from failures[0]


def _stage_entry(stage: Path, entry: TrajectoryEntry, origin: TrajectoryBatch | Path) -> TrajectoryEntry:
    path = stage / entry.file_name(SUFFIX)
    if isinstance(origin, Path):
        link(path, origin)
        return replace(entry, sha256=entry.sha256 or files.sha256(path))
    return replace(entry, sha256=trajectory_file.write(path, origin))


def _prefetch_header(path: Path) -> None:
    """Let the operating system read the start of the file in the background, in parallel with other files."""
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, HEADER_BYTES, os.POSIX_FADV_WILLNEED)
