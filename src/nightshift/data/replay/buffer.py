"""The replay buffer: trajectories go in, batches of transitions come out.

One lock guards the index and what is open; it is held while rows are drawn and files opened, not while rows are copied
or files written. See `keeping` for what runs behind.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nightshift.data.replay import checkpoint, checks
from nightshift.data.replay.batch import Batch, View, assemble
from nightshift.data.replay.disk import OnDisk
from nightshift.data.replay.index import INDEX, METADATA, OLDEST, Entry, Index, to_json
from nightshift.data.replay.keeping import InMemory, Keeping
from nightshift.data.replay.recycling import Recycler
from nightshift.data.replay.trajectory import NONE, Rows, TrajectoryBatch, own
from nightshift.errors import DataError

SEED = 1234
CACHE_SIZE = 1024


class TrajectoryReplay:
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

        With `auto_save_path` every trajectory goes to a file there, and at most `cache_size` are open at a time;
        until it is closed no other buffer may have that folder. Without it all are in memory until a checkpoint.
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
        self._index = Index()
        self._counter = 0
        self._is_closed = False
        self._recycler = Recycler()
        self._generator = torch.Generator().manual_seed(seed)
        self._on_disk = (
            None
            if auto_save_path is None
            else OnDisk(auto_save_path, cache_size, self._index, self._lock, self._describe)
        )
        self._keeping: Keeping = self._on_disk or InMemory(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __enter__(self) -> TrajectoryReplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Trajectories."""
        return len(self._index)

    @property
    def total_samples(self) -> int:
        """Transitions of all trajectories."""
        return self._index.total_samples

    @property
    def random_state(self) -> bytes:
        """Where the draws stand; set it to draw on from there."""
        return self._generator.get_state().numpy().tobytes()

    @random_state.setter
    def random_state(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def is_ready(self, min_samples: int) -> bool:
        return self._index.window_samples(self.sample_window_size) >= min_samples

    def add_trajectories(self, trajectories: Sequence[TrajectoryBatch]) -> list[int]:
        """Store all of them or, with an error, none; their ids. The oldest go where there is no more room."""
        self._check_open()
        self._keeping.keep_up()
        for trajectory in trajectories:
            checks.check(trajectory)
        kept = [own(trajectory) for trajectory in trajectories]
        with self._lock:
            forms = [checks.schema(trajectory) for trajectory in kept]
            for form in forms:
                self._keeping.table.check(form)
                checks.check_schema(form, forms[0])
            return [self._add(trajectory) for trajectory in kept]

    def sample(self, num_chunks: int, *, stack: int = 1, n_step: int = 1, discount: float | None = None) -> Batch:
        """`num_chunks` transitions [num_chunks, …] under the rollout's keys, and:

        episode, t   which step of which episode
        mask         0 exactly where the transition ends in termination
        discounts    of what comes after it: `discount` to the power of the steps it spans

        Observations are [num_chunks, stack, …] if `stack` is more than 1, oldest first; an episode's first frame stands
        in for those before it. Rewards are summed over up to `n_step` steps of the same episode, and `next_obs` and
        the flags are those of the last one.
        """
        return self._sample(num_chunks, View(stack=stack, n_step=n_step, discount=discount))

    def source(self, *, stack: int = 1, n_step: int = 1, discount: float | None = None) -> ReplaySource:
        """This buffer as a source for a `Mixer`, sampled in one way; the arguments are those of `sample`."""
        return ReplaySource(self, View(stack=stack, n_step=n_step, discount=discount))

    def clear(self) -> None:
        """Forget all trajectories; numbers that were given out are not given again."""
        self._check_open()
        with self._lock:
            while len(self._index):
                self._keeping.drop(self._index.pop_oldest())
            self._keeping.table.reset()
        self.flush()

    def flush(self) -> None:
        """Wait until all is written that is to be written."""
        self._keeping.flush()

    def close(self) -> None:
        """Write what is left and stop; what is there can still be sampled."""
        self._keeping.close()
        self._is_closed = True

    def save_checkpoint(self, save_path: Path) -> None:
        """A folder that holds every trajectory, the index, and where the random draws stand.

        It takes the place of an older checkpoint; anything else that is there is left, and refused.
        """
        if self.auto_save_path is not None and self.auto_save_path.resolve().is_relative_to(save_path.resolve()):
            raise DataError(
                f"{save_path} holds {self.auto_save_path}, where this buffer saves by itself", "choose another folder"
            )
        checkpoint.check_replaceable(save_path)
        self._keeping.flush()
        with self._keeping.steady():
            with self._lock:
                exports = [(entry, self._keeping.export(entry)) for entry in self._index]
                metadata = self._metadata(list(self._index))
            checkpoint.save(save_path, exports, metadata)

    def load_checkpoint(
        self, load_path: Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Hold what the checkpoint holds, or this rank's share of it, in place of all there was.

        The newest `capacity` of these are kept. Draws go on where they stood; of several ranks each goes on in a way of
        its own, which follows from where they stood and from its rank.
        """
        self._check_open()
        if not is_distributed and (local_rank, world_size) != (0, 1):
            raise DataError(
                f"local_rank is {local_rank} of {world_size}, and is_distributed is not set",
                "set it to load one rank's share, or name no rank to load all",
            )
        shard = checkpoint.Shard(local_rank, world_size)
        self._keeping.flush()
        saved = checkpoint.load(load_path, shard, self.seed, self.capacity)
        with self._keeping.steady(), self._lock:
            metadata = checkpoint.metadata(saved.entries, saved.counter, saved.seed, saved.generator)
            self._keeping.adopt(saved.entries, saved.source, metadata)
            self._counter = saved.counter
            self.seed = saved.seed
            self._generator = saved.generator
        self._keeping.flush()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataError("this replay buffer is closed: it does not change any more", "use an open one")

    def _add(self, trajectory: TrajectoryBatch) -> int:
        entry = Entry.of(self._counter, trajectory)
        self._index.append(entry)
        self._keeping.put(entry, trajectory)
        self._counter += 1
        while self.capacity and len(self._index) > self.capacity:
            self._keeping.drop(self._index.pop_oldest())
        return entry.trajectory_id

    def _sample(self, num_chunks: int, view: View) -> Batch:
        if num_chunks < 1:
            raise DataError(f"a batch of {num_chunks} samples was asked for", "ask for at least one")
        self._keeping.keep_up()
        with self._lock:
            positions, rows = self._draw(num_chunks)
            absent = np.unique(positions[self._index.slots(positions) == NONE])
            if len(absent):
                self._keeping.open(self._index[trajectory_id] for trajectory_id in self._index.ids(absent).tolist())
            selection = self._keeping.table.select(self._index.slots(positions))
            self._keeping.trim()
        return assemble(selection, rows, view, self._recycler, cold=len(absent) > 0)

    def _draw(self, count: int) -> tuple[Rows, Rows]:
        available = self._index.window_samples(self.sample_window_size)
        if not available:
            raise DataError("the replay buffer is empty: there is nothing to sample", "add trajectories first")
        samples = torch.randint(0, available, (count,), generator=self._generator).numpy()
        return self._index.locate(samples, self.sample_window_size)

    def _metadata(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return checkpoint.metadata(entries, self._counter, self.seed, self._generator)

    def _describe(self) -> Mapping[str, Any]:
        """The JSON files beside the data: they list what is on disk."""
        assert self._on_disk is not None
        with self._lock:
            listed = self._on_disk.listed()
            oldest = next((entry.trajectory_id for entry in self._index), self._counter)
            return {METADATA: self._metadata(listed), INDEX: {**to_json(listed), OLDEST: oldest}}


@dataclass(frozen=True)
class ReplaySource:
    """A buffer, sampled in one way."""

    replay: TrajectoryReplay
    view: View

    @property
    def total_samples(self) -> int:
        return self.replay.total_samples

    def sample(self, count: int, /) -> Batch:
        return self.replay._sample(count, self.view)
