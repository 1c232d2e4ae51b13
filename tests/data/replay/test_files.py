"""Episodes that stay in their files: held as views, a bounded number at a time, and read as if they were in memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data.episode_store import EpisodeStore
from nightshift.data.mixer import Mixer
from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay, gather, trajectory_from_episode
from nightshift.data.replay.episodes import StoreFile
from nightshift.errors import DataError
from tests.data.examples import make, with_images
from tests.data.replay.examples import record_opened_files

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed in /proc")


def a_store(folder: Path, count: int = 6, **options: Any) -> EpisodeStore:
    store = EpisodeStore(folder)
    for seed in range(count):
        store.put(f"{seed:03d}", with_images(steps=5 + seed, seed=seed, **options))
    return store


def mappings(folder: Path) -> int:
    gc.collect()
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[name], right[name]) for name in left)
    return np.array_equal(left, right)


def test_episodes_of_a_store_are_sampled_as_if_they_were_in_memory(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    in_memory, in_files = TrajectoryReplay(), TrajectoryReplay(cache_size=2)
    assert in_memory.add_episodes(list(store)) == in_files.add_episodes(store) == list(range(6))
    for _ in range(10):
        view: dict[str, Any] = {"frame_stack": 2, "n_step": 3, "discount": 0.9}
        assert same(in_files.sample(16, **view), in_memory.sample(16, **view))


def test_the_buffer_numbers_episodes_whatever_was_added_before(tmp_path: Path) -> None:
    replay = TrajectoryReplay(capacity=5)
    replay.add_episodes([make(seed=0)])
    store = EpisodeStore(tmp_path)
    for seed in (1, 2):
        store.put(f"{seed}", make(seed=seed))
    replay.add_episodes(store)
    replay.add_episodes(make(seed=seed) for seed in range(3, 6))
    assert sorted(set(replay.sample(200)["episode"].tolist())) == [1, 2, 3, 4, 5]


def test_pictures_in_files_are_not_copied_into_memory(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.put("a", with_images(steps=50, size=256))
    pictures = sum(column.nbytes for column in store.get("a").observations.values())
    for added in (store, [store.get("a")]):
        replay = TrajectoryReplay()
        tracemalloc.start()
        replay.add_episodes(added)
        replay.sample(1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert pictures > 19_000_000
        assert peak < pictures / 5


@linux_only
def test_at_most_cache_size_files_are_mapped_however_many_are_sampled(tmp_path: Path) -> None:
    replay = TrajectoryReplay(cache_size=3)
    replay.add_episodes(a_store(tmp_path, 12))
    seen = set()
    for _ in range(4):
        seen |= set(replay.sample(40)["episode"].tolist())
        assert mappings(tmp_path) <= 3
    assert seen == set(range(12))


@linux_only
def test_what_falls_out_of_the_capacity_is_let_go_of(tmp_path: Path) -> None:
    gc.freeze()  # what there was before: every collection would look at it
    replay = TrajectoryReplay(capacity=2)
    store = a_store(tmp_path, 6)
    for episode in store:
        replay.add_episodes([episode])
        del episode
        replay.sample(20)
        assert mappings(tmp_path) <= 2
    replay.add_episodes(store)
    replay.sample(50)
    assert (len(replay), mappings(tmp_path)) == (2, 2)


def test_a_file_is_mapped_once_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = TrajectoryReplay()
    replay.add_episodes(a_store(tmp_path, 4))
    opened = record_opened_files(monkeypatch)
    for _ in range(20):
        replay.sample(30)
    assert sorted(path.name for path in opened) == [f"{seed:03d}.safetensors" for seed in range(4)]


def test_the_whole_of_a_file_is_checked_when_it_is_first_opened_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []
    read = StoreFile.read

    def record(file: StoreFile, *, verify: bool) -> TrajectoryBatch:
        checked.append(verify)
        return read(file, verify=verify)

    monkeypatch.setattr(StoreFile, "read", record)
    replay = TrajectoryReplay(cache_size=1)
    replay.add_episodes(a_store(tmp_path, 3))
    for _ in range(10):
        replay.sample(20)
    assert checked.count(True) == 3
    assert checked.count(False) > 3


def test_a_file_that_is_gone_or_shorter_is_named(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1)
    replay = TrajectoryReplay(cache_size=1)
    replay.add_episodes(store)
    other = EpisodeStore(tmp_path / "other")
    other.put("a", with_images(steps=3))
    other.path("a").replace(store.path("000"))
    with pytest.raises(DataError, match="episode 0 has 2 transitions, and 4 when it was added"):
        replay.sample(4)
    store.path("000").unlink()
    with pytest.raises(DataError, match=r"000\.safetensors is missing"):
        replay.sample(4)


def test_a_checkpoint_holds_episodes_of_files(tmp_path: Path) -> None:
    replay = TrajectoryReplay()
    replay.add_episodes(a_store(tmp_path / "store", 3))
    replay.save_checkpoint(tmp_path / "saved")
    again = TrajectoryReplay()
    again.load_checkpoint(tmp_path / "saved")
    assert same(again.sample(20), replay.sample(20))
    with TrajectoryReplay(auto_save_path=tmp_path / "auto") as on_disk:
        on_disk.add_episodes(EpisodeStore(tmp_path / "store"))
        on_disk.flush()
        assert len(list((tmp_path / "auto").glob("trajectory_*"))) == 3 + 1  # and the index


def mix(*, frame_stack: int) -> tuple[Mixer, TrajectoryReplay, TrajectoryReplay]:
    online, demos = TrajectoryReplay(seed=1), TrajectoryReplay(seed=2)
    online.add_episodes([with_images(seed=1), with_images(seed=2)])
    demos.add_trajectories([trajectory_from_episode(with_images(seed=3), 77)])
    sources = {"online": online.source(frame_stack=frame_stack), "demos": demos.source(frame_stack=frame_stack)}
    return Mixer(sources, {"online": 0.75, "demos": 0.25}), online, demos


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_a_mixed_batch_has_the_rows_that_its_sources_deal(frame_stack: int) -> None:
    mixer, _, _ = mix(frame_stack=frame_stack)
    _, online, demos = mix(frame_stack=frame_stack)
    for _ in range(3):
        batch = mixer.sample(16, num_batches=2)
        for index, (replay, count) in enumerate(((online, 24), (demos, 8))):
            rows = batch["source"] == index
            alone = replay.sample(count, frame_stack=frame_stack)
            for key in ("curr_obs", "next_obs"):
                for name in alone[key]:
                    np.testing.assert_array_equal(batch[key][name][rows], alone[key][name])
            np.testing.assert_array_equal(batch["actions"][rows], alone["actions"])


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_a_source_in_memory_mixes_with_a_replay(frame_stack: int) -> None:
    _, online, demos = mix(frame_stack=frame_stack)

    class Plain:
        def sample(self, count: int, /) -> dict[str, Any]:
            return demos.sample(count, frame_stack=frame_stack)

    mixer = Mixer({"online": online.source(frame_stack=frame_stack), "demos": Plain()}, {"online": 0.5, "demos": 0.5})
    batch = mixer.sample(12)
    _, _, again = mix(frame_stack=frame_stack)
    wanted = again.sample(6, frame_stack=frame_stack)
    for name in wanted["next_obs"]:
        np.testing.assert_array_equal(batch["next_obs"][name][batch["source"] == 1], wanted["next_obs"][name])


def test_a_mixed_batch_copies_every_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight from the memory of its source to its place in the batch."""
    copied: list[Any] = []
    copy = gather.gather

    def record(sources: gather.Addresses, out: Any) -> None:
        copied.append(out)
        copy(sources, out)

    monkeypatch.setattr(gather, "gather", record)
    mixer, _, _ = mix(frame_stack=1)
    batch = mixer.sample(64)
    frames = [frames for key in ("curr_obs", "next_obs") for frames in batch[key].values()]
    assert len(frames) == 8
    assert sum(out.nbytes for out in copied) == sum(array.nbytes for array in frames)
    assert all(any(np.shares_memory(array, out) for out in copied) for array in frames)


def test_a_batch_that_never_came_is_drawn_again() -> None:
    mixer, online, _ = mix(frame_stack=1)
    _, alone, _ = mix(frame_stack=1)
    demos = mixer._sources[1]
    broken = Mixer({"online": online.source(), "demos": Broken()}, {"online": 0.75, "demos": 0.25})
    with pytest.raises(TimeoutError):
        broken.sample(16)
    batch = Mixer({"online": online.source(), "demos": demos}, {"online": 0.75, "demos": 0.25}).sample(16)
    assert np.array_equal(batch["actions"][batch["source"] == 0], alone.sample(12)["actions"])


class Broken:
    def sample(self, count: int, /) -> dict[str, Any]:
        raise TimeoutError(f"no batch of {count}")
