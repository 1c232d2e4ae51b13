"""The replay buffer: trajectories go in, batches of transitions come out.

One lock guards the index and the open trajectories. It is held while rows are drawn and files opened, not while rows
are copied or files written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nightshift.closing import Closing
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.replay import checkpoint, validation
from nightshift.data.replay.batch import TransitionBatch, TransitionSpec, assemble, gathered
from nightshift.data.replay.buffer_pool import BufferPool
from nightshift.data.replay.disk_storage import OnDiskStorage
from nightshift.data.replay.episodes import files_of_store, trajectory_from_episode
from nightshift.data.replay.index import INDEX, METADATA, OLDEST, TrajectoryEntry, TrajectoryIndex, to_json
from nightshift.data.replay.storage import EpisodeFile, InMemoryStorage, Storage
from nightshift.data.replay.trajectory import NO_ROW, RowIndices, TrajectoryBatch, as_immutable
from nightshift.errors import DataError

SEED = 1234
CACHE_SIZE = 16_384
"""Files that are mapped at a time: a quarter of what Linux allows a process by default (vm.max_map_count)."""


class TrajectoryReplay(Closing):
    """Trajectories [T, B, …], sampled uniformly over transitions, with replacement.

    Example:
        with TrajectoryReplay(sample_window_size=100, auto_save_path=Path("replay")) as replay:
            replay.add_trajectories([trajectory])
            batch = replay.sample(256, n_step=3, discount=0.99)
    """

    def __init__(
        self,
        *,
        seed: int = SEED,
        sample_window_size: int = 0,
        capacity: int = 0,
        cache_size: int = CACHE_SIZE,
        auto_save_path: Path | None = None,
    ) -> None:
        """Sample from the newest `sample_window_size` trajectories and keep the newest `capacity`; 0 means all.

        With `auto_save_path` every trajectory is written to a file in that folder, which no other buffer may use until
        this one is closed. Without it trajectories stay in memory, those of `add_files` in their files, and only a
        checkpoint writes them to disk. At most `cache_size` files are open at a time.
        """
        if min(sample_window_size, capacity) < 0 or cache_size < 1:
            raise DataError(
                f"sample_window_size is {sample_window_size}, capacity {capacity}, cache_size {cache_size}",
                "the first two must be at least 0, the last at least 1",
            )
        self.seed = seed
        self.sample_window_size = sample_window_size
        self.capacity = capacity
        self.auto_save_path = auto_save_path
        self._lock = threading.RLock()
        self._index = TrajectoryIndex()
        self._counter = 0
        self._next_number = 0
        self._is_closed = False
        self._pool = BufferPool()
        self._generator = torch.Generator().manual_seed(seed)
        self._on_disk = (
            None
            if auto_save_path is None
            else OnDiskStorage(auto_save_path, cache_size, self._index, self._lock, self._describe)
        )
        self._in_memory = InMemoryStorage(self._index, cache_size)
        self._storage: Storage = self._on_disk or self._in_memory

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """The number of trajectories."""
        return len(self._index)

    @property
    def total_samples(self) -> int:
        """The number of transitions of all trajectories."""
        return self._index.total_samples

    @property
    def random_state(self) -> bytes:
        """The state of the random generator that draws samples."""
        return self._generator.get_state().numpy().tobytes()

    @random_state.setter
    def random_state(self, state: bytes) -> None:
        try:
            self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"these {len(state)} bytes are not the state of a random generator: {error}") from None

    def is_ready(self, min_samples: int) -> bool:
        return self._index.window_samples(self.sample_window_size) >= min_samples

    def add_trajectories(self, trajectories: Sequence[TrajectoryBatch]) -> list[int]:
        """Store all of them, or none if one is invalid; returns their ids. Evicts the oldest beyond `capacity`."""
        self._check_open()
        self._storage.wait_for_writer()
        for trajectory in trajectories:
            validation.check(trajectory)
        kept = [as_immutable(trajectory) for trajectory in trajectories]
        with self._lock:
            schemas = [validation.schema(trajectory) for trajectory in kept]
            for schema in schemas:
                self._storage.table.check(schema)
                validation.check_schema(schema, schemas[0])
            return [self._add(trajectory) for trajectory in kept]

    def add_episodes(self, episodes: EpisodeStore | Iterable[Episode]) -> list[int]:
        """As `add_trajectories`, of episodes, which this buffer numbers; those of a store stay in its files."""
        if isinstance(episodes, EpisodeStore):
            return self.add_files(files_of_store(episodes, self._reserve_numbers(len(episodes.keys()))))
        listed = list(episodes)
        first = self._reserve_numbers(len(listed))
        return self.add_trajectories([trajectory_from_episode(one, n) for n, one in enumerate(listed, first)])

    def add_files(self, files: Sequence[EpisodeFile]) -> list[int]:
        """As `add_trajectories`, of episodes that stay in their files; each is opened when it is first sampled.

        With `auto_save_path` they are copied to that folder instead.
        """
        self._check_open()
        if self._on_disk is not None:
            return self.add_trajectories([file.read(verify=True) for file in files])
        with self._lock:
            return [self._add_file(file) for file in files]

    def sample(
        self, num_chunks: int, *, frame_stack: int = 1, n_step: int = 1, discount: float | None = None
    ) -> TransitionBatch:
        """`num_chunks` transitions [num_chunks, …] under RLinf's keys, and:

        episode, t   the step of the episode at which the transition begins
        mask         0 exactly where the transition ends in termination
        discounts    the factor for the bootstrapped value: `discount` to the power of the steps it spans

        Observations are [num_chunks, frame_stack, …], oldest first, if `frame_stack` is more than 1; before its start
        an episode repeats its first frame. Rewards are summed over up to `n_step` steps of one episode; `next_obs` and
        the flags are those of the last of these steps.
        """
        return self.source(frame_stack=frame_stack, n_step=n_step, discount=discount).sample(num_chunks)

    def source(self, *, frame_stack: int = 1, n_step: int = 1, discount: float | None = None) -> ReplaySource:
        """This buffer as a source for a `Mixer`; the arguments are those of `sample`."""
        return ReplaySource(self, TransitionSpec(frame_stack=frame_stack, n_step=n_step, discount=discount))

    def clear(self) -> None:
        """Remove all trajectories; their ids are not reused."""
        self._check_open()
        with self._lock:
            while len(self._index):
                self._storage.remove(self._index.pop_oldest())
            self._storage.table.reset()
        self.flush()

    def flush(self) -> None:
        """Wait until all trajectories and the index are on disk."""
        self._storage.flush()

    def close(self) -> None:
        """Flush and release the folder; the buffer can still be sampled."""
        self._storage.close()
        self._is_closed = True

    def save_checkpoint(self, save_path: Path) -> None:
        """Write every trajectory, the index and the state of the random generator to a folder.

        An older checkpoint at that path is replaced; a path that holds anything else is refused.
        """
        if self.auto_save_path is not None and self.auto_save_path.resolve().is_relative_to(save_path.resolve()):
            raise DataError(
                f"{save_path} contains {self.auto_save_path}, the auto_save_path of this buffer",
                "choose another folder",
            )
        checkpoint.check_replaceable(save_path)
        self._storage.flush()
        with self._storage.files_frozen():
            with self._lock:
                exports = [(entry, self._storage.export(entry)) for entry in self._index]
                metadata = self._metadata(list(self._index))
            checkpoint.save(save_path, exports, metadata)

    def load_checkpoint(
        self, load_path: Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Replace the content of the buffer by that of the checkpoint, or by this rank's share of it.

        Only the newest `capacity` trajectories are loaded. Sampling continues from the saved random state; with several
        ranks each derives its own generator from that state and its rank.
        """
        self._check_open()
        if not is_distributed and (local_rank, world_size) != (0, 1):
            raise DataError(
                f"local_rank is {local_rank} of {world_size}, and is_distributed is not set",
                "set is_distributed to load one rank's share, or leave out the rank to load all",
            )
        shard = checkpoint.Shard(local_rank, world_size)
        self._storage.flush()
        saved = checkpoint.load(load_path, shard, self.seed, self.capacity)
        with self._storage.files_frozen(), self._lock:
            metadata = checkpoint.metadata(saved.entries, saved.counter, saved.seed, saved.generator)
            self._storage.replace_all(saved.entries, saved.source, metadata)
            self._counter = saved.counter
            self.seed = saved.seed
            self._generator = saved.generator
        self._storage.flush()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataError("this replay buffer is closed and cannot be changed", "open a new one")

    def _add(self, trajectory: TrajectoryBatch) -> int:
        entry = TrajectoryEntry.of(self._counter, trajectory)
        self._index.append(entry)
        self._storage.put(entry, trajectory)
        return self._count(entry)

    def _reserve_numbers(self, count: int) -> int:
        """The first of `count` episode numbers, which this buffer gives to no other episode."""
        with self._lock:
            first = max(self._next_number, self._counter)
            self._next_number = first + count
            return first

    def _add_file(self, file: EpisodeFile) -> int:
        entry = TrajectoryEntry.of_episode(self._counter, file.num_samples)
        self._index.append(entry)
        self._in_memory.put_file(entry, file)
        return self._count(entry)

    def _count(self, entry: TrajectoryEntry) -> int:
        """Count an entry that was added, and remove the oldest beyond `capacity`."""
        self._counter += 1
        while self.capacity and len(self._index) > self.capacity:
            self._storage.remove(self._index.pop_oldest())
        return entry.trajectory_id

    def _deal(self, num_chunks: int, spec: TransitionSpec) -> TransitionBatch:
        """A batch whose frames are not copied yet (`gather.Rows`)."""
        if num_chunks < 1:
            raise DataError(f"num_chunks is {num_chunks}", "sample at least one transition")
        self._storage.wait_for_writer()
        with self._lock:
            positions, rows = self._draw(num_chunks)
            absent = np.unique(positions[self._index.slots(positions) == NO_ROW])
            if len(absent):
                self._storage.open(self._index[trajectory_id] for trajectory_id in self._index.ids(absent).tolist())
            selection = self._storage.table.select(self._index.slots(positions))
            self._storage.evict()
        return assemble(selection, rows, spec, cold=len(absent) > 0)

    def _draw(self, count: int) -> tuple[RowIndices, RowIndices]:
        available = self._index.window_samples(self.sample_window_size)
        if not available:
            raise DataError("the replay buffer is empty: there is nothing to sample", "add trajectories first")
        samples = torch.randint(0, available, (count,), generator=self._generator).numpy()
        return self._index.locate(samples, self.sample_window_size)

    def _metadata(self, entries: Sequence[TrajectoryEntry]) -> dict[str, Any]:
        return checkpoint.metadata(entries, self._counter, self.seed, self._generator)

    def _describe(self) -> Mapping[str, Any]:
        """The content of the JSON files beside the trajectories; they list only trajectories that are on disk."""
        assert self._on_disk is not None
        with self._lock:
            listed = self._on_disk.entries_on_disk()
            oldest = next((entry.trajectory_id for entry in self._index), self._counter)
            return {METADATA: self._metadata(listed), INDEX: {**to_json(listed), OLDEST: oldest}}


@dataclass(frozen=True)
class ReplaySource:
    """A replay buffer with fixed sampling options, as a source for a `Mixer`."""

    replay: TrajectoryReplay
    spec: TransitionSpec

    @property
    def total_samples(self) -> int:
        return self.replay.total_samples

    def sample(self, count: int, /) -> TransitionBatch:
        return gathered(self.replay._deal(count, self.spec), self.replay._pool)

    @contextlib.contextmanager
    def sampling(self, count: int, /) -> Iterator[TransitionBatch]:
        """A batch with frames as `gather.Rows`; if the block raises, the next batch is the same one."""
        before = self.replay.random_state
        try:
            yield self.replay._deal(count, self.spec)
        except BaseException:
            self.replay.random_state = before
            raise
