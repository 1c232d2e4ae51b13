from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import store
from nightshift.errors import DataError
from tests.data.test_episode import PROVENANCE, make


def write(path: Path) -> None:
    other = replace(PROVENANCE, init_state=3)
    store.write(path, {"train": [make(), make(provenance=other)], "validation": [make()]})


def test_a_dataset_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "d")
    data = store.read(tmp_path / "d")
    np.testing.assert_array_equal(data.parts["train"].actions, np.concatenate([make().actions] * 2))
    np.testing.assert_array_equal(data.parts["validation"].observations["proprio"], make().observations["proprio"])


def test_statistics_are_those_of_the_training_split(tmp_path: Path) -> None:
    write(tmp_path / "d")
    statistics = store.read(tmp_path / "d").statistics["actions"]
    np.testing.assert_allclose(statistics["mean"], make().actions.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(statistics["max"], make().actions.max(axis=0))


def test_a_damaged_dataset_is_refused_and_the_file_named(tmp_path: Path) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / "train.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.safetensors is damaged") as error:
        store.read(tmp_path / "d")
    assert "dvc checkout" in error.value.next_step


def test_a_version_tells_what_is_in_it(tmp_path: Path) -> None:
    write(tmp_path / "d")
    content = store.describe((tmp_path / "d" / store.INDEX).read_bytes())
    assert content["episodes"] == 3
    assert content["rows"] == [("lift_cube", "train", 2, 12), ("lift_cube", "validation", 1, 6)]
    assert content["commits"] == ["abc1234"]
