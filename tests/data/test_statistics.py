from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data.episode import Episode
from nightshift.data.statistics import Histogram, compute
from nightshift.errors import DataError
from tests.data.examples import make, with_images


def test_only_steps_with_an_action_count() -> None:
    episodes = [make(steps=5, seed=0), make(steps=9, seed=1, success=False, terminated=False, truncated=True)]
    episodes[0].actions[-1] = 99
    episodes[0].rewards[-1] = 99
    found = compute(episodes)
    assert (found.episodes, found.steps, found.successes, found.terminated) == (2, 12, 1, 1)
    assert (found.lengths.smallest, found.lengths.largest, found.lengths.mean) == (4, 8, 6)
    assert (found.returns.smallest, found.returns.largest) == (1, 1)
    acted = np.concatenate([episode.actions[:-1] for episode in episodes])
    for number, dimension in enumerate(found.actions):
        assert dimension.smallest == pytest.approx(acted[:, number].min())
        assert dimension.largest == pytest.approx(acted[:, number].max())
        assert dimension.mean == pytest.approx(acted[:, number].mean(), abs=1e-6)
        assert dimension.std == pytest.approx(acted[:, number].std(), rel=1e-5)


def test_interventions_at_the_last_step_do_not_count() -> None:
    episodes = [with_images(steps=8, seed=seed) for seed in range(3)]
    assert compute(episodes).interventions == sum(int(episode.interventions[:-1].sum()) for episode in episodes)


def test_tasks_and_sources_are_counted() -> None:
    found = compute([make(seed=0), make(seed=1)])
    assert (found.tasks, found.sources) == ({"lift_cube": 2}, {"expert": 2})


def test_an_empty_set_is_an_error() -> None:
    with pytest.raises(DataError, match="there are no episodes"):
        compute([])


@given(values=st.lists(st.one_of(st.integers(-500, 500), st.floats(-1e6, 1e6)), min_size=1, max_size=50))
def test_every_value_falls_into_one_bin(values: list[float]) -> None:
    for histogram in (Histogram.of(np.array(values, float)), Histogram.of_counts(np.array(values, float))):
        assert histogram.counts.sum() == len(values)
        assert len(histogram.edges) == len(histogram.counts) + 1
        assert histogram.edges[0] <= min(values) and histogram.edges[-1] >= max(values)


@given(values=st.lists(st.integers(0, 5000), min_size=2, max_size=50, unique=True))
def test_integers_get_bins_of_integer_width_and_no_empty_last_bin(values: list[int]) -> None:
    histogram = Histogram.of_counts(np.array(values, float))
    widths = set(np.diff(histogram.edges))
    assert len(widths) == 1 and widths.pop() % 1 == 0
    assert len(histogram.counts) <= 20
    assert histogram.counts[0] and histogram.counts[-1]


def test_returns_that_differ_in_their_last_bit_share_one_bin() -> None:
    near = [np.array([0.1, 0.2, 0.3, 0]), np.array([0.3, 0.2, 0.1, 0])]
    found = compute(make(steps=4, rewards=rewards) for rewards in near)
    assert found.returns.smallest < found.returns.largest
    assert found.returns.histogram.counts.tolist() == [2]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_actions_of_any_shape_have_a_dimension_for_each_number(shape: tuple[int, ...]) -> None:
    actions = np.arange(float(4 * np.prod(shape, dtype=int))).reshape(4, *shape)
    found = compute([make(steps=4, actions=actions), make(steps=1, actions=actions[:1])])
    assert [dimension.largest for dimension in found.actions] == actions[2].reshape(-1).tolist()
    assert found.steps == 3


def test_at_most_one_episode_is_in_memory() -> None:
    images = []

    def episodes() -> Iterator[Episode]:
        for seed in range(6):
            episode = with_images(seed=seed)
            images.append(weakref.ref(episode.observations["front"]))
            yield episode

    def watched() -> Iterator[Episode]:
        for episode in episodes():
            yield episode
            assert sum(image() is not None for image in images) == 1

    assert compute(watched()).episodes == 6
