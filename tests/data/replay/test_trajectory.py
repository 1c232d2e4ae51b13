from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay
from nightshift.data.replay.trajectory import as_immutable, weights_id
from nightshift.errors import DataError
from tests.data.replay.examples import build, frame, plain, trajectories


@given(trajectory=trajectories(uid=1))
def test_frames_are_stored_once_and_observations_come_back(trajectory: TrajectoryBatch) -> None:
    seen = {(int(e), int(t)) for e, t in zip(trajectory.episode.ravel(), trajectory.t.ravel(), strict=True)}
    distinct = seen | {(e, t + 1) for e, t in seen}
    for name, frames in trajectory.frames.items():
        assert len(frames) == len(distinct)
        assert np.array_equal(trajectory.curr_obs[name], frame(1, trajectory.episode, trajectory.t)[name])
        assert np.array_equal(trajectory.next_obs[name], frame(1, trajectory.episode, trajectory.t + 1)[name])


def test_curr_and_next_frame_are_adjacent_in_every_environment() -> None:
    trajectory = plain(uid=0, length=5, envs=3)
    assert trajectory.next is not None
    assert (trajectory.next == trajectory.curr + 1).all()


def test_a_next_obs_that_differs_from_the_following_curr_obs_is_reported() -> None:
    episode, t = np.zeros((3, 1), np.int64), np.arange(3)[:, None]
    led_to = frame(0, episode, t + 1)
    led_to["image"] = led_to["image"].copy()
    led_to["image"][1, 0, 0, 0] += 1
    with pytest.raises(DataError, match=r"next_obs\.image of episode 0, step 1 is not curr_obs\.image of step 2"):
        TrajectoryBatch.from_observations(frame(0, episode, t), led_to, episode, t, {})


def test_steps_of_an_episode_become_a_trajectory_without_a_copy() -> None:
    observations = {"image": np.zeros((5, 2, 2), np.uint8)}
    columns = {"actions": np.zeros((4, 7), np.float32), "rewards": np.arange(4, dtype=np.float32)}
    columns["versions"] = np.full(4, 3)
    trajectory = TrajectoryBatch.from_episode_steps(observations, columns, episode=9, terminated=True, truncated=False)
    assert trajectory.frames["image"] is observations["image"]
    assert np.shares_memory(trajectory.actions, columns["actions"])
    assert trajectory.shape == (4, 1) and trajectory.max_episode_length == 4
    assert trajectory.terminations.ravel().tolist() == [False, False, False, True] and not trajectory.truncations.any()
    assert trajectory.model_weights_id == weights_id(np.full((4, 1), 3))
    replay = TrajectoryReplay()
    replay.add_trajectories([trajectory])
    assert replay.sample(50)["mask"].tolist() == [float(t != 3) for t in _drawn(4, 50)]


def _drawn(total: int, count: int) -> list[int]:
    import torch

    return torch.randint(0, total, (count,), generator=torch.Generator().manual_seed(1234)).tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": np.zeros((3, 2), np.float32)}, r"rewards of a trajectory has shape \[3, 2\], not \[4, 2"),
        ({"terminations": np.zeros((4, 2), np.uint8)}, "terminations of a trajectory is uint8, not bool"),
        ({"actions": np.zeros((4, 2), object)}, "actions of a trajectory is object"),
        ({"actions": np.zeros((4, 2), ">f4")}, "actions of a trajectory is >f4"),
        ({"t": np.zeros((4, 2), np.int64)}, r"contains a step twice \(episode 0, step 0\)"),
        ({"t": np.zeros((4, 2), np.int32)}, "t of a trajectory is int32"),
        ({"episode": np.zeros((4, 2), np.int64), "t": np.arange(8).reshape(4, 2)}, "is in two environments"),
        ({"terminations": np.ones((4, 2), np.bool_)}, r"continues after its end \(episode 0, step 0\)"),
        ({"truncations": np.ones((4, 2), np.bool_)}, "continues after its end"),
        ({"curr": np.full((4, 2), 99)}, "point beyond them"),
        ({"next": np.full((4, 2), -1)}, "point beyond them"),
        ({"next": np.zeros((4, 2), np.int64)}, "next frame of a step is not the current frame"),
        ({"model_weights_id": "../../etc"}, "letters, digits and dashes"),
        ({"episode": np.zeros((0, 2), np.int64)}, "has no steps"),
    ],
)
def test_an_inconsistent_trajectory_is_rejected_before_it_is_stored(change: dict[str, Any], said: str) -> None:
    replay = TrajectoryReplay()
    with pytest.raises(DataError, match=said):
        replay.add_trajectories([plain(uid=1), replace(plain(uid=2), **change)])
    assert len(replay) == replay.total_samples == 0


def test_a_trajectory_with_another_schema_is_rejected_with_the_field() -> None:
    replay = TrajectoryReplay()
    replay.add_trajectories([plain(uid=1)])
    with pytest.raises(DataError, match=r"actions of a trajectory is float64 \[2\]; in this buffer it is float32"):
        replay.add_trajectories([replace(plain(uid=2), actions=np.zeros((4, 2, 2)))])
    with pytest.raises(DataError, match="versions of a trajectory is missing"):
        replay.add_trajectories([replace(plain(uid=2), versions=None)])
    assert len(replay) == 1


def test_arrays_that_change_after_they_were_added_do_not_change_what_is_stored() -> None:
    trajectory = plain(uid=1)
    replay = TrajectoryReplay()
    replay.add_trajectories([trajectory])
    trajectory.rewards[:] = -1
    trajectory.frames["image"][:] = 99
    batch = replay.sample(20)
    assert (batch["rewards"] > 0).all() and (batch["curr_obs"]["image"] < 99).all()


@given(data=st.data())
def test_an_episode_in_two_trajectories_is_not_joined(data: st.DataObject) -> None:
    first, second = build(1, [[(5, t, "")] for t in range(3)]), build(2, [[(5, t, "")] for t in range(3, 6)])
    replay = TrajectoryReplay(seed=data.draw(st.integers(0, 5)))
    replay.add_trajectories([first, second])
    batch = replay.sample(30, frame_stack=4, n_step=5, discount=0.5)
    assert (batch["curr_obs"]["state"][..., 0] == batch["versions"][:, None]).all()
    assert (batch["next_obs"]["state"][..., 0] == batch["versions"][:, None]).all()
    assert set(batch["next_obs"]["state"][:, -1, 2]) <= {3, 6}


def views_of_ones(kind: str, tmp_path: Path) -> tuple[NDArray[np.float32], Any]:
    """Rewards of ones that are read-only, and what they lie in."""
    content = np.ones((4, 2), np.float32).tobytes()
    memory: Any
    if kind == "array":
        memory = np.ones((4, 2), np.float32)
        rewards = memory.view()
    elif kind in ("bytes", "bytearray"):
        memory = bytearray(content) if kind == "bytearray" else content
        rewards = np.frombuffer(memoryview(memory).toreadonly(), np.float32).reshape(4, 2)
    else:
        (tmp_path / "ones").write_bytes(content)
        memory = np.memmap(tmp_path / "ones", np.float32, mode="r+" if kind == "changing file" else "r", shape=(4, 2))
        rewards = memory[:]
    rewards.flags.writeable = False
    return rewards, memory


@pytest.mark.parametrize("kind", ["array", "bytearray", "changing file"])
def test_a_read_only_view_of_memory_that_can_change_is_copied(kind: str, tmp_path: Path) -> None:
    rewards, memory = views_of_ones(kind, tmp_path)
    replay = TrajectoryReplay()
    replay.add_trajectories([replace(plain(uid=0), rewards=rewards)])
    memory[:] = bytes(len(memory)) if kind == "bytearray" else 0
    assert not rewards.any() and replay.sample(20)["rewards"].tolist() == [1.0] * 20


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_memory_that_cannot_change_is_not_copied(kind: str, tmp_path: Path) -> None:
    rewards, _ = views_of_ones(kind, tmp_path)
    owned = as_immutable(replace(plain(uid=0), rewards=rewards))
    assert owned.rewards is rewards
    again = as_immutable(owned)
    assert all(column is owned.columns()[name] for name, column in again.columns().items())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["rewards", "actions"])
def test_a_value_that_is_not_finite_is_rejected_with_field_episode_and_step(name: str, value: float) -> None:
    trajectory = plain(uid=0, length=4, envs=2)
    column = getattr(trajectory, name).copy()
    column[2, 1] = value
    replay = TrajectoryReplay()
    with pytest.raises(DataError, match=rf"{name} of a trajectory is not finite \(episode 1, step 2\)"):
        replay.add_trajectories([plain(uid=1), replace(trajectory, **{name: column})])
    assert len(replay) == 0


@pytest.mark.parametrize(("row", "field", "step"), [(2, "curr_obs", 2), (4, "next_obs", 3)])
def test_a_frame_that_is_not_finite_is_rejected(row: int, field: str, step: int) -> None:
    trajectory = plain(uid=0, length=4, envs=1)
    state = trajectory.frames["state"].copy()
    state[row, 0] = np.nan
    with pytest.raises(DataError, match=rf"{field}\.state of a trajectory is not finite \(episode 0, step {step}\)"):
        TrajectoryReplay().add_trajectories([replace(trajectory, frames={**trajectory.frames, "state": state})])
