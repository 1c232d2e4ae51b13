from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from nightshift.errors import DataError, StreamError
from nightshift.stream.weights import WEIGHTS, WeightPublisher

ARRAYS = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "layer.bias": np.zeros(2, np.float32)}


def test_weights_come_back_as_they_were_published(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path)
    assert publisher.latest() is None
    assert publisher.publish(ARRAYS) == 0
    latest = publisher.latest()
    assert latest is not None
    for name, array in latest.arrays().items():
        np.testing.assert_array_equal(array, ARRAYS[name])
    np.testing.assert_array_equal(load(latest.content)["layer.weight"], ARRAYS["layer.weight"])


def test_weights_are_returned_only_if_they_are_newer(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path)
    for _ in range(3):
        publisher.publish(ARRAYS)
    assert publisher.latest(newer_than=2) is None
    newer = publisher.latest(newer_than=0)
    assert newer is not None
    assert newer.version == 2


def test_the_version_goes_on_after_a_restart_and_the_weights_are_still_there(tmp_path: Path) -> None:
    first = WeightPublisher(tmp_path)
    for _ in range(5):
        first.publish(ARRAYS)
    first.close()
    second = WeightPublisher(tmp_path)
    assert second.version == 4
    assert second.latest() == first.latest()
    assert second.publish(ARRAYS) == 5


def test_an_actor_ahead_of_its_learner_is_an_error(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path)
    publisher.publish(ARRAYS)
    with pytest.raises(StreamError, match="an actor has weights of version 7, and the last published here is 0"):
        publisher.latest(newer_than=7)


@pytest.mark.parametrize("content", [b"", b"garbage" * 10])
def test_a_damaged_file_is_reported_so_that_no_version_is_reused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(DataError, match=r"weights\.safetensors is damaged"):
        WeightPublisher(tmp_path)
