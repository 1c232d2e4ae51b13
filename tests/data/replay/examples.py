"""Trajectories whose every frame says where it belongs, so that a wrong one shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from nightshift.data import mmap
from nightshift.data.replay import TrajectoryBatch

Steps = list[list[tuple[int, int, str]]]
"""By row and env: episode, step, and how the step ended: "", "terminated" or "truncated"."""


def frame(uid: int, episode: Any, t: Any) -> dict[str, NDArray[Any]]:
    """What is seen at step t: a small picture and a vector that name it."""
    episode, t = np.broadcast_arrays(episode, t)
    names = np.stack([np.full_like(t, uid), episode, t], axis=-1)
    return {"state": names.astype(np.float32), "image": np.stack([names] * 4, axis=-1).astype(np.uint8)}


def reward(uid: int, episode: Any, t: Any) -> Any:
    return np.asarray(uid * 0.5 + episode * 0.25 + t + 1).astype(np.float32)


def build(uid: int, steps: Steps) -> TrajectoryBatch:
    episode = np.array([[entry[0] for entry in row] for row in steps], np.int64)
    t = np.array([[entry[1] for entry in row] for row in steps], np.int64)
    end = np.array([[entry[2] for entry in row] for row in steps])
    columns = {
        "actions": np.stack([episode, t], axis=-1).astype(np.float32),
        "rewards": reward(uid, episode, t),
        "terminations": end == "terminated",
        "truncations": end == "truncated",
        "versions": np.full(episode.shape, uid, np.int64),
        "forward_inputs": {"tokens": (episode * 100 + t)[..., None].astype(np.int32)},
        "max_episode_length": int(t.max()) + 1,
    }
    return TrajectoryBatch.from_observations(frame(uid, episode, t), frame(uid, episode, t + 1), episode, t, columns)


def plain(uid: int, length: int = 4, envs: int = 2) -> TrajectoryBatch:
    """One episode per env, cut off at the end."""
    return build(uid, [[(env, t, "") for env in range(envs)] for t in range(length)])


@st.composite
def trajectories(draw: st.DrawFn, uid: int, most_steps: int = 10) -> TrajectoryBatch:
    """Lanes with several episodes, gaps, ends of both kinds, and rows turned round as in a ring that wrapped."""
    length = draw(st.integers(1, most_steps))
    envs = draw(st.integers(1, 3))
    columns = [draw(_env_rows(env, length)) for env in range(envs)]
    return build(uid, [list(row) for row in zip(*columns, strict=True)])


@st.composite
def _env_rows(draw: st.DrawFn, env: int, length: int) -> list[tuple[int, int, str]]:
    rows: list[tuple[int, int, str]] = []
    episode, t = env * 40, draw(st.integers(0, 2))
    for _ in range(length):
        happens = draw(st.sampled_from(["goes on", "goes on", "goes on", "gap", "terminated", "truncated", "cut"]))
        is_end = happens in ("terminated", "truncated")
        rows.append((episode, t, happens if is_end else ""))
        if is_end or happens == "cut":
            episode, t = episode + 1, draw(st.integers(0, 2))
        else:
            t += 2 if happens == "gap" else 1
    turn = draw(st.integers(0, length - 1))
    return rows[turn:] + rows[:turn]


def record_opened_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list to which every file is added that is mapped from now on."""
    opened: list[Path] = []
    view = mmap.view

    def record(path: Path) -> NDArray[np.uint8]:
        opened.append(path)
        return view(path)

    monkeypatch.setattr(mmap, "view", record)
    return opened
