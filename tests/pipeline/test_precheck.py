"""Sections of params.yaml that do not fit each other are refused before any stage has worked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift import config
from nightshift.config import merged
from nightshift.errors import DeviceError, NightshiftError
from nightshift.pipeline import precheck
from nightshift.project import paths
from tests.conftest import REPOSITORY, edit, nightshift, small_params

SEEING: dict[str, Any] = {
    "env": {"cameras": {"names": ["agentview"], "size": 32, "shadows": True}},
    "policy": {
        "family": "vla",
        "inputs": ["agentview", "proprio", "instruction"],
        "patch_size": 16,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "max_words": 4,
        "chunk": 4,
        "head": "gaussian",
        "augmentation": {"crop": 2, "jitter": 0.1},
    },
}


def params(**changes: Any) -> config.Params:
    return config.Params.model_validate(merged(merged(small_params(), SEEING), changes))


def test_sections_that_fit_pass() -> None:
    precheck.check(params())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"env": {"cameras": {"names": ["overhead"]}}}, "no camera overhead"),
        ({"env": {"cameras": {"size": 40}}}, "patch"),
        ({"env": {"cameras": {"names": []}}}, "policy.inputs has agentview"),
        ({"policy": {"inputs": ["agentview", "touch"]}}, "policy.inputs has touch"),
        ({"policy": {"max_words": 1}}, "the instruction 'reach near' has 2 words"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NightshiftError, match=sentence) as refused:
        precheck.check(params(**changes))
    assert refused.value.next_step
    assert "\n" not in refused.value.what


def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="torch finds no GPU"):
        precheck.check(params(machine={"device": "cuda"}))


def test_the_first_stage_does_not_begin(project: Path) -> None:
    edit(project, "policy", inputs=["agentview"])
    done = nightshift(project, "stage", "collect")
    assert done.returncode == 1
    assert "policy.inputs has agentview" in done.stderr + done.stdout
    assert not (project / paths.DEMOS).exists()


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_params_that_fit(recipe: Path) -> None:
    base = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    chosen = merged(base, yaml.safe_load(recipe.read_text()))
    config.Params.model_validate(chosen)
