"""The family behind the policy seam: its section of params.yaml, its inputs, and its log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nightshift import config, policies
from nightshift.errors import ConfigError
from nightshift.policies.openvla_oft import images
from nightshift.policies.openvla_oft.network import PAD
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.openvla_oft.variants import PRESETS
from nightshift.types import INSTRUCTION
from tests.policies.examples import ACTION_DIM, NETWORK, OPENVLA_OFT, SHAPES, generators, make, observe
from tests.policies.openvla_oft import tiny

ROWS = 6
TOLERANCE = 1e-5
"""Of log-probs in float32: sums over another number of rows or keys round differently."""
BFLOAT16_TOLERANCE = {"tokens": 0.05, "l1": 0.5}
"""Of log-probs in bfloat16, which has 8 bits: twice and three times the most that 12 random policies differed by."""
SIZE = {**tiny.section()["size"], "llama": {**tiny.TRANSFORMER, "width": 32}}


def section(**changes: Any) -> dict[str, Any]:
    return tiny.section(**{"variant": "rlinf", "size": SIZE, "max_tokens": 20, "chunk": 2, **changes})


def fresh(**changes: Any) -> OpenVlaOft:
    policy = policies.fresh(config.OpenVlaOft.model_validate(section(**changes)), SHAPES, ACTION_DIM)
    assert isinstance(policy, OpenVlaOft)
    return policy


@pytest.mark.parametrize("variant", PRESETS)
@pytest.mark.parametrize("inputs", [["agentview", INSTRUCTION], ["wrist", "agentview", "proprio", INSTRUCTION]])
def test_a_section_of_params_builds_a_policy_that_acts(variant: str, inputs: list[str]) -> None:
    policy = fresh(variant=variant, inputs=inputs)
    assert policy.observations == inputs
    assert policy.act(observe(2)).shape == (2, 2, ACTION_DIM)
    preset = PRESETS[variant]
    assert policy.spec["network"]["attention"] == preset["attention"]
    assert policy.spec["network"]["stop_token"] == preset["stop_token"]
    assert policy.spec["images"] == preset["images"]


def test_properties_of_a_variant_can_be_spelled_out() -> None:
    policy = fresh(variant={"attention": "causal", "stop_token": True, "images": "bicubic"})
    assert policy.spec["network"]["attention"] == "causal"
    assert policy.spec["network"]["stop_token"]


def test_images_are_preprocessed_as_the_variant_says() -> None:
    seen = observe(2)
    raw = torch.from_numpy(seen["agentview"])
    for variant, preprocess in (("rlinf", images.bicubic), ("openvla-oft", images.jpeg_lanczos_crop)):
        assert torch.equal(fresh(variant=variant).inputs(seen)["agentview"], preprocess(raw, 28))


def test_pixels_are_normalised_per_tower_and_cameras_follow_each_other() -> None:
    policy = fresh(inputs=["wrist", "agentview", INSTRUCTION])
    inputs = policy.inputs(observe(2))
    pixels = policy._pixels(inputs)
    assert pixels.shape == (2, 12, 28, 28)
    agentview = inputs["agentview"].permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(pixels[:, 6:9], (agentview - mean) / std)
    torch.testing.assert_close(pixels[:, 9:], agentview * 2 - 1)


@pytest.mark.parametrize(
    ("family", "tolerance"), [("openvla-oft tokens", TOLERANCE), ("openvla-oft l1", 20 * TOLERANCE)]
)
def test_log_probs_depend_neither_on_the_microbatch_nor_on_the_place_in_it(family: str, tolerance: float) -> None:
    """The Laplace density has a scale of e⁻³: its log-probs change twenty times as much as the actions round."""
    policy = make(family)
    inputs = policy.inputs(observe(ROWS))
    with torch.no_grad():
        actions, rollout = policy.sample(inputs, generators(ROWS), 1.6)
        for size in (1, 4):
            slices = [slice(start, start + size) for start in range(0, ROWS, size)]
            parts = [policy.log_prob(_rows(inputs, part), actions[part], 1.6) for part in slices]
            torch.testing.assert_close(torch.cat(parts), rollout, rtol=0, atol=tolerance)
        turned = torch.arange(ROWS - 1, -1, -1)
        torch.testing.assert_close(
            policy.log_prob(_rows(inputs, turned), actions[turned], 1.6)[turned], rollout, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("head", BFLOAT16_TOLERANCE)
def test_log_probs_in_bfloat16_depend_on_the_microbatch_and_on_padding_by_rounding_alone(head: str) -> None:
    torch.manual_seed(0)
    policy = OpenVlaOft(**{**OPENVLA_OFT, "network": {**NETWORK, "action_head": head, "dtype": "bfloat16"}})
    inputs, tolerance = policy.inputs(observe(ROWS)), BFLOAT16_TOLERANCE[head]
    with torch.no_grad():
        actions, rollout = policy.sample(inputs, generators(ROWS), 1.6)
        alone = [policy.log_prob(_without_padding(inputs, row), actions[row : row + 1], 1.6) for row in range(ROWS)]
        turned = torch.arange(ROWS - 1, -1, -1)
        backwards = policy.log_prob(_rows(inputs, turned), actions[turned], 1.6)
    for again in (torch.cat(alone), backwards[turned]):
        torch.testing.assert_close(again, rollout, rtol=0, atol=tolerance)
    assert (backwards - rollout).abs().max() > 4 * tolerance  # it sees rows that are mixed up


def _without_padding(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row, with the columns of its own prompt."""
    alone = _rows(inputs, slice(row, row + 1))
    length = int((alone[INSTRUCTION] != PAD).sum())
    return {**alone, INSTRUCTION: alone[INSTRUCTION][:, -length:]}


def _rows(inputs: dict[str, torch.Tensor], index: Any) -> dict[str, torch.Tensor]:
    return {name: tensor[index] for name, tensor in inputs.items()}


@pytest.mark.parametrize("family", ["openvla-oft tokens", "openvla-oft l1"])
def test_weights_that_are_known_are_taken_as_they_are_and_none_are_drawn(family: str) -> None:
    policy = make(family)
    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    generator = torch.get_rng_state()
    again = policies.build(policy.spec, weights)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (
        again.state_dict()["network.projector.fc1.weight"].data_ptr()
        == weights["network.projector.fc1.weight"].data_ptr()
    )
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert (again.act(observe(2)) == policy.act(observe(2))).all()


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("stop_token", [True, False])
def test_log_probs_do_not_depend_on_padding(attention: str, stop_token: bool) -> None:
    """Padding between patches and prompt, in rows of different lengths. Logits reach 20: they round more."""
    torch.manual_seed(0)
    network = {**NETWORK, "action_head": "tokens", "attention": attention, "stop_token": stop_token}
    policy = OpenVlaOft(**{**OPENVLA_OFT, "network": network})
    torch.nn.init.normal_(policy.network.language_model.lm_head.weight)
    inputs = policy.inputs(observe(3))
    lengths = (inputs[INSTRUCTION] != PAD).sum(1)
    assert len(set(lengths.tolist())) > 1
    with torch.no_grad():
        together = policy.outputs(inputs)
        for row in range(3):
            alone = policy.outputs(_without_padding(inputs, row))
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=5 * TOLERANCE)
        longer = torch.nn.functional.pad(inputs[INSTRUCTION], (9, 0), value=PAD)
        torch.testing.assert_close(
            policy.outputs({**inputs, INSTRUCTION: longer}), together, rtol=0, atol=5 * TOLERANCE
        )


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (["proprio", INSTRUCTION], "takes one or more cameras"),
        (["agentview"], "takes one or more cameras, the instruction"),
        (["agentview", "proprio", "other", INSTRUCTION], "at most one state vector"),
    ],
)
def test_observations_that_are_not_those_of_an_openvla_are_one_sentence(inputs: list[str], sentence: str) -> None:
    settings = config.OpenVlaOft.model_validate(section(inputs=inputs))
    with pytest.raises(ConfigError, match=sentence):
        policies.fresh(settings, {**SHAPES, "other": (3,)}, ACTION_DIM)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": {**SIZE, "image_size": 30}}, r"image_size is 30, which patches of 14 pixels do not divide"),
        ({"variant": "openvla-oft"}, r"images of agentview have 40 × 40 pixels, and JPEG takes multiples of 16"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    settings = config.OpenVlaOft.model_validate(section(**changes))
    with pytest.raises(ConfigError, match=sentence):
        policies.fresh(settings, {**SHAPES, "agentview": (40, 40, 3)}, ACTION_DIM)


CHECKPOINT = {"path": "x", "adapter": None, "unnorm_key": "y", "range": "min_max"}


@pytest.mark.parametrize("changes", [{"size": None}, {"checkpoint": CHECKPOINT}])
def test_either_a_checkpoint_or_a_size_is_given(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="needs either checkpoint or size"):
        config.OpenVlaOft.model_validate(section(**changes))


def test_a_state_vector_is_scaled_to_the_demos_range_and_clipped() -> None:
    policy = make("openvla-oft tokens")
    assert isinstance(policy, OpenVlaOft)
    low, high = policy.proprio_bounds.low, policy.proprio_bounds.high
    states = torch.stack([high + 5, high, low])
    outputs = policy.outputs(policy.inputs({**_same(3), "proprio": states.numpy()}))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


def _same(count: int) -> dict[str, Any]:
    """One observation, several times."""
    return {name: np.repeat(values, count, axis=0) for name, values in observe(1).items()}


def test_random_weights_hear_where_a_thing_is_in_an_image() -> None:
    """With torch's own random weights less than a thousandth of what actions are read from depends on the image, and a
    clone learns nothing for a long time."""
    heard = [share_that_depends_on_images(seed) for seed in range(3)]
    assert min(heard) > 0.003


def share_that_depends_on_images(seed: int) -> float:
    """Of the power of hidden states at the places of actions; in each image the thing is elsewhere."""
    transformer = {**tiny.TRANSFORMER, "width": 128, "mlp": 256, "depth": 2}
    size = {"image_size": 56, "dinov2": transformer, "siglip": transformer, "llama": transformer}
    torch.manual_seed(seed)
    policy = fresh(size=size)
    images = np.full((16, *SHAPES["agentview"]), 90, np.uint8)
    for image, (row, column) in zip(images, np.random.default_rng(seed).integers(0, 28, (16, 2)), strict=True):
        image[row : row + 4, column : column + 4] = (220, 30, 30)
    inputs = policy.inputs({"agentview": images, INSTRUCTION: np.array(["lift"] * 16)})
    with torch.no_grad():
        hidden = policy.encode(inputs)
    return float(hidden.var(0).mean() / hidden.square().mean())
