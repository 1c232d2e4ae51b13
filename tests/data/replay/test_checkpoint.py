from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data.replay import TrajectoryReplay
from nightshift.errors import DataError
from tests.data.replay.examples import plain

PLACES = ["memory", "disk"]


def buffer(where: str, folder: Path, **options: Any) -> TrajectoryReplay:
    return TrajectoryReplay(auto_save_path=folder if where == "disk" else None, **options)


def uids(replay: TrajectoryReplay) -> list[int]:
    """Which trajectories can really be sampled."""
    return sorted(set(replay.sample(200)["versions"].tolist()))


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("drawn", [0, 3])
def test_samples_after_a_load_equal_those_of_an_uninterrupted_run(
    where: str, target: str, drawn: int, tmp_path: Path
) -> None:
    """Whether or not anything was ever sampled, evicted, or lies outside the window."""
    replay = buffer(where, tmp_path / "live", sample_window_size=2, capacity=4)
    replay.add_trajectories([plain(uid) for uid in range(6)])
    for _ in range(drawn):
        replay.sample(5)
    replay.save_checkpoint(tmp_path / "checkpoint")
    loaded = buffer(target, tmp_path / "other", sample_window_size=2)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert (len(loaded), loaded.total_samples) == (4, 32)
    for _ in range(3):
        left, right = replay.sample(16, frame_stack=2), loaded.sample(16, frame_stack=2)
        assert left["versions"].tolist() == right["versions"].tolist()
        assert np.array_equal(left["next_obs"]["image"], right["next_obs"]["image"])
    assert replay.add_trajectories([plain(9)]) == loaded.add_trajectories([plain(9)]) == [6]
    loaded.sample_window_size = 0
    assert uids(loaded) == [2, 3, 4, 5, 9]
    loaded.close()
    replay.close()


@pytest.mark.parametrize("where", PLACES)
def test_loading_into_a_used_buffer_replaces_it(where: str, tmp_path: Path) -> None:
    with buffer("memory", tmp_path) as saved:
        saved.add_trajectories([plain(7), plain(8)])
        saved.save_checkpoint(tmp_path / "checkpoint")
    with buffer(where, tmp_path / "live") as replay:
        replay.add_trajectories([plain(uid) for uid in range(5)])
        replay.sample(3)
        replay.load_checkpoint(tmp_path / "checkpoint")
        assert uids(replay) == [7, 8] and (len(replay), replay.total_samples) == (2, 16)
    if where == "disk":
        assert len(list((tmp_path / "live").glob("trajectory_*.safetensors"))) == 2


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("count", "world"), [(0, 2), (1, 1), (2, 3), (7, 3)])
def test_ranks_share_the_trajectories_in_order_and_the_first_get_one_more(
    where: str, tmp_path: Path, count: int, world: int
) -> None:
    with buffer(where, tmp_path / "live") as replay:
        replay.add_trajectories([plain(uid) for uid in range(count)])
        replay.save_checkpoint(tmp_path / "checkpoint")
    found: list[list[int]] = []
    for rank in range(world):
        with buffer(where, tmp_path / f"rank_{rank}") as loaded:
            loaded.load_checkpoint(tmp_path / "checkpoint", is_distributed=True, local_rank=rank, world_size=world)
            found.append(uids(loaded) if len(loaded) else [])
            assert len(loaded) == len(found[-1]) and loaded.total_samples == 8 * len(loaded)
            assert loaded.add_trajectories([plain(99)]) == [count]
    assert [uid for part in found for uid in part] == list(range(count))
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_five_over_two_ranks_are_three_and_two(tmp_path: Path) -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(uid) for uid in range(5)])
    replay.save_checkpoint(tmp_path / "c")
    for rank, expected in ((0, [0, 1, 2]), (1, [3, 4])):
        replay.load_checkpoint(tmp_path / "c", True, rank, 2)
        assert uids(replay) == expected
    with pytest.raises(DataError, match="local_rank is 2"):
        replay.load_checkpoint(tmp_path / "c", True, 2, 2)


def test_a_rank_without_distribution_is_not_ignored(tmp_path: Path) -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(0)])
    replay.save_checkpoint(tmp_path / "c")
    for rank, world_size in ((3, 1), (0, 4)):
        with pytest.raises(DataError, match=f"local_rank is {rank} of {world_size}, and is_distributed is not set"):
            replay.load_checkpoint(tmp_path / "c", local_rank=rank, world_size=world_size)


def test_ranks_sample_differently_and_each_repeats_after_every_load(tmp_path: Path) -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(uid, length=50) for uid in range(4)])
    replay.save_checkpoint(tmp_path / "c")
    drawn = []
    for rank in (0, 1, 0, 1):
        replay.load_checkpoint(tmp_path / "c", True, rank, 2)
        drawn.append(replay.sample(50)["t"].tolist())
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


@pytest.mark.parametrize("where", PLACES)
def test_a_load_keeps_to_the_capacity(where: str, tmp_path: Path) -> None:
    with TrajectoryReplay() as saved:
        saved.add_trajectories([plain(uid) for uid in range(5)])
        saved.save_checkpoint(tmp_path / "c")
    with buffer(where, tmp_path / "live", capacity=2) as replay:
        replay.load_checkpoint(tmp_path / "c")
        assert uids(replay) == [3, 4] and (len(replay), replay.total_samples) == (2, 16)
        assert replay.add_trajectories([plain(9)]) == [5] and uids(replay) == [4, 9]


def test_a_checkpoint_lists_every_file_with_its_fields(tmp_path: Path) -> None:
    replay = TrajectoryReplay(seed=5)
    replay.add_trajectories([plain(uid) for uid in range(3)])
    replay.save_checkpoint(tmp_path / "c")
    metadata = json.loads((tmp_path / "c/metadata.json").read_text())
    wanted = {"trajectory_format": "safetensors", "size": 3, "total_samples": 24, "trajectory_counter": 3, "seed": 5}
    assert {key: metadata[key] for key in wanted} == wanted
    index = json.loads((tmp_path / "c/trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == [0, 1, 2]
    entry = index["trajectory_index"]["1"]
    assert entry["num_samples"] == 8 and entry["shape"] == [4, 2] and entry["max_episode_length"] == 4
    assert (tmp_path / f"c/trajectory_1_{entry['model_weights_id']}.safetensors").is_file()
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())["sha256"]
    assert set(manifest) == {path.name for path in (tmp_path / "c").iterdir()} - {"manifest.json"}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("damage", ["cut", "flipped", "removed"])
def test_damage_to_any_file_is_found_and_the_file_named_and_the_buffer_stays(
    damage: str, where: str, tmp_path: Path
) -> None:
    with buffer(where, tmp_path / "live") as replay:
        replay.add_trajectories([plain(uid) for uid in range(2)])
        replay.save_checkpoint(tmp_path / "c")
        for path in sorted((tmp_path / "c").iterdir()):
            if path.name == "manifest.json":
                continue
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "c", copy)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            target = copy / path.name
            target.write_bytes(content if damage == "flipped" else content[:-1])
            if damage == "removed":
                target.unlink()
            with pytest.raises(DataError, match=path.name):
                replay.load_checkpoint(copy)
            assert uids(replay) == [0, 1]
            shutil.rmtree(copy)


@pytest.mark.parametrize("where", PLACES)
def test_a_checkpoint_takes_the_place_of_nothing_but_a_checkpoint(where: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with buffer(where, tmp_path / "around" / "live") as replay, buffer("disk", tmp_path / "external") as external:
        for some in (replay, external):
            some.add_trajectories([plain(0)])
            some.flush()
        for place in (mine, mine / "thesis.txt", tmp_path / "external"):
            with pytest.raises(DataError, match="is not a replay checkpoint"):
                replay.save_checkpoint(place)
        if where == "disk":
            for place in (tmp_path / "around" / "live", tmp_path / "around"):
                with pytest.raises(DataError, match="the auto_save_path of this buffer"):
                    replay.save_checkpoint(place)
        (tmp_path / "empty").mkdir()
        replay.save_checkpoint(tmp_path / "empty")
        replay.save_checkpoint(tmp_path / "empty")
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_file_that_was_damaged_does_not_go_into_a_checkpoint(tmp_path: Path) -> None:
    with buffer("disk", tmp_path / "live") as replay:
        replay.add_trajectories([plain(0), plain(1)])
        replay.save_checkpoint(tmp_path / "c")
        replay.add_trajectories([plain(2)])
        replay.flush()
        victim = next((tmp_path / "live").glob("trajectory_2_*"))
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        with pytest.raises(DataError, match=f"{victim.name} is damaged"):
            replay.save_checkpoint(tmp_path / "c")
    loaded = TrajectoryReplay()
    loaded.load_checkpoint(tmp_path / "c")
    assert uids(loaded) == [0, 1]


def test_a_checkpoint_outlives_the_files_it_was_made_from(tmp_path: Path) -> None:
    """Files are linked, not copied: removing, evicting or replacing the first name must not touch the second."""
    with buffer("disk", tmp_path / "live", capacity=2) as replay:
        replay.add_trajectories([plain(0), plain(1)])
        replay.save_checkpoint(tmp_path / "c")
        linked = next((tmp_path / "c").glob("trajectory_0_*"))
        assert linked.samefile(tmp_path / "live" / linked.name)
        replay.add_trajectories([plain(2), plain(3)])
        replay.flush()
        assert len(list((tmp_path / "live").glob("trajectory_*.safetensors"))) == 2
    shutil.rmtree(tmp_path / "live")
    loaded = TrajectoryReplay()
    loaded.load_checkpoint(tmp_path / "c")
    assert uids(loaded) == [0, 1]


@pytest.mark.parametrize("where", PLACES)
def test_a_buffer_outlives_the_checkpoint_it_was_loaded_from(where: str, tmp_path: Path) -> None:
    with TrajectoryReplay() as saved:
        saved.add_trajectories([plain(uid) for uid in range(3)])
        saved.save_checkpoint(tmp_path / "c")
    with buffer(where, tmp_path / "live", cache_size=1) as replay:
        replay.load_checkpoint(tmp_path / "c")
        shutil.rmtree(tmp_path / "c")
        assert uids(replay) == [0, 1, 2]
        replay.save_checkpoint(tmp_path / "c")
    with buffer(where, tmp_path / "again") as loaded:
        loaded.load_checkpoint(tmp_path / "c")
        assert uids(loaded) == [0, 1, 2]


def test_a_closed_folder_can_be_loaded_by_another_buffer(tmp_path: Path) -> None:
    with buffer("disk", tmp_path / "live") as replay:
        replay.add_trajectories([plain(uid) for uid in range(3)])
    with buffer("disk", tmp_path / "live") as again:
        with pytest.raises(DataError, match="earlier buffer"):
            again.add_trajectories([plain(9)])
        again.load_checkpoint(tmp_path / "live")
        again.add_trajectories([plain(9)])
        assert uids(again) == [0, 1, 2, 9]
    with pytest.raises(DataError, match="the auto_save_path of this buffer"):
        again.save_checkpoint(tmp_path / "live")


def test_a_folder_belongs_to_one_buffer_at_a_time(tmp_path: Path) -> None:
    live = tmp_path / "live"
    with buffer("disk", live) as replay:
        replay.add_trajectories([plain(0)])
        with pytest.raises(DataError, match=f"live is in use by process {os.getpid()}"):
            buffer("disk", live)
        replay.add_trajectories([plain(1)])
    with buffer("disk", live) as again:
        again.load_checkpoint(live)
        assert uids(again) == [0, 1]


def test_a_folder_is_unlocked_when_its_buffer_is_garbage_collected(tmp_path: Path) -> None:
    buffer("disk", tmp_path / "live")
    gc.collect()
    buffer("disk", tmp_path / "live").close()


def test_a_write_that_fails_is_raised_and_nothing_is_lost(tmp_path: Path) -> None:
    live = tmp_path / "live"
    replay = buffer("disk", live)
    replay.add_trajectories([plain(0)])
    replay.flush()
    live.rename(tmp_path / "away")
    live.write_text("in the way")
    replay.add_trajectories([plain(1)])
    with pytest.raises(DataError, match=r"writes to .* failed"):
        replay.flush()
    replay.add_trajectories([plain(2)])
    _wait_for_failure(replay)
    live.unlink()
    (tmp_path / "away").rename(live)
    replay.save_checkpoint(tmp_path / "c")  # tries again by itself
    assert uids(replay) == [0, 1, 2]
    assert len(list(live.glob("trajectory_*.safetensors"))) == 3
    replay.close()
    loaded = TrajectoryReplay()
    loaded.load_checkpoint(tmp_path / "c")
    assert uids(loaded) == [0, 1, 2]


def _wait_for_failure(replay: TrajectoryReplay) -> None:
    """The next call after the write has failed raises, whatever call it is."""
    for _ in range(1000):
        try:
            replay.sample(1)
        except DataError as error:
            assert "failed" in str(error)
            return
        time.sleep(0.01)
    pytest.fail("the failed write was never raised")


@pytest.mark.parametrize("call", ["add", "sample", "flush", "save", "close"])
def test_a_failed_write_reaches_every_call(call: str, tmp_path: Path) -> None:
    live = tmp_path / "live"
    replay = buffer("disk", live)
    shutil.rmtree(live)
    live.write_text("in the way")
    replay.add_trajectories([plain(0)])
    assert replay._on_disk is not None
    replay._on_disk._writes[0].exception()
    calls = {
        "add": lambda: replay.add_trajectories([plain(1)]),
        "sample": lambda: replay.sample(1),
        "flush": replay.flush,
        "save": lambda: replay.save_checkpoint(tmp_path / "c"),
        "close": replay.close,
    }
    with pytest.raises(DataError, match=r"1 writes to .*live failed"):
        calls[call]()
    assert not (tmp_path / "c").exists()
    live.unlink()
    replay.close()
    assert len(list(live.glob("trajectory_0_*.safetensors"))) == 1


@contextlib.contextmanager
def no_room(most_bytes: int = 1000) -> Iterator[None]:
    """Every file of this process that grows beyond so many bytes fails to."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("where", PLACES)
def test_a_full_disk_leaves_the_old_checkpoint(where: str, tmp_path: Path) -> None:
    with buffer(where, tmp_path / "live") as replay:
        replay.add_trajectories([plain(0)])
        replay.save_checkpoint(tmp_path / "c")
        with no_room():
            replay.add_trajectories([plain(1)])
            with pytest.raises((DataError, OSError)):
                replay.save_checkpoint(tmp_path / "c")
        loaded = TrajectoryReplay()
        loaded.load_checkpoint(tmp_path / "c")
        assert uids(loaded) == [0] and uids(replay) == [0, 1]
        replay.save_checkpoint(tmp_path / "c")
        loaded.load_checkpoint(tmp_path / "c")
        assert uids(loaded) == [0, 1]


def test_a_deleted_file_is_reported(tmp_path: Path) -> None:
    replay = buffer("disk", tmp_path / "live", cache_size=1)
    replay.add_trajectories([plain(uid) for uid in range(4)])
    replay.flush()
    for path in (tmp_path / "live").glob("trajectory_*"):
        path.unlink()
    with pytest.raises(DataError, match=r"trajectory_\d_.*safetensors is missing"):
        replay.sample(50)
    replay.close()


def save_for_ever(folder: Path, where: str) -> None:
    replay = buffer(where, folder / "live")
    for generation in range(10_000):
        replay.add_trajectories([plain(generation, length=30)])
        replay.save_checkpoint(folder / "checkpoint")
        (folder / "finishing").write_text(str(generation + 1))
        (folder / "finishing").replace(folder / "finished")  # a kill never leaves it empty


def in_a_process(work: Callable[[], None]) -> int:
    """Fork, so that a child is at work at once; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(1)


@pytest.mark.parametrize("where", PLACES)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(where: str, tmp_path: Path) -> None:
    rng = random.Random(where)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        child = in_a_process(partial(save_for_ever, folder, where))
        while not (folder / "finished").exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = int((folder / "finished").read_text())
        loaded = TrajectoryReplay()
        loaded.load_checkpoint(folder / "checkpoint")
        assert len(loaded) in (finished, finished + 1)
        assert uids(loaded) == list(range(len(loaded)))
        if where == "disk":
            with buffer("disk", folder / "live") as live:
                live.load_checkpoint(folder / "live")
                assert uids(live) == list(range(len(live))) and len(live) in (len(loaded), len(loaded) + 1)
        loaded.save_checkpoint(folder / "checkpoint")
        assert not list(folder.glob(".checkpoint.partial-*"))


def add_and_die(live: Path, count: int) -> None:
    replay = buffer("disk", live)
    for uid in range(count):
        replay.add_trajectories([plain(uid)])
    while len(list(live.glob("trajectory_*.safetensors"))) < count:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("target", PLACES)
def test_files_that_the_index_does_not_list_yet_survive_a_kill(target: str, tmp_path: Path) -> None:
    """From the hundredth on the index is not written for each of them; nobody flushed."""
    live, count = tmp_path / "live", 102
    os.waitpid(in_a_process(partial(add_and_die, live, count)), 0)
    assert len(json.loads((live / "trajectory_index.json").read_text())["trajectory_id_list"]) < count
    with buffer(target, live) as again:
        again.load_checkpoint(live)
        assert len(again) == count and again.add_trajectories([plain(0)]) == [count]
    assert len(list(live.glob("trajectory_*.safetensors"))) == count + (target == "disk")


def test_evicted_trajectories_do_not_come_back_after_a_kill(tmp_path: Path) -> None:
    live = tmp_path / "live"
    with buffer("disk", live) as replay:
        replay.add_trajectories([plain(0), plain(1)])
        replay.flush()
        kept = {path.name: path.read_bytes() for path in live.glob("trajectory_*.safetensors")}
        replay.clear()
        replay.add_trajectories([plain(2)])
    for name, content in kept.items():  # as if the kill had come between listing and removing
        (live / name).write_bytes(content)
    with buffer("disk", live) as again:
        again.load_checkpoint(live)
        assert uids(again) == [2]


def test_a_kill_between_two_names_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(0)])
    replay.save_checkpoint(tmp_path / "c")

    def rename_and_die(path: Path, target: Path) -> None:
        os.rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Path, "rename", rename_and_die)
    os.waitpid(in_a_process(lambda: replay.save_checkpoint(tmp_path / "c")), 0)
    replay.load_checkpoint(tmp_path / "c")
    assert uids(replay) == [0]


class Fuse:
    """Kills this process before one of the steps that it takes on disk."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*args: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **more)

        return acted


def load_until_killed(folder: Path, steps: int) -> None:
    replay = buffer("disk", folder / "live")
    replay.load_checkpoint(folder / "live")
    fuse = Fuse(steps)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "link"), (Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")):
            patch.setattr(owner, name, fuse.before(getattr(owner, name)))
        replay.load_checkpoint(folder / "c")
    os._exit(0)


def test_a_kill_at_any_step_of_a_load_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Both have trajectories of the same number, and one of the same file name."""
    with buffer("disk", tmp_path / "template") as replay, TrajectoryReplay() as other:
        replay.add_trajectories([plain(uid) for uid in range(3)])
        other.add_trajectories([plain(0, length=6), plain(8)])
        other.save_checkpoint(tmp_path / "c")
    found: list[list[int]] = []
    is_finished = False
    while not is_finished:
        shutil.copytree(tmp_path / "template", tmp_path / "live")
        _, status = os.waitpid(in_a_process(partial(load_until_killed, tmp_path, len(found))), 0)
        is_finished = status == 0
        assert is_finished or status == signal.SIGKILL
        reader = TrajectoryReplay()
        reader.load_checkpoint(tmp_path / "live")
        with buffer("disk", tmp_path / "live") as again:
            again.load_checkpoint(tmp_path / "live")
            found.append(uids(again))
            assert uids(reader) == found[-1] and again.total_samples == {3: 24, 2: 20}[len(again)]
            assert again.add_trajectories([plain(9)]) == [len(again) - 1]
        assert len(list((tmp_path / "live").glob("trajectory_*"))) == len(again) + 1  # and the index
        shutil.rmtree(tmp_path / "live")
    old = found.index([0, 8])
    assert 3 < old < len(found) - 8 and found == [[0, 1, 2]] * old + [[0, 8]] * (len(found) - old)


@pytest.mark.parametrize("where", PLACES)
def test_after_a_load_other_fields_are_still_refused(where: str, tmp_path: Path) -> None:
    with TrajectoryReplay() as saved:
        saved.add_trajectories([plain(0)])
        saved.save_checkpoint(tmp_path / "c")
    with buffer(where, tmp_path / "live") as replay:
        replay.load_checkpoint(tmp_path / "c")
        with pytest.raises(DataError, match="versions of a trajectory is missing"):
            replay.add_trajectories([replace(plain(1), versions=None)])
        replay.clear()
        replay.add_trajectories([replace(plain(1), versions=None)])


@pytest.mark.parametrize("where", PLACES)
def test_a_buffer_closes_used_or_not_once_or_twice(where: str, tmp_path: Path) -> None:
    buffer(where, tmp_path / "unused").close()
    replay = buffer(where, tmp_path / "live")
    replay.add_trajectories([plain(0)])
    replay.close()
    replay.close()
    assert uids(replay) == [0]
    with pytest.raises(DataError, match="closed"):
        replay.add_trajectories([plain(1)])
    with pytest.raises(DataError, match="closed"):
        replay.clear()
    with pytest.raises(DataError, match="closed"):
        replay.load_checkpoint(tmp_path / "live")
    assert len(replay) == 1 and uids(replay) == [0]
