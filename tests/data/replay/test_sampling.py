from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.data.mixer import Mixer
from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay, TransitionBatch
from nightshift.data.replay.index import TrajectoryEntry, TrajectoryIndex
from nightshift.errors import DataError
from tests.data.replay.examples import frame, plain, reward, trajectories


def rows_of(trajectory: TrajectoryBatch, uid: int) -> list[tuple[int, int, int, bool]]:
    """uid, episode, step and whether it terminates, row by row."""
    flat = (trajectory.episode.ravel(), trajectory.t.ravel(), trajectory.terminations.ravel())
    return [(uid, int(e), int(t), bool(ended)) for e, t, ended in zip(*flat, strict=True)]


def expected(row: tuple[int, int, int, bool], held: dict[tuple[int, int, int], bool], view: dict[str, Any]) -> Any:
    """What one sample must be, worked out step by step: frames seen, frames led to, return, steps, mask."""
    uid, episode, t, _ = row
    gain, steps, last = 0.0, 0, t
    while steps < view["n_step"] and (uid, episode, t + steps) in held:
        last = t + steps
        gain += view["discount"] ** steps * float(reward(uid, episode, last))
        steps += 1
    mask = 0.0 if held[uid, episode, last] else 1.0
    return _stack(uid, episode, t, held, view), _stack(uid, episode, last, held, view, led_to=True), gain, steps, mask


def _stack(
    uid: int, episode: int, t: int, held: dict[tuple[int, int, int], bool], view: dict[str, Any], led_to: bool = False
) -> list[int]:
    seen = [t + 1] if led_to else []
    while len(seen) < view["frame_stack"]:
        is_there = (uid, episode, t) in held
        seen.append(t if is_there else seen[-1])
        t -= is_there
    return seen[::-1]


def check_batch(
    batch: TransitionBatch,
    rows: list[tuple[int, int, int, bool]],
    held: dict[tuple[int, int, int], bool],
    view: dict[str, Any],
) -> None:
    for i, row in enumerate(rows):
        uid, episode, _, _ = row
        saw, led_to, gain, steps, mask = expected(row, held, view)
        for key, seen in (("curr_obs", saw), ("next_obs", led_to)):
            for name in ("state", "image"):
                want = np.stack([frame(uid, episode, t)[name] for t in seen])
                assert np.array_equal(batch[key][name][i], want if view["frame_stack"] > 1 else want[0])
        assert batch["rewards"][i] == pytest.approx(gain, rel=1e-5)
        assert batch["discounts"][i] == pytest.approx(view["discount"] ** steps)
        assert batch["mask"][i] == mask
        assert (batch["episode"][i], batch["t"][i]) == row[1:3]
        assert batch["forward_inputs"]["tokens"][i] == episode * 100 + row[2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_windows_stay_inside_their_episode(
    where: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Against a model that looks every step up by name: gaps, ends, envs, wrap-around, windows, eviction, cache."""
    count = data.draw(st.integers(1, 5))
    stored = [data.draw(trajectories(uid)) for uid in range(count)]
    window, capacity = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    path = tmp_path_factory.mktemp("live") if where == "disk" else None
    view: dict[str, Any] = {
        "frame_stack": data.draw(st.integers(1, 4)),
        "n_step": data.draw(st.integers(1, 4)),
        "discount": 0.5,
    }
    with TrajectoryReplay(
        sample_window_size=window,
        capacity=capacity,
        cache_size=data.draw(st.integers(1, 3)),
        auto_save_path=path,
    ) as replay:
        generator = torch.Generator().manual_seed(1234)
        for uid, trajectory in enumerate(stored):
            assert replay.add_trajectories([trajectory]) == [uid]
            if data.draw(st.booleans()):
                replay.flush()
            kept = [(n, t) for n, t in enumerate(stored[: uid + 1])][-capacity if capacity else 0 :]
            assert len(replay) == len(kept) and replay.total_samples == sum(t.num_samples for _, t in kept)
            rows = [row for n, t in kept[-window if window else 0 :] for row in rows_of(t, n)]
            assert replay.is_ready(len(rows)) and not replay.is_ready(len(rows) + 1)
            draws = torch.randint(0, len(rows), (7,), generator=generator).tolist()
            held = {(n, e, t): ended for n, e, t, ended in rows}
            check_batch(replay.sample(7, **view), [rows[i] for i in draws], held, view)


def test_samples_equal_golden_values() -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(uid=1), plain(uid=2)])
    rows = [row for uid in (1, 2) for row in rows_of(plain(uid), uid)]
    batch = replay.sample(6)
    assert [rows.index((int(v), int(e), int(t), False)) for v, e, t in zip(
        batch["versions"], batch["episode"], batch["t"], strict=True
    )] == [15, 3, 6, 5, 12, 4]  # fmt: skip


def test_a_batch_can_be_larger_than_the_buffer() -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(uid=1)])
    assert len(replay.sample(1000)["actions"]) == 1000


def test_an_empty_buffer_and_an_empty_batch_are_errors() -> None:
    replay = TrajectoryReplay()
    with pytest.raises(DataError, match="empty"):
        replay.sample(1)
    replay.add_trajectories([plain(uid=1)])
    with pytest.raises(DataError, match="num_chunks is 0"):
        replay.sample(0)
    with pytest.raises(DataError, match="needs a discount"):
        replay.sample(1, n_step=2)
    replay.clear()
    assert len(replay) == replay.total_samples == 0
    with pytest.raises(DataError, match="empty"):
        replay.sample(1)
    assert replay.add_trajectories([plain(uid=1)]) == [1]


def test_global_generators_are_left_alone(tmp_path: Path) -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    before = str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()
    with TrajectoryReplay(auto_save_path=tmp_path / "live") as replay:
        replay.add_trajectories([plain(uid=1)])
        replay.sample(4)
        replay.save_checkpoint(tmp_path / "checkpoint")
        replay.load_checkpoint(tmp_path / "checkpoint")
    assert before == (str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist())


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40), newest=st.integers(0, 6), data=st.data())
def test_the_index_equals_a_linear_search(sizes: list[int], newest: int, data: st.DataObject) -> None:
    index, model = TrajectoryIndex(), []
    for number, size in enumerate(sizes):
        entry = TrajectoryEntry(
            trajectory_id=number, num_samples=size, shape=(size, 1), max_episode_length=0, model_weights_id=""
        )
        index.append(entry)
        model.append(entry)
        if len(model) > 1 and data.draw(st.booleans()):
            assert index.pop_oldest() == model.pop(0)
        assert list(index) == model and index.total_samples == sum(e.num_samples for e in model)
        rows = [(e.trajectory_id, row) for e in model[-newest if newest else 0 :] for row in range(e.num_samples)]
        assert index.window_samples(newest) == len(rows)
        positions, local = index.locate(np.arange(len(rows)), newest)
        assert list(zip(index.ids(positions).tolist(), local.tolist(), strict=True)) == rows


def test_the_index_frees_evicted_entries() -> None:
    index = TrajectoryIndex()
    for number in range(10_000):
        index.append(
            TrajectoryEntry(
                trajectory_id=number, num_samples=2, shape=(2, 1), max_episode_length=0, model_weights_id=""
            )
        )
        if len(index) > 10:
            index.pop_oldest()
    assert len(index._ends) < 5_000 and index.total_samples == 20
    assert index.ids(index.locate(np.array([0, 19]), 0)[0]).tolist() == [9990, 9999]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_threads_that_add_and_sample_see_whole_trajectories(where: str, tmp_path: Path) -> None:
    replay = TrajectoryReplay(capacity=6, cache_size=2, auto_save_path=tmp_path / "live" if where == "disk" else None)
    replay.add_trajectories([plain(uid=0)])
    failures: list[BaseException] = []
    done = threading.Event()

    def watch() -> None:
        try:
            while not done.is_set():
                batch = replay.sample(32, frame_stack=2, n_step=2, discount=0.9)
                for key in ("curr_obs", "next_obs"):
                    assert (batch[key]["state"][..., 0] == batch["versions"][:, None]).all()
                    assert (batch[key]["state"][..., 1] == batch["episode"][:, None]).all()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=watch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for uid in range(1, 120):
        replay.add_trajectories([plain(uid)])
        if uid % 40 == 0:
            replay.save_checkpoint(tmp_path / "checkpoint")
    done.set()
    for thread in threads:
        thread.join()
    replay.close()
    assert not failures and len(replay) == 6 and replay.total_samples == 6 * 8


def test_a_mixer_draws_from_replays() -> None:
    online, demos = TrajectoryReplay(), TrajectoryReplay(seed=7)
    online.add_trajectories([plain(uid=1)])
    view: dict[str, Any] = {"frame_stack": 2, "n_step": 3, "discount": 0.9}
    mixer = Mixer({"online": online.source(**view), "demos": demos.source(**view)}, {"online": 0.5, "demos": 0.5})
    with pytest.raises(DataError, match="source demos: the replay buffer is empty"):
        mixer.sample(8)
    demos.add_trajectories([plain(uid=2)])
    batch = mixer.sample(8, num_batches=3)
    assert np.array_equal(batch["versions"], batch["source"] + 1)
    assert np.array_equal(batch["curr_obs"]["state"][:, :, 0], np.stack([batch["source"] + 1] * 2, axis=1))
