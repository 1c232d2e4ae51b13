from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from nightshift.errors import DataError, StreamError
from nightshift.stream import weights
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


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.zeros(2), "torch.float32"),
        (np.zeros(2, np.complex64), "complex64"),
        ([0.0, 1.0], "list"),
    ],
)
def test_weights_that_cannot_travel_are_refused_by_name(tmp_path: Path, array: Any, kind: str) -> None:
    publisher = WeightPublisher(tmp_path)
    with pytest.raises(DataError, match=rf"the weights head\.bias are {kind}; numpy arrays of bool, "):
        publisher.publish({"head.weight": np.zeros(2), "head.bias": array})
    assert publisher.version == -1
    assert not (tmp_path / WEIGHTS).exists()


def test_weights_that_are_too_large_are_refused_with_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_BYTES", 30)
    publisher = WeightPublisher(tmp_path)
    with pytest.raises(DataError, match=r"have 32 bytes and 30 can travel; the largest array is layer\.weight with 24"):
        publisher.publish(ARRAYS)
    assert publisher.version == -1


def test_one_process_at_a_time_publishes(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path), pytest.raises(StreamError, match="is in use"):
        WeightPublisher(tmp_path)
    WeightPublisher(tmp_path).close()
