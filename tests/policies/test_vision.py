"""Policies that see, from params.yaml and observations as simulators give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nightshift import config, policies
from nightshift.errors import ConfigError, DataError
from nightshift.policies.base import Policy
from nightshift.policies.vla import Vla
from nightshift.types import INSTRUCTION
from tests.conftest import REPOSITORY
from tests.policies.examples import SEES, SHAPES, SIZE, VLA, make, make_policy, observe
from tests.test_docs import blocks

SECTIONS: dict[str, dict[str, Any]] = {
    "vla": {"patch_size": 8, "width": 32, "depth": 1, "heads": 2, "head": "gaussian"},
    "cnn": {"channels": [8, 8], "hidden": [16], "head": "gaussian"},
}


def fresh(family: str, shapes: Any = SHAPES, **changes: Any) -> Policy:
    section = {
        "family": family,
        "inputs": list(SHAPES),
        "max_words": 6,
        "chunk": 2,
        "augmentation": {"crop": 2, "jitter": 0.2},
        **SECTIONS[family],
        **changes,
    }
    settings = config.Vla.model_validate(section) if family == "vla" else config.Cnn.model_validate(section)
    return policies.fresh(settings, shapes, action_dim=3)


@pytest.mark.parametrize("family", SECTIONS)
def test_a_section_of_params_builds_a_policy_that_acts(family: str) -> None:
    policy = fresh(family)
    assert policy.observations == list(SHAPES)
    assert policy.act(observe(2)).shape == (2, 2, 3)


@pytest.mark.parametrize("family", SECTIONS)
@pytest.mark.parametrize("inputs", [["agentview"], ["proprio"], ["proprio", INSTRUCTION], ["wrist", INSTRUCTION]])
def test_a_policy_reads_only_its_inputs(family: str, inputs: list[str]) -> None:
    policy = fresh(family, inputs=inputs)
    observations = {name: values for name, values in observe(2).items() if name in inputs}
    assert policy.act(observations).shape == (2, 2, 3)


@pytest.mark.parametrize("family", SEES)
def test_tensors_stay_as_small_as_observations_come(family: str) -> None:
    kinds = {name: tensor.dtype for name, tensor in make_policy(family).inputs(observe(2)).items()}
    assert kinds == {
        "agentview": torch.uint8,
        "wrist": torch.uint8,
        "proprio": torch.float32,
        INSTRUCTION: torch.int32,
    }


def test_rotated_and_read_only_images_are_read() -> None:
    observations = observe(2)
    images = observations["agentview"][:, ::-1, ::-1]
    images.flags.writeable = False
    inputs = make("vla").inputs({**observations, "agentview": images})
    assert (inputs["agentview"].numpy() == images).all()


def test_images_that_patches_do_not_divide_are_one_sentence() -> None:
    with pytest.raises(ConfigError) as error:
        fresh("vla", patch_size=12)
    assert error.value.what == "images of agentview have 32 × 32 pixels, which patches of 12 do not divide"
    assert "policy.patch_size or env.cameras.size" in error.value.next_step


def test_heads_that_do_not_divide_the_width_are_refused_with_params() -> None:
    with pytest.raises(ValueError, match=r"heads \(5\) does not divide width \(32\)"):
        fresh("vla", heads=5)


@pytest.mark.parametrize("shape", [(SIZE, SIZE, 1), (SIZE, SIZE), (2, 3, 4, 5), ()])
@pytest.mark.parametrize("family", SECTIONS)
def test_an_input_that_is_no_image_vector_or_instruction_is_named(family: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"depth, an observation of shape .* is neither"):
        fresh(family, shapes={**SHAPES, "depth": shape}, inputs=["agentview", "depth"])


@pytest.mark.parametrize("family", SECTIONS)
def test_an_input_that_is_not_observed_is_named(family: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.inputs has sideview, and the observations are agentview, wrist"):
        fresh(family, inputs=["sideview"])


def test_images_of_another_size_than_the_policys_are_one_sentence() -> None:
    with pytest.raises(
        DataError, match=r"agentview has shape \[64, 64, 3\], and the policy was made for \[32, 32, 3\]"
    ):
        make("vla").inputs({**observe(1), "agentview": np.zeros((1, 64, 64, 3), np.uint8)})


def test_an_observation_that_is_missing_is_named() -> None:
    observations = {name: values for name, values in observe(1).items() if name != "wrist"}
    with pytest.raises(DataError, match="the policy reads wrist, and the observations are agentview, proprio"):
        make("cnn").inputs(observations)


@pytest.mark.parametrize("patch_size", [1, 3, 4, 14, 16])
def test_any_patch_size_that_divides_the_images_gives_one_token_per_patch(patch_size: int) -> None:
    size = 2 * patch_size
    policy = Vla(**{**VLA, "inputs": {"agentview": (size, size, 3)}, "patch_size": patch_size, "head": "gaussian"})
    patches = policy.cameras["agentview"](torch.zeros(1, size, size, 3, dtype=torch.uint8))
    assert patches.shape == (1, 4, 32)


def test_the_section_on_the_page_about_policies_is_valid_and_has_the_size_it_says() -> None:
    shapes = {"agentview": (128, 128, 3), "wrist": (128, 128, 3), "proprio": (8,), INSTRUCTION: ()}
    page = (REPOSITORY / "docs" / "policies.md").read_text()
    for block in blocks("policies.md", "yaml"):
        params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
        section = config.Params.model_validate({**params, **yaml.safe_load(block)}).policy
        if isinstance(section, config.OpenVlaOft | config.Pi0) and section.checkpoint is not None:
            continue  # there is no such checkpoint here
        policy = policies.fresh(section, shapes, 7)
        size = sum(parameter.numel() for parameter in policy.parameters())
        assert f"{size / 1e6:.1f} million" in page
