from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.data import episode as episodes_
from nightshift.data import rlds
from nightshift.data.episode import Episode
from nightshift.data.rlds import FIRST, LAST, MID, TFAgentsTrajectory, Transitions
from nightshift.data.rlds_validation import ArraySpec
from nightshift.errors import DataError
from tests.data.examples import assert_same, episodes, make, with_images

Flags = tuple[bool, bool, bool]
F, M, L, T, ALONE = (
    (True, False, False),
    (False, False, False),
    (False, True, False),
    (False, True, True),
    (True, True, False),
)


def step(flags: Flags, number: int = 0, **changes: Any) -> dict[str, Any]:
    names = ("is_first", "is_last", "is_terminal")
    seen = np.array([number, number + 0.5], np.float32)
    rest = {"action": np.int64(number), "reward": np.float32(number), "discount": np.float32(1)}
    return {**dict(zip(names, flags, strict=True)), "observation": seen, **rest, **changes}


def run(*flags: Flags) -> list[dict[str, Any]]:
    return [step(each, number) for number, each in enumerate(flags)]


def converted(*dataset: Any, **options: Any) -> list[TFAgentsTrajectory]:
    return list(rlds.episodes_to_trajectories(dataset, **options))


def golden_steps() -> list[list[dict[str, Any]]]:
    kinds = [[F, M, T], [ALONE], [F, L], [(True, True, True)]]
    numbers = iter(range(1, 8))
    return [
        [
            step(flags, n, action=np.int64(9 + n), reward=np.float32(n / 10), discount=np.float32((11 - n) / 10))
            for flags, n in zip(episode, numbers, strict=False)
        ]
        for episode in kinds
    ]


# What tf-agents 0.19.0 (tensorflow 2.15.1) gives for `golden_steps`.
GOLDEN = {
    "step_type": [0, 1, 2, 2, 0, 2, 2],
    "next_step_type": [1, 2, 0, 2, 2, 0, 2],
    "observation": [[1, 1.5], [2, 2.5], [3, 3.5], [4, 4.5], [5, 5.5], [6, 6.5], [7, 7.5]],
    "action": [10, 11, 12, 13, 14, 15, 16],
    "reward": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    "discount": [1.0, 0.9, 0.0, 0.7, 0.6, 0.5, 0.0],
}
DTYPES = {
    "step_type": "int32",
    "observation": "float32",
    "action": "int64",
    "next_step_type": "int32",
    "reward": "float32",
    "discount": "float32",
}


def test_pairs_have_the_numbers_of_tf_agents() -> None:
    found = converted(*({"steps": steps, "episode_id": 1} for steps in golden_steps()))
    for name, expected in GOLDEN.items():
        column = np.stack([getattr(row, name) for row in found])
        np.testing.assert_array_equal(column, np.array(expected, DTYPES[name]), err_msg=name)
        assert column.dtype == DTYPES[name]
    assert {str(row.policy_info) for row in found} == {"{}"}


def test_the_mask_is_zero_on_the_transition_into_the_terminal_state_where_tf_agents_discount_is_not() -> None:
    rows = converted(*golden_steps())
    assert [float(row.mask) for row in rows] == [1, 0, 1, 1, 1, 1, 1]
    assert rows[1].discount == np.float32(0.9)


def test_the_spec_names_the_fields_in_the_order_of_tf_agents_with_the_mask_last() -> None:
    spec = rlds.create_trajectory_spec(golden_steps())
    assert spec._fields == (
        "step_type",
        "observation",
        "action",
        "policy_info",
        "next_step_type",
        "reward",
        "discount",
        "mask",
    )
    assert spec.observation == ArraySpec("float32", (2,))
    assert {name: getattr(spec, name).dtype for name in DTYPES} == DTYPES
    assert (FIRST, MID, LAST) == (0, 1, 2)


def test_dict_observations_are_split_with_no_axis_of_pairs() -> None:
    seen = [{"a": np.array([t], np.float32), "in": {"b": np.uint8(t)}} for t in range(3)]
    steps = [step(flags, observation=o) for flags, o in zip((F, M, T), seen, strict=True)]
    rows = converted(steps)
    assert [row.observation["a"].tolist() for row in rows] == [[0], [1], [2]]
    assert [int(row.observation["in"]["b"]) for row in rows] == [0, 1, 2]
    spec = rlds.create_trajectory_spec([steps]).observation
    assert spec == {"a": ArraySpec("float32", (1,)), "in": {"b": ArraySpec("uint8", ())}}


def test_policy_info_is_of_the_step_and_the_next_and_never_sees_another_episode() -> None:
    def info(now: Any, after: Any) -> Any:
        return {"now": now["action"], "after": np.int64(-1) if after is None else after["action"]}

    rows = converted(run(F, M, L), run(F, L), policy_info=info)
    assert [(int(row.policy_info["now"]), int(row.policy_info["after"])) for row in rows] == [
        (0, 1),
        (1, 2),
        (2, -1),
        (0, 1),
        (1, -1),
    ]
    spec = rlds.create_trajectory_spec([run(F, L)], info)
    assert spec.policy_info == {"now": ArraySpec("int64", ()), "after": ArraySpec("int64", ())}


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        pytest.param([run(F, (False, False, True), L)], "episode 0, step 1: it is terminal; only the last", id="V1"),
        pytest.param([run(F, L), run((True, False, True))], "episode 1, step 0: it is terminal", id="V1-first"),
        pytest.param([run(F, M, F, L)], "step 1: it is in the middle .* no first step may follow it", id="V2"),
        pytest.param([run(F, L, M, L)], "step 1: it is a last step; only a first step may follow", id="V3"),
        pytest.param([run(F, L), run(F)], "episode 1, step 0: it is a first step and not a last one", id="lone-first"),
        pytest.param([run(F, F, L)], "step 0: it is a first step, and so is the one after", id="first-after-first"),
        pytest.param([run(M, L)], "episode 0, step 0: it is not a first step: the data starts in", id="starts-mid"),
        pytest.param([run(F, M), run(F, L)], "episode 0, step 1: it is not a last step, but", id="no-last"),
        pytest.param([run(F, L), run(F, M)], "episode 1, step 1: it is not a last step, but", id="no-last-at-the-end"),
        pytest.param([run(F, L, F, L)], "step 1: it is a last step; a new episode follows it inside", id="two-in-one"),
    ],
)
def test_each_rule_is_kept_by_naming_episode_and_step(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        converted(*dataset)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"reward": np.float64(1)}, r"reward is float64 \[\]; in the first step of the data it is float32"),
        ({"observation": np.zeros(3, np.float32)}, r"observation is float32 \[3\]"),
        ({"observation": {"a": np.zeros(2)}}, "observation is missing"),
        ({"note": 1}, "note is new"),
        ({"reward": {"a": 1}}, "reward is a mapping"),
        ({"is_last": 1}, "is_last is 1, not a bool"),
        ({"action": "left"}, "action is an array of <U4, not of numbers"),
        ({"action": [[1], [1, 2]]}, "action is not an array"),
    ],
)
def test_a_step_whose_fields_differ_is_named(change: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=f"episode 1, step 1: {sentence}"):
        converted(run(F, L), [step(F), step(L, **change)])


def test_a_step_that_lacks_a_field_is_named_with_what_it_has() -> None:
    bad = step(F)
    del bad["discount"]
    for call in (lambda: converted([bad]), lambda: rlds.create_trajectory_spec([[bad]])):
        with pytest.raises(DataError, match="episode 0, step 0: discount is missing; it has is_first"):
            call()


def test_free_fields_may_hold_anything_as_long_as_all_steps_have_them() -> None:
    rows = converted([step(F, note="long words"), step(L, note="x")])
    assert len(rows) == 2


@pytest.mark.parametrize("dataset", [[], [[]], [{"steps": []}]])
def test_data_without_steps_is_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="no RLDS steps"):
        rlds.create_trajectory_spec(dataset)
    with pytest.raises(DataError, match="no RLDS steps"):
        converted(*dataset)


def test_an_episode_that_is_a_mapping_without_steps_is_refused() -> None:
    with pytest.raises(DataError, match="has no steps; it has agent_id"):
        converted({"agent_id": 1})


def test_a_window_of_one_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="a window of 1 steps"):
        rlds.episodes_to_trajectories([], window=1)


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def sound(sizes: Sequence[int], terminal: Sequence[bool]) -> list[list[dict[str, Any]]]:
    numbers = iter(range(1000))
    return [
        [step((t == 0, t == n - 1, t == n - 1 and ends), next(numbers)) for t in range(n)]
        for n, ends in zip(sizes, terminal, strict=True)
    ]


@st.composite
def datasets(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    sizes = draw(lengths)
    return sound(sizes, draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))


def naive_pairs(dataset: Sequence[Sequence[dict[str, Any]]]) -> Iterator[tuple[Any, ...]]:
    """Flatten, pad with one first step, look at two at a time: as TF-Agents does."""
    flat = [s for episode in dataset for s in episode] + [{"is_first": True, "is_last": False, "is_terminal": False}]
    for now, after in pairwise(flat):
        kinds = [FIRST if s["is_first"] else LAST if s["is_last"] else MID for s in (now, after)]
        kinds = [LAST, LAST] if kinds == [FIRST, FIRST] else kinds
        discount = 0 if now["is_last"] and now["is_terminal"] else now["discount"]
        into_terminal = after["is_terminal"] and not after["is_first"]
        yield (*kinds, int(now["action"]), float(now["reward"]), float(discount), 0.0 if into_terminal else 1.0)


@given(datasets())
def test_n_steps_give_n_pairs_as_a_naive_reading_of_tf_agents_gives_them(dataset: Any) -> None:
    rows = [
        (int(r.step_type), int(r.next_step_type), int(r.action), float(r.reward), float(r.discount), float(r.mask))
        for r in rlds.episodes_to_trajectories(dataset)
    ]
    assert rows == list(naive_pairs(dataset))
    assert len(rows) == sum(map(len, dataset))


@given(datasets(), st.integers(3, 6))
def test_a_longer_window_is_pairs_in_a_row_and_never_spans_two_episodes(dataset: Any, window: int) -> None:
    expected = []
    for episode in dataset:
        pairs = list(rlds.episodes_to_trajectories([episode]))
        expected += [pairs[i : i + window - 1] for i in range(len(pairs) - window + 2)]
    found = list(rlds.episodes_to_trajectories(dataset, window=window))
    assert len(found) == len(expected) == sum(max(0, len(episode) + 2 - window) for episode in dataset)
    for trajectory, pairs in zip(found, expected, strict=True):
        for name in DTYPES:
            np.testing.assert_array_equal(getattr(trajectory, name), np.stack([getattr(row, name) for row in pairs]))


flags = st.tuples(st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=300)
@given(st.lists(st.lists(flags, min_size=1, max_size=4), min_size=1, max_size=3))
def test_exactly_the_valid_flags_are_accepted(dataset: list[list[Flags]]) -> None:
    def is_sound(episode: list[Flags]) -> bool:
        begins_once = [f for f, _, _ in episode] == [True] + [False] * (len(episode) - 1)
        ends_once = [last for _, last, _ in episode] == [False] * (len(episode) - 1) + [True]
        return begins_once and ends_once and all(last or not terminal for _, last, terminal in episode)

    if all(map(is_sound, dataset)):
        assert len(converted(*(run(*episode) for episode in dataset))) == sum(map(len, dataset))
    else:
        with pytest.raises(DataError):
            converted(*(run(*episode) for episode in dataset))


class InMemory:
    """A replay of lists."""

    def __init__(self, spec: TFAgentsTrajectory | None = None) -> None:
        self.spec = spec
        self.stored: list[Transitions] = []

    def add(self, episodes: Sequence[Transitions]) -> int:
        self.stored += episodes
        return sum(episode.length for episode in episodes)


def test_a_push_returns_the_transitions_really_stored() -> None:
    replay = InMemory()
    assert rlds.push_to_replay(golden_steps(), replay) == 3  # of 7 steps: 2 + 0 + 1 + 0
    assert [entry.length for entry in replay.stored] == [2, 1]
    assert replay.stored[0].mask.tolist() == [1, 0]
    assert replay.stored[0].discount.tolist() == [1, np.float32(0.9)]
    assert [entry.terminated for entry in replay.stored] == [True, False]


def test_actions_by_name_are_split_and_pushed_too() -> None:
    steps = [step(flags, action={"arm": np.zeros(2), "grip": np.int8(n)}) for n, flags in enumerate((F, M, L))]
    assert [int(row.action["grip"]) for row in converted(steps)] == [0, 1, 2]
    replay = InMemory()
    assert rlds.push_to_replay([steps], replay) == 2
    assert isinstance(replay.stored[0].action, dict)
    assert replay.stored[0].action["grip"].tolist() == [0, 1]


@given(datasets(), st.data())
def test_a_push_with_one_bad_step_anywhere_stores_nothing(dataset: Any, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, len(dataset) - 1))
    place = data.draw(st.integers(0, len(dataset[bad]) - 1))
    dataset[bad][place]["action"] = np.float16(0)
    dataset.append(run(F, L))
    replay = InMemory(rlds.create_trajectory_spec([run(F, L)]))
    with pytest.raises(DataError):
        rlds.push_to_replay(iter(dataset), replay)
    assert replay.stored == []


def test_a_spec_that_differs_from_the_replays_is_reported_first() -> None:
    replay = InMemory(rlds.create_trajectory_spec([[step(F, action=np.float32(0))]]))
    with pytest.raises(DataError, match=r"action of the data is .*int64.*; the replay holds .*float32"):
        rlds.push_to_replay([run(F, M)], replay)  # has no last step, too
    assert rlds.push_to_replay([run(F, L)], InMemory(rlds.create_trajectory_spec([run(F, L)]))) == 1


def test_a_push_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no RLDS steps"):
        rlds.push_to_replay([[], []], InMemory())


@given(episodes())
def test_our_episodes_to_steps_and_back_are_the_same(episode: Episode) -> None:
    steps = rlds.to_steps(episode)
    assert_same(rlds.from_steps(iter(steps), episodes_.header(episode)), episode)
    rows = list(rlds.episodes_to_trajectories([steps]))
    assert len(rows) == episode.length
    np.testing.assert_array_equal([row.mask for row in rows[:-1]], episode.masks)


def test_steps_of_an_episode_with_slashes_and_no_extras_come_back() -> None:
    episode = make(observations={"robot/state": np.zeros((6, 2)), "robot.x": np.ones((6, 0), np.int16)})
    assert_same(rlds.from_steps(rlds.to_steps(episode), episodes_.header(episode)), episode)


def test_external_steps_become_an_episode_with_their_other_fields_as_extras() -> None:
    steps = [
        step(flags, n, observation={"arm": {"joint": np.array([n], np.float32)}}, force={"z": np.float64(n)})
        for n, flags in enumerate((F, M, T))
    ]
    made = rlds.from_steps({"steps": steps}, episodes_.header(make()))
    assert made.observations["arm/joint"].tolist() == [[0], [1], [2]]
    assert made.extras["force/z"].tolist() == [0, 1, 2]
    assert made.policy_versions.tolist() == [-1, -1, -1]
    assert not made.interventions.any()
    np.testing.assert_array_equal(made.policy_actions, made.actions)


def test_what_steps_cannot_keep_is_refused() -> None:
    header = episodes_.header(make())
    with pytest.raises(DataError, match="note of these steps is not numeric"):
        rlds.from_steps([step(F, note="a"), step(T, note="b")], header)
    with pytest.raises(DataError, match="note of these steps is not numeric"):
        rlds.from_steps([step(F, note=[1]), step(T, note=[1, 2])], header)
    with pytest.raises(DataError, match="is_terminal of the last step and terminated of the episode differ"):
        rlds.from_steps(run(F, L), header)
    with pytest.raises(DataError, match=r"two fields of its steps are named extras\.x"):
        rlds.from_steps([step(F, x=1, extras={"x": 2}), step(T, x=1, extras={"x": 2})], header)
    twice = {"a/b": np.zeros(1), "a": {"b": np.ones(1)}}
    with pytest.raises(DataError, match="two fields of its steps are named observation/a/b"):
        rlds.from_steps([step(F, observation=twice), step(T, observation=twice)], header)


def test_images_are_views_not_copies() -> None:
    episode = with_images()
    assert np.shares_memory(rlds.to_steps(episode)[0]["observation"]["front"], episode.observations["front"])
