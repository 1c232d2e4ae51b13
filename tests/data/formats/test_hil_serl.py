from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.data import limits
from nightshift.data.episode import Episode
from nightshift.data.formats import ENDS_MID_EPISODE, STARTS_MID_EPISODE, hil_serl
from nightshift.data.limits import Limits
from nightshift.errors import DataError

Transition = dict[str, Any]


def look(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """As SERLObsWrapper and ChunkingWrapper(obs_horizon=1) leave it."""
    random = np.random.default_rng(seed)
    return {
        "state": random.standard_normal((1, 19)).astype(np.float32),
        "wrist_1": random.integers(0, 256, (1, 4, 4, 3), np.uint8),
    }


def run_of(length: int, *, first: int, done: bool = True, reward: float = 1, **changes: Any) -> list[Transition]:
    """Transitions that follow each other; the looks of run `first` are numbered from there on."""
    return [
        {
            "observations": look(first + step),
            "actions": np.random.default_rng(first + step).uniform(-1, 1, 7).astype(np.float32),
            "next_observations": look(first + step + 1),
            "rewards": reward if step == length - 1 else 0,
            "masks": 1.0 - (done and step == length - 1),
            "dones": done and step == length - 1,
            **changes,
        }
        for step in range(length)
    ]


def dump(path: Path, transitions: Sequence[Transition]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(list(transitions)))
    return path


def load(path: Path) -> list[Episode]:
    return [entry.load() for entry in hil_serl.list_episodes(path, "insert_ram")]


def test_demos_keep_values_and_dtypes_and_end_with_the_next_observation(tmp_path: Path) -> None:
    transitions = [*run_of(3, first=0), *run_of(2, first=100)]
    first, second = load(dump(tmp_path / "ram_20_demos_2025.pkl", transitions))
    assert (first.length, second.length) == (4, 3)
    np.testing.assert_array_equal(first.observations["state"], np.concatenate([look(n)["state"] for n in range(4)]))
    np.testing.assert_array_equal(second.observations["wrist_1"][-1], look(102)["wrist_1"][0])
    np.testing.assert_array_equal(first.actions[:-1], np.stack([t["actions"] for t in transitions[:3]]))
    assert first.actions.dtype == np.float32
    assert first.observations["wrist_1"].dtype == np.uint8
    np.testing.assert_array_equal(first.rewards, [0, 0, 1, 0])
    assert (first.terminated, first.truncated, first.success) == (True, False, True)
    assert first.metadata == {hil_serl.OBS_HORIZON: 1}
    assert first.provenance.task == "insert_ram"
    assert [e.provenance.origin for e in (first, second)] == ["ram_20_demos_2025.pkl#0", "ram_20_demos_2025.pkl#3"]


@pytest.mark.parametrize(
    "rewards",
    [[0, np.float32(0.1), True], [np.bool_(False), np.int64(-1), np.asarray(1, np.float32)], [np.float32(0.1)] * 3],
    ids=str,
)
def test_rewards_keep_their_values_and_have_one_dtype_however_a_script_mixes_theirs(
    tmp_path: Path, rewards: list[Any]
) -> None:
    transitions = run_of(3, first=0)
    for transition, reward in zip(transitions, rewards, strict=True):
        transition["rewards"] = transition["grasp_penalty"] = reward
    (episode,) = load(dump(tmp_path / "a.pkl", transitions))
    for column in (episode.rewards, episode.extras["grasp_penalty"]):
        assert column.dtype == np.float64
        assert column.tolist() == [*map(float, rewards), 0]
    assert episode.success


@pytest.mark.parametrize("reward", [2**53 + 1, np.int64(2**53 + 1)], ids=["Python", "numpy"])
def test_a_reward_that_would_be_rounded_is_refused(tmp_path: Path, reward: Any) -> None:
    transitions = run_of(2, first=0)
    transitions[0]["rewards"] = reward
    with pytest.raises(DataError, match=r"transition 0: rewards is 9007199254740993, which float64 does not hold"):
        load(dump(tmp_path / "a.pkl", transitions))


def test_intervention_segments_are_never_glued_together(tmp_path: Path) -> None:
    """Of a run of 20 steps a person took over at 0..4 and 10..14: the buffer holds these ten and no mark between."""
    run = run_of(20, first=0)
    episodes = load(dump(tmp_path / "transitions_1000.pkl", [*run[:5], *run[10:15]]))
    assert [episode.length for episode in episodes] == [6, 6]
    np.testing.assert_array_equal(episodes[1].observations["wrist_1"][0], look(10)["wrist_1"][0])
    np.testing.assert_array_equal(episodes[0].observations["wrist_1"][-1], look(5)["wrist_1"][0])
    assert [STARTS_MID_EPISODE in episode.metadata for episode in episodes] == [False, True]
    assert [ENDS_MID_EPISODE in episode.metadata for episode in episodes] == [True, True]
    assert all(episode.truncated and not episode.terminated for episode in episodes)


@settings(deadline=None, max_examples=60)
@given(kept=st.lists(st.booleans(), min_size=1, max_size=24).filter(any), ends=st.sets(st.integers(0, 23)))
def test_whatever_a_buffer_left_out_every_transition_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, kept: list[bool], ends: set[int]
) -> None:
    """Episodes end at `ends`, only `kept` transitions are in the file; each has looks of its own, so a mix-up shows."""
    run: list[Transition] = []
    for number in range(len(kept)):
        starts = not run or run[-1]["dones"]
        (transition,) = run_of(1, first=2 * number if starts else 0, done=number in ends)
        transition["observations"] = look(1000 + number) if starts else run[-1]["next_observations"]
        transition["next_observations"] = look(2000 + number)
        run.append(transition)
    in_file = [transition for transition, keep in zip(run, kept, strict=True) if keep]
    path = tmp_path_factory.mktemp("run") / "transitions_1.pkl"
    back = [
        (episode.observations["state"][t], episode.actions[t], episode.observations["state"][t + 1])
        for episode in load(dump(path, in_file))
        for t in range(episode.length - 1)
    ]
    assert len(back) == len(in_file)
    for (seen, action, after), transition in zip(back, in_file, strict=True):
        np.testing.assert_array_equal(seen, transition["observations"]["state"][0])
        np.testing.assert_array_equal(action, transition["actions"])
        np.testing.assert_array_equal(after, transition["next_observations"]["state"][0])


def test_a_buffer_is_read_in_the_order_of_its_steps_and_joined_where_it_was_cut(tmp_path: Path) -> None:
    run = run_of(9, first=0)
    for step, piece in {1000: run[:4], 2000: run[4:7], 10000: run[7:]}.items():
        dump(tmp_path / "buffer" / f"transitions_{step}.pkl", piece)
    (episode,) = load(tmp_path / "buffer")
    np.testing.assert_array_equal(episode.actions[:-1], np.stack([t["actions"] for t in run]))
    assert episode.provenance.origin == "transitions_1000.pkl#0"


def test_the_file_decides_what_terminates(tmp_path: Path) -> None:
    """HIL-SERL counts a timeout as done with mask 0; others keep the mask at 1."""
    theirs = run_of(2, first=0, reward=0)
    honest = run_of(2, first=10, reward=0)
    honest[-1]["masks"] = 1.0
    timeout, truncated = load(dump(tmp_path / "a.pkl", [*theirs, *honest]))
    assert (timeout.terminated, timeout.success) == (True, False)
    assert (truncated.terminated, truncated.truncated) == (False, True)
    assert ENDS_MID_EPISODE not in truncated.metadata


def test_infos_give_interventions_and_the_grasp_penalty_and_other_names_are_listed(tmp_path: Path) -> None:
    transitions = run_of(3, first=0)
    for step, transition in enumerate(transitions):
        transition["infos"] = {"grasp_penalty": -0.02 * step, "succeed": step == 2, "left": False}
    transitions[1]["infos"]["intervene_action"] = transitions[1]["actions"]
    (episode,) = load(dump(tmp_path / "a.pkl", transitions))
    assert episode.interventions.tolist() == [False, True, False, False]
    assert episode.extras["grasp_penalty"].tolist() == [0.0, -0.02, -0.04, 0.0]
    assert episode.metadata[hil_serl.INFOS_LEFT_OUT] == ["left", "succeed"]


def test_a_frame_stack_is_kept(tmp_path: Path) -> None:
    (transition,) = run_of(1, first=0)
    for key in ("observations", "next_observations"):
        transition[key] = {"state": np.zeros((3, 19), np.float32)}
    (episode,) = load(dump(tmp_path / "a.pkl", [transition]))
    assert episode.observations["state"].shape == (2, 3, 19)
    assert hil_serl.OBS_HORIZON not in episode.metadata


def _without(key: str) -> Callable[[Transition], object]:
    return lambda transition: transition.pop(key)


def _with(**changes: Any) -> Callable[[Transition], object]:
    return lambda transition: transition.update(changes)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_without("masks"), "transition 2 has no masks"),
        (_with(masks=0.0), "transition 2: masks is 0, which ends the episode, but dones is 0"),
        (_with(masks=0.5), "transition 2: masks is 0.5 and dones is False"),
        (_with(masks=np.ones(2)), "transition 2: masks is an array"),
        (_with(rewards="much"), "transition 2: rewards is not a number but a str"),
        (_with(observations=np.zeros(3)), "transition 2: observations is not a dict of arrays"),
        (_with(next_observations={"state": np.zeros(3)}), "transition 2: next_observations has"),
        (_with(actions=[1, 2]), "transition 2: actions is not an array"),
        (_with(actions=np.zeros(7)), r"actions is float64 \[7\], not float32 \[7\] \(step 2\)"),
        (_with(actions=np.zeros(6, np.float32)), r"actions is float32 \[6\], not float32 \[7\] \(step 2\)"),
        (_with(grasp_penalty=-0.02), r"grasp_penalty is missing \(step 0\)"),
    ],
)
def test_a_broken_transition_is_refused_with_file_field_and_place(
    tmp_path: Path, spoil: Callable[[Transition], object], sentence: str
) -> None:
    transitions = run_of(4, first=0)
    spoil(transitions[2])
    with pytest.raises(DataError, match=sentence) as refusal:
        load(dump(tmp_path / "spoiled.pkl", transitions))
    assert "spoiled.pkl" in str(refusal.value)


def test_an_invalid_transition_affects_no_other_episode(tmp_path: Path) -> None:
    transitions = [*run_of(3, first=0), *run_of(4, first=100), *run_of(2, first=200)]
    transitions[4]["masks"] = 0.5
    entries = hil_serl.list_episodes(dump(tmp_path / "a.pkl", transitions), "insert_ram")
    lengths = []
    for entry in entries:
        try:
            lengths.append(entry.load().length)
        except DataError as error:
            assert "a.pkl, transition 4: masks is 0.5" in str(error)
            lengths.append(0)
    assert lengths == [4, 2, 0, 3, 3]
    assert entries[3].load().metadata[STARTS_MID_EPISODE]


@dataclass
class Hostile:
    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_hostile_file_is_refused_named_and_not_run(tmp_path: Path) -> None:
    transitions = run_of(2, first=0)
    transitions[1]["infos"] = {"note": Hostile(str(tmp_path / "pwned"))}
    with pytest.raises(DataError, match=r"demos\.pkl is refused: it asks for posix\.mkdir"):
        load(dump(tmp_path / "demos.pkl", transitions))
    assert not (tmp_path / "pwned").exists()


def test_files_that_hold_no_transitions_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.pkl").write_bytes(pickle.dumps(run_of(2, first=0))[:-30])
    (tmp_path / "other.pkl").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "words.pkl").write_bytes(pickle.dumps(["a"]))
    for name, sentence in {
        "cut.pkl": "is not a readable pickle",
        "other.pkl": "is not a list of transitions",
        "words.pkl": "transition 0 is not a transition but a str",
        "nothing.pkl": "there is no file",
    }.items():
        with pytest.raises(DataError, match=sentence):
            load(tmp_path / name)


def test_the_task_must_be_given(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.pkl", run_of(2, first=0))
    with pytest.raises(DataError, match=r"does not contain the name of its task\n.*--task NAME"):
        hil_serl.list_episodes(path, "")


def test_a_damaged_file_of_a_buffer_leaves_the_episodes_of_the_others(tmp_path: Path) -> None:
    run = run_of(9, first=0)
    for step, piece in {1000: run[:4], 2000: run[4:7], 3000: run[7:]}.items():
        dump(tmp_path / f"transitions_{step}.pkl", piece)
    (tmp_path / "transitions_2000.pkl").write_bytes(b"\x80\x04damaged")
    first, second, third = hil_serl.list_episodes(tmp_path, "insert_ram")
    assert (first.load().length, third.load().length) == (5, 3)
    assert first.load().metadata[ENDS_MID_EPISODE] and third.load().metadata[STARTS_MID_EPISODE]
    assert second.error and "transitions_2000.pkl is not a readable pickle" in second.error.what


def test_files_of_a_buffer_may_be_links_within_it_only(tmp_path: Path) -> None:
    dump(tmp_path / "secret.pkl", run_of(2, first=0))
    dump(tmp_path / "buffer/transitions_1.pkl", run_of(3, first=10))
    (tmp_path / "buffer/transitions_2.pkl").symlink_to("../secret.pkl")
    first, second = hil_serl.list_episodes(tmp_path / "buffer", "insert_ram")
    assert first.load().length == 4
    assert second.error and "transitions_2.pkl is refused: it is a link to" in second.error.what


def test_one_transition_repeated_by_reference_is_bounded_before_it_is_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (transition,) = run_of(1, first=0, done=False)
    transition["next_observations"] = transition["observations"]
    path = dump(tmp_path / "a.pkl", [transition] * 5000)
    assert path.stat().st_size < 20_000
    (entry,) = hil_serl.list_episodes(path, "insert_ram", Limits(floor=10**5, ceiling=10**6))
    with pytest.raises(DataError, match=r"a\.pkl.* would unpack from .* kB to 1\.2 MB"):
        entry.load()
    monkeypatch.setattr(limits, "RATIO", 10)
    with pytest.raises(DataError, match=r"a\.pkl has .* kB and its episodes more than"):
        hil_serl.list_episodes(path, "insert_ram", Limits(floor=10**3, ceiling=10**4))


@pytest.mark.parametrize(
    ("action", "becomes"), [(np.float32(1), (4, 1)), (np.zeros((1, 7), np.float32), None)], ids=str
)
def test_actions_are_vectors(tmp_path: Path, action: Any, becomes: tuple[int, ...] | None) -> None:
    path = dump(tmp_path / "a.pkl", run_of(3, first=0, actions=np.asarray(action)))
    if becomes:
        assert load(path)[0].actions.shape == becomes
        return
    with pytest.raises(DataError, match=r"a\.pkl.*: actions has shape \[3, 1, 7\]; actions are \[N, A\]"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"observations": {1: np.zeros(2), "a": np.zeros(2)}, "next_observations": {"b": np.zeros(2)}},
        {"rewards": 10**400},
        {"masks": np.str_("1")},
        {"masks": float("nan")},
        {"infos": {"grasp_penalty": np.zeros(3)}},
        {"observations": {}, "next_observations": {}},
    ],
)
def test_odd_transitions_are_episodes_or_data_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    transitions = [*run_of(2, first=0), *run_of(2, first=10, **changes), *run_of(2, first=20)]
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(transitions))
    lengths = []
    for entry in hil_serl.list_episodes(path, "insert_ram"):
        with contextlib.suppress(DataError):
            lengths.append(entry.load().length)
    assert lengths[0] == lengths[-1] == 3
