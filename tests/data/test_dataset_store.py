from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import dataset_store
from nightshift.data.episode import Episode
from nightshift.data.schema import Schema
from nightshift.errors import DataError
from tests.data.examples import PROVENANCE, assert_same, make, with_images


def write(path: Path) -> None:
    other = replace(PROVENANCE, init_state=3)
    parts: dict[dataset_store.DatasetSplit, list[Episode]] = {
        "train": [make(), make(seed=1, provenance=other)],
        "validation": [make()],
    }
    dataset_store.write(path, parts, Schema.of(make()))


def test_the_episodes_come_back_as_they_were_written(tmp_path: Path) -> None:
    train, held = [with_images(seed=1), with_images(seed=2, steps=3)], [with_images(seed=3)]
    dataset_store.write(tmp_path / "d", {"train": train, "validation": held}, Schema.of(held[0]))
    data = dataset_store.read(tmp_path / "d")
    for original, again in zip([*train, *held], [*data.episodes("train"), *data.episodes("validation")], strict=True):
        assert_same(original, again)


def test_a_policy_learns_from_all_steps_but_the_last_of_each_episode(tmp_path: Path) -> None:
    write(tmp_path / "d")
    steps = dataset_store.read(tmp_path / "d").steps("train", ["objects"])
    expected = [make().actions[:-1], make(seed=1).actions[:-1]]
    np.testing.assert_array_equal(steps.actions[:, 0], np.concatenate(expected))
    assert steps.mask.all()
    seen = [make().observations["objects"][:-1], make(seed=1).observations["objects"][:-1]]
    np.testing.assert_array_equal(steps.observe(np.arange(len(steps.mask)))["objects"], np.concatenate(seen))
    assert list(steps.observations) == ["objects"]


def test_a_chunk_never_reaches_into_the_next_episode(tmp_path: Path) -> None:
    one, other = make(steps=4, seed=1), make(steps=3, seed=2)
    dataset_store.write(tmp_path / "d", {"train": [one, other], "validation": [one]}, Schema.of(one))
    steps = dataset_store.read(tmp_path / "d").steps("train", [], chunk=3)
    assert steps.mask.sum(axis=1).tolist() == [3, 2, 1, 2, 1]
    np.testing.assert_array_equal(steps.actions[0], one.actions[:3])
    np.testing.assert_array_equal(steps.actions[1, :2], one.actions[1:3])
    np.testing.assert_array_equal(steps.actions[3, :2], other.actions[:2])


def test_cloning_targets_are_policy_actions_but_executed_actions_during_interventions(tmp_path: Path) -> None:
    one = with_images()
    dataset_store.write(tmp_path / "d", {"train": [one], "validation": [one]}, Schema.of(one))
    imitated = dataset_store.read(tmp_path / "d").steps("train", []).actions[:, 0]
    by_person = one.interventions[:-1]
    assert by_person.any()
    assert not by_person.all()
    np.testing.assert_array_equal(imitated[by_person], one.actions[:-1][by_person])
    np.testing.assert_array_equal(imitated[~by_person], one.policy_actions[:-1][~by_person])


def test_statistics_are_of_the_training_split(tmp_path: Path) -> None:
    write(tmp_path / "d")
    data = dataset_store.read(tmp_path / "d")
    actions = data.steps("train", []).actions[:, 0]
    np.testing.assert_allclose(data.statistics["actions"]["mean"], actions.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(data.statistics["actions"]["max"], actions.max(axis=0))


def test_a_damaged_dataset_is_refused_and_the_file_named(tmp_path: Path) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / "train.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.safetensors is damaged") as error:
        dataset_store.read(tmp_path / "d")
    assert "dvc checkout" in error.value.next_step


def test_describe_summarises_a_version(tmp_path: Path) -> None:
    write(tmp_path / "d")
    content = dataset_store.describe((tmp_path / "d" / dataset_store.INDEX).read_bytes())
    assert content["episodes"] == 3
    assert content["rows"] == [("lift_cube", "train", 2, 12), ("lift_cube", "validation", 1, 6)]
    assert content["commits"] == ["abc1234"]
