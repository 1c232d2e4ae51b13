from __future__ import annotations

import pytest

from nightshift.data import limits
from nightshift.data.limits import Limits
from nightshift.errors import DataError

MB = 10**6
SMALL = Limits(floor=MB, ceiling=100 * MB)


@pytest.mark.parametrize(
    ("unpacked", "stored", "fits"),
    [
        (MB, 1, True),
        (MB + 1, 1, False),
        (limits.RATIO * 10**5, 10**5, True),
        (limits.RATIO * 10**5 + 1, 10**5, False),
        (100 * MB, 90 * MB, True),
        (100 * MB + 1, 100 * MB, False),
    ],
)
def test_an_episode_may_take_the_floor_or_a_multiple_of_its_file_but_never_more_than_the_ceiling(
    unpacked: int, stored: int, fits: bool
) -> None:
    if fits:
        SMALL.check_episode(unpacked, stored, "here")
        return
    with pytest.raises(DataError, match="here would unpack from"):
        SMALL.check_episode(unpacked, stored, "here")


def test_the_limit_that_the_error_names_admits_the_episode() -> None:
    with pytest.raises(DataError, match=r"from 85\.0 kB to 1\.6 GB; at most 536\.9 MB are allowed") as refusal:
        limits.DEFAULT.check_episode(1_600 * MB, 85_000, "a.hdf5, demo_0")
    assert "--max-episode-gb 2" in refusal.value.next_step
    Limits.of_gigabytes(2).check_episode(1_600 * MB, 85_000, "a.hdf5, demo_0")


def test_the_episodes_of_a_source_are_bounded_together() -> None:
    SMALL.check_source(limits.EPISODES * MB, 10, "goal.hdf5")
    with pytest.raises(DataError, match=r"goal\.hdf5 has 10 bytes and its episodes more than 16\.0 MB"):
        SMALL.check_source(limits.EPISODES * MB + 1, 10, "goal.hdf5")


@pytest.mark.parametrize("most", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(most: float) -> None:
    with pytest.raises(DataError, match="an episode cannot have at most"):
        Limits.of_gigabytes(most)
