import numpy as np
import pytest

from nightshift.data import rlds
from nightshift.data.replay import TrajectoryReplay
from nightshift.data.rlds_replay import TrajectoryReplayWriter
from nightshift.errors import DataError
from tests.data.examples import make, with_images


def test_pushed_episodes_are_sampled_with_their_masks_and_their_own_next_frames() -> None:
    some = [
        with_images(seed=0),
        with_images(seed=1, steps=1),
        with_images(seed=2, terminated=False, truncated=True),
    ]
    replay = TrajectoryReplay()
    assert rlds.push_to_replay(map(rlds.to_steps, some), TrajectoryReplayWriter(replay)) == 10 == replay.total_samples
    batch = replay.sample(200)
    masks = [some[0].masks, some[2].masks]
    for row in range(200):
        source = next(e for e in (some[0], some[2]) if (e.actions[batch["t"][row]] == batch["actions"][row]).all())
        t = batch["t"][row]
        np.testing.assert_array_equal(batch["next_obs"]["front"][row], source.observations["front"][t + 1])
        assert batch["mask"][row] == source.masks[t]
    assert masks[0].min() == 0 and masks[1].min() == 1


def test_a_push_of_other_data_stores_nothing() -> None:
    replay = TrajectoryReplay()
    rlds.push_to_replay([rlds.to_steps(make())], TrajectoryReplayWriter(replay))
    other = make(actions=np.zeros((6, 2), np.float32), policy_actions=np.zeros((6, 2), np.float32))
    with pytest.raises(DataError):
        rlds.push_to_replay([rlds.to_steps(other)], TrajectoryReplayWriter(replay))
    assert replay.total_samples == 5


def test_only_what_there_is_room_for_is_counted() -> None:
    replay = TrajectoryReplay(capacity=2)
    some = [rlds.to_steps(make(steps=n, seed=n)) for n in (3, 4, 5)]
    assert rlds.push_to_replay(some, TrajectoryReplayWriter(replay)) == 7 == replay.total_samples


def test_actions_in_several_arrays_are_refused_and_named() -> None:
    steps = [
        {**step, "action": {"arm": step["action"][:6], "hand": step["action"][6:]}} for step in rlds.to_steps(make())
    ]
    with pytest.raises(DataError, match="action/arm, action/hand"):
        rlds.push_to_replay([steps], TrajectoryReplayWriter(TrajectoryReplay()))


def test_no_two_episodes_have_one_number() -> None:
    replay = TrajectoryReplay()
    for _ in range(2):
        rlds.push_to_replay([rlds.to_steps(make()), rlds.to_steps(make(seed=1))], TrajectoryReplayWriter(replay))
    assert len(set(replay.sample(500)["episode"].tolist())) == 4
