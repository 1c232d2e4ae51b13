"""Labels of frames, and which episodes are trained, calibrated and tested on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nightshift import config
from nightshift.data.episode import Episode
from nightshift.errors import DataError
from nightshift.rewards import segments
from nightshift.types import INSTRUCTION
from tests.conftest import small_params
from tests.data import examples


def settings(**changes: Any) -> config.Classifier:
    return config.Classifier.model_validate({**small_params()["classifier"], **changes})


def episode(state: int | None, *, success: bool = True, task: str = "lift_cube", **changes: Any) -> Episode:
    origin = replace(examples.PROVENANCE, task=task, init_state=state, origin=changes.pop("origin", ""))
    ending = {"success": success, "terminated": success, "truncated": not success}
    return replace(examples.with_images(steps=10, seed=state or 0), provenance=origin, **{**ending, **changes})


def test_of_a_success_the_last_frame_is_positive_and_the_ambiguous_ones_before_it_are_left_out() -> None:
    positive, negative = segments.of_episode(episode(0), ambiguous_steps=3)
    assert (positive.success, list(positive.frames)) == (True, [9])
    assert (negative.success, list(negative.frames)) == (False, [0, 1, 2, 3, 4, 5])


def test_of_a_failure_every_frame_is_negative() -> None:
    (negative,) = segments.of_episode(episode(0, success=False), ambiguous_steps=3)
    assert (negative.success, len(negative.frames)) == (False, 10)


def test_ambiguous_steps_are_control_steps_where_a_decision_has_several() -> None:
    _, negative = segments.of_episode(episode(0, metadata={"chunk": 4}), ambiguous_steps=5)
    assert list(negative.frames) == list(range(7)), "five control steps are two decisions"


def test_a_success_that_is_all_ambiguous_has_no_negative() -> None:
    (only,) = segments.of_episode(episode(0), ambiguous_steps=9)
    assert only.success


def test_episodes_of_one_start_are_in_one_part_and_every_part_has_successes_and_failures() -> None:
    played = [episode(state, success=member == 0) for state in range(30) for member in range(3)]
    failed = [episode(state, success=False) for state in range(100, 120)]
    imported = [episode(None, origin=f"demo_{number}") for number in range(10)]
    everything = [*played, *failed, *imported]
    parts = segments.split(everything, settings(calibration_share=0.3, test_share=0.2), seed=0)
    assert len(parts) == 30 + 20 + 10
    found = segments.by_part(everything, parts, 3)
    starts = {part: {segments.start_of(one.episode) for one in own} for part, own in found.items()}
    assert not starts["train"] & starts["calibration"]
    assert not starts["train"] & starts["test"]
    assert not starts["calibration"] & starts["test"]
    assert {part: len(own) for part, own in starts.items()} == {"train": 30, "calibration": 18, "test": 12}
    assert all({one.success for one in own} == {True, False} for own in found.values())
    assert parts == segments.split(everything, settings(calibration_share=0.3, test_share=0.2), seed=0)
    assert parts != segments.split(everything, settings(calibration_share=0.3, test_share=0.2), seed=1)


def test_three_successful_starts_are_one_for_each_part() -> None:
    parts = segments.split([episode(state) for state in range(3)], settings(), seed=0)
    assert sorted(parts.values()) == ["calibration", "test", "train"]
    with pytest.raises(DataError, match=r"lift_cube has 2 start\(s\) with a successful episode"):
        segments.split([episode(state) for state in range(2)], settings(), seed=0)


@pytest.mark.parametrize("split", ["eval", "validation"])
def test_states_of_evaluation_and_validation_are_refused(split: Any) -> None:
    good = episode(0)
    held_out = replace(good, provenance=replace(good.provenance, split=split))
    with pytest.raises(DataError, match=f"is from a {split} state, which is not for training"):
        segments.check([good, held_out], settings())


def test_several_tasks_need_the_instruction() -> None:
    both = [episode(0), episode(0, task="push_plate")]
    with pytest.raises(DataError, match=r"2 tasks \(lift_cube, push_plate\)") as refusal:
        segments.check(both, settings(inputs=["front"]))
    assert refusal.value.next_step == "add instruction to classifier.inputs in params.yaml"
    segments.check(both, settings(inputs=["front", INSTRUCTION]))


def test_images_of_another_size_are_refused_by_the_episode_that_has_them() -> None:
    other = examples.with_images(steps=4, size=16)
    with pytest.raises(DataError, match=r"front has shape \[16, 16, 3\] in the episode .* and \[8, 8, 3\] before"):
        segments.shapes([episode(0), other])


def test_what_shows_success_alone_cannot_be_learned_from() -> None:
    shows_success = segments.of_episode(episode(0), ambiguous_steps=100)
    with pytest.raises(DataError, match=r"no episode to train on shows a frame without success") as refusal:
        segments.check_labels(shows_success)
    assert "classifier.ambiguous_steps" in refusal.value.next_step
    segments.check_labels([*shows_success, *segments.of_episode(episode(1), ambiguous_steps=3)])


def test_a_batch_is_half_successes_whatever_the_classes_are() -> None:
    found = [one for state in range(4) for one in segments.of_episode(episode(state), 3)]
    frames = segments.Frames(found, ["front", INSTRUCTION])
    observations, labels = frames.balanced(np.random.default_rng(0), 12)
    assert labels.tolist() == [1] * 6 + [0] * 6
    last = [one.episode.observations["front"][9].tolist() for one in found if one.success]
    assert all(image.tolist() in last for image in observations["front"][:6])
    assert not any(image.tolist() in last for image in observations["front"][6:])
    assert observations[INSTRUCTION].tolist() == ["lift the cube"] * 12
