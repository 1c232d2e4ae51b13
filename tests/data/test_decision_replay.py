"""Demos and experience in exact shares, as many updates as the ratio allows, and the same batches after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data import episode as episodes
from nightshift.data.decision_replay import DEMOS, DecisionReplay
from nightshift.data.decisions import decision_episode
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.mixer import SOURCE
from nightshift.errors import DataError
from nightshift.rollouts.experience import LocalEpisode
from tests.algorithms.rlpd.parts import settings
from tests.data.test_decisions import PROVENANCE, policy, trajectory

DEMO = episodes.from_trajectory(trajectory(5, 1, success=True), PROVENANCE)


@dataclass(frozen=True)
class Held:
    """An episode of experience that is not on disk."""

    episode: Episode

    @property
    def transitions(self) -> int:
        return self.episode.length - 1

    def load(self, *, verify: bool = True) -> Episode:
        return self.episode


def experience(length: int = 4) -> Held:
    return Held(decision_episode(trajectory(length, 1, success=False), PROVENANCE, 0.9))


def make(**changes: Any) -> DecisionReplay:
    return DecisionReplay(policy(1), [DEMO], settings(**{"training_starts": 1, **changes}), seed=0)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return np.array_equal(a, b)


@given(batch_size=st.integers(1, 40), utd_ratio=st.integers(1, 5), share=st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]))
def test_every_slice_has_the_share_of_demos(batch_size: int, utd_ratio: int, share: float) -> None:
    replay = make(batch_size=batch_size, utd_ratio=utd_ratio, demo_share=share, warmup_steps=0)
    replay.add(experience())
    source = replay.sample()[SOURCE].reshape(utd_ratio, batch_size)
    demos = (source == [DEMOS, "experience"].index(DEMOS)).sum(axis=1)
    assert (np.abs(demos - share * batch_size) < 1).all()
    if (share * batch_size).is_integer():
        assert (demos == share * batch_size).all()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), batch_size=st.integers(1, 40))
def test_pooled_every_transition_is_sampled_as_often_as_any_other(lengths: list[int], batch_size: int) -> None:
    replay = make(batch_size=batch_size, utd_ratio=3, demo_share="pooled", warmup_steps=0)
    for number, length in enumerate(lengths, 1):
        replay.add(experience(length))
        if not replay.is_update_due:
            continue
        demos = (replay.sample()[SOURCE] == 0).sum()
        share = replay.demo_transitions / (replay.demo_transitions + sum(lengths[:number]))
        assert abs(demos - share * 3 * batch_size) <= 0.5 + 1e-4 * batch_size


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), starts=st.integers(1, 12), utd=st.integers(1, 4))
def test_there_is_one_update_for_every_decision_after_the_first_few(lengths: list[int], starts: int, utd: int) -> None:
    replay = make(training_starts=starts, utd_ratio=utd, batch_size=2)
    updates = 0
    for length in lengths:
        replay.add(experience(length))
        while replay.is_update_due:
            assert len(replay.sample()["rewards"]) == 2 * utd
            updates += 1
    assert updates == max(sum(lengths) - starts, 0)


def test_demos_alone_do_not_count_as_updates() -> None:
    replay = make(batch_size=3, utd_ratio=2)
    assert len(replay.sample_demos()["rewards"]) == 6
    replay.add(experience(4))
    assert sum(1 for _ in iter(lambda: replay.is_update_due and bool(replay.sample()), False)) == 3


@pytest.mark.parametrize("share", [0.5, "pooled"])
def test_a_restored_replay_samples_the_same_batches(share: float | str) -> None:
    replay, played = make(batch_size=8, utd_ratio=2, demo_share=share), [experience(6), experience(3)]
    replay.sample_demos()
    for episode in played:
        replay.add(episode)
    replay.sample()
    state = replay.state()
    resumed = make(batch_size=8, utd_ratio=2, demo_share=share)
    resumed.restore(state, played)
    for _ in range(3):
        assert same(replay.sample(), resumed.sample())
    assert replay.is_update_due == resumed.is_update_due


def test_with_a_window_the_newest_episodes_are_sampled_and_all_are_counted() -> None:
    replay = make(batch_size=64, demo_share=0.0, warmup_steps=0, window=2)
    for length in (6, 5, 4):
        replay.add(experience(length))
    assert set(replay.sample()["episode"].tolist()) == {1, 2}
    assert (replay.episodes, replay.decisions) == (3, 15)
    resumed = make(batch_size=64, demo_share=0.0, warmup_steps=0, window=2)
    resumed.restore(replay.state(), [experience(length) for length in (6, 5, 4)])
    assert (resumed.episodes, resumed.decisions) == (3, 15)
    assert same(replay.sample(), resumed.sample())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts the maps of the process as Linux lists them")
def test_with_a_window_only_its_files_are_mapped_however_many_were_added(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    replay = make(batch_size=64, demo_share=0.0, warmup_steps=0, window=3)
    for number in range(20):
        store.put(f"{number:08d}", experience().episode)
        replay.add(LocalEpisode(store.path(f"{number:08d}")))
        while replay.is_update_due:
            replay.sample()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
    assert mapped <= {str(store.path(f"{number:08d}")) for number in (17, 18, 19)}


def test_an_episode_that_is_missing_is_noticed() -> None:
    replay = make()
    replay.add(experience())
    with pytest.raises(DataError, match="0 episodes of experience are there, and the checkpoint counts 1"):
        make().restore(replay.state(), [])


def test_without_demos_there_is_no_share_of_them() -> None:
    with pytest.raises(DataError, match="no demo to learn from"):
        DecisionReplay(policy(1), [], settings(), seed=0)
