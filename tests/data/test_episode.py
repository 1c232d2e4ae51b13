from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data import episode
from nightshift.data.episode import Episode
from nightshift.errors import DataError
from nightshift.types import RolloutRequest, Trajectory
from tests.data.examples import PROVENANCE, assert_same, episodes, make, with_images


def test_an_episode_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    original = with_images()
    episode.save(original, tmp_path / "a.safetensors")
    assert_same(episode.load(tmp_path / "a.safetensors"), original)


@given(episodes())
def test_any_episode_survives_the_wire(original: Episode) -> None:
    assert_same(episode.from_bytes(episode.to_bytes(original)), original)


def test_the_same_episode_gives_the_same_bytes() -> None:
    assert episode.to_bytes(with_images()) == episode.to_bytes(with_images())


@given(episodes())
def test_steps_have_the_semantics_of_rlds(one: Episode) -> None:
    assert one.is_first.tolist() == [True] + [False] * (one.length - 1)
    assert one.is_last.tolist() == [False] * (one.length - 1) + [True]
    assert not (one.is_terminal & ~one.is_last).any()
    assert one.is_terminal[-1] == one.terminated
    assert len(one.masks) == one.length - 1
    np.testing.assert_array_equal(one.masks == 0, one.is_terminal[1:])


def played(*, success: bool) -> Trajectory:
    request = RolloutRequest(task="lift_cube", split="train", init_state=17, controller="expert", seed=0)
    meant = np.full((3, 7), 2.0, np.float32)
    return Trajectory(
        request=request,
        member=0,
        observations={"proprio": np.arange(6, dtype=np.float32).reshape(3, 2)},
        final={"proprio": np.array([6, 7], np.float32)},
        actions=meant,
        executed=np.clip(meant, -1, 1),
        log_probs=np.zeros((3, 7), np.float32),
        chunk=1,
        success=success,
    )


@pytest.mark.parametrize("success", [True, False])
def test_a_played_episode_ends_with_what_its_last_action_led_to(success: bool) -> None:
    made = episode.from_trajectory(played(success=success), PROVENANCE)
    np.testing.assert_array_equal(made.observations["proprio"], np.arange(8).reshape(4, 2))
    assert made.rewards.tolist() == [0, 0, float(success), 0]
    assert (made.terminated, made.truncated) == (success, not success)
    assert made.masks.tolist() == [1, 1, 0 if success else 1]


def test_what_was_executed_stands_beside_what_was_meant() -> None:
    made = episode.from_trajectory(played(success=True), PROVENANCE)
    assert made.actions[:3].max() == 1
    assert made.policy_actions[:3].min() == 2
    assert not made.actions[3].any()
    assert not made.policy_actions[3].any()


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\xff" * 100])
def test_a_file_that_is_not_an_episode_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.safetensors"):
        episode.load(path)


@given(st.data())
def test_a_flipped_bit_gives_an_error_or_another_episode_but_nothing_else(data: st.DataObject) -> None:
    content = bytearray(episode.to_bytes(make(steps=2)))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        episode.from_bytes(content)
    except DataError as error:
        assert error.what


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(DataError):
        episode.load(path)
    assert not Path("hacked").exists()
