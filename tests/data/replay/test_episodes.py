import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data.episode import Episode
from nightshift.data.replay import TrajectoryReplay, trajectory_from_episode
from nightshift.errors import DataError
from tests.data.examples import episodes, make


@given(st.lists(episodes(min_steps=2), min_size=1, max_size=4), st.integers(0, 2**31))
def test_every_sample_is_a_transition_of_its_episode(some: list[Episode], seed: int) -> None:
    replay = TrajectoryReplay(seed=seed)
    replay.add_trajectories([trajectory_from_episode(one, number) for number, one in enumerate(some)])
    assert replay.total_samples == sum(one.length - 1 for one in some)
    batch = replay.sample(20)
    for row in range(20):
        one, t = some[batch["episode"][row]], batch["t"][row]
        for name, column in one.observations.items():
            np.testing.assert_array_equal(batch["curr_obs"][name][row], column[t])
            np.testing.assert_array_equal(batch["next_obs"][name][row], column[t + 1])
        np.testing.assert_array_equal(batch["actions"][row], one.actions[t])
        np.testing.assert_array_equal(batch["forward_inputs"]["policy_actions"][row], one.policy_actions[t])
        assert batch["mask"][row] == one.masks[t]
        assert batch["intervene_flags"][row] == one.interventions[t]
        assert batch["versions"][row] == one.policy_versions[t]


def test_an_episode_without_a_transition_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="lift_cube, init state 17 has one step"):
        trajectory_from_episode(make(steps=1), 0)
