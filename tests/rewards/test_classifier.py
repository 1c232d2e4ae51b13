"""The classifier's folder: what is saved is what is loaded, and what does not fit is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, files
from nightshift.errors import ConfigError, DataError
from nightshift.rewards import classifier
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.types import INSTRUCTION
from tests.policies.examples import SHAPES, observe
from tests.rewards.test_segments import settings


def network(**changes: Any) -> SuccessClassifier:
    torch.manual_seed(0)
    section = settings(**{"inputs": ["agentview", "wrist", INSTRUCTION], "channels": [8], "hidden": 16, **changes})
    return SuccessClassifier.from_config(section, SHAPES)


def trained(**changes: Any) -> Trained:
    facts: dict[str, Any] = {"threshold": 0.7, "ambiguous_steps": 3, "calibration": {"target": 0.9}}
    return Trained(network=network(**changes), tasks=["lift_cube"], starts={"lift_cube/1": "train"}, **facts)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the network in the folder's JSON, as another version would have written it."""
    content = json.loads((folder / classifier.SPEC).read_text())
    content["network"].update(changes)
    weights = (folder / classifier.WEIGHTS).read_bytes()
    starts = (folder / classifier.STARTS).read_text()
    with files.new_folder(folder) as new:
        (new / classifier.WEIGHTS).write_bytes(weights)
        (new / classifier.STARTS).write_text(starts)
        files.write_json(new / classifier.SPEC, content)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    before = trained()
    classifier.save(before, tmp_path / "made")
    after = classifier.load(tmp_path / "made")
    np.testing.assert_array_equal(after.network.probabilities(observe(5)), before.network.probabilities(observe(5)))
    assert (after.threshold, after.tasks, after.starts) == (0.7, ["lift_cube"], {"lift_cube/1": "train"})
    files.verify_folder(tmp_path / "made", "")


def test_the_name_changes_with_the_content_and_fits_the_parameter(tmp_path: Path) -> None:
    classifier.save(trained(), tmp_path / "one")
    classifier.save(trained(), tmp_path / "same")
    classifier.save(trained(hidden=8), tmp_path / "other")
    name = classifier.name_of(tmp_path / "one")
    assert name == classifier.name_of(tmp_path / "same")
    assert name != classifier.name_of(tmp_path / "other")
    assert re.fullmatch(config.CLASSIFIER_NAME, name)


def test_the_verdict_does_not_depend_on_dropout_or_on_the_frames_beside() -> None:
    found = network(dropout=0.5)
    seen = observe(4)
    together = found.probabilities(seen)
    alone = [found.probabilities({name: values[i : i + 1] for name, values in seen.items()})[0] for i in range(4)]
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_the_instruction_changes_the_verdict() -> None:
    found, seen = network(), dict(observe(1))
    before = found.probabilities(seen)
    assert found.probabilities({**seen, INSTRUCTION: np.array(["open the drawer"])}) != before


def test_another_camera_or_image_size_is_refused() -> None:
    found = network()
    found.check(SHAPES, "the episodes")
    with pytest.raises(DataError, match=r"sees the camera wrist, and the cameras of the episodes are: agentview"):
        found.check({"agentview": (32, 32, 3), "proprio": (4,)}, "the episodes")
    with pytest.raises(DataError, match=r"wrist of the episodes has shape \[64, 64, 3\], .* trained on \[32, 32, 3\]"):
        found.check({**SHAPES, "wrist": (64, 64, 3)}, "the episodes")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    classifier.save(trained(), folder)
    rewrite(folder, architecture="resnet")
    with pytest.raises(DataError, match="has the architecture 'resnet', not 'cnn'"):
        classifier.load(folder)
    rewrite(folder, architecture="cnn", hidden=8)
    with pytest.raises(DataError, match="has not the weights of the network in "):
        classifier.load(folder)
    rewrite(folder, depth=3)
    with pytest.raises(DataError, match="is not a success classifier of this version"):
        classifier.load(folder)


def test_damage_and_absence_are_refused_with_the_way_back(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no success classifier in") as refusal:
        classifier.load(tmp_path / "none")
    assert "nightshift classifier train" in refusal.value.next_step
    classifier.save(trained(), tmp_path / "made")
    weights = tmp_path / "made" / classifier.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"classifier\.safetensors is damaged"):
        classifier.load(tmp_path / "made")


def test_a_task_that_it_was_not_trained_on_is_refused() -> None:
    with pytest.raises(DataError, match="was trained on lift_cube, and not on open_drawer"):
        trained().check_tasks(["lift_cube", "open_drawer"])


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (["behind"], "classifier.inputs has behind, and the cameras of the episodes are: agentview, wrist"),
        (["agentview", "proprio"], "the success classifier sees cameras and the instruction"),
        ([INSTRUCTION], "the success classifier sees cameras and the instruction"),
    ],
)
def test_inputs_are_cameras_and_the_instruction(inputs: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        network(inputs=inputs)
