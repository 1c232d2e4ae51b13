"""Action tokens and continuous actions: published tables, log-probs at every level, scales and the gripper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nightshift.errors import ConfigError, DataError
from nightshift.policies.openvla_oft import norm_stats
from nightshift.policies.openvla_oft.heads import ActionTokensHead, LaplaceHead
from nightshift.policies.openvla_oft.network import FIRST_ACTION_TOKEN, LM_HEAD
from tests.policies.examples import generators
from tests.policies.openvla_oft import golden

SIMPLEVLA_TEMPERATURE = 1.6
STATISTICS = norm_stats.entry(golden.recipe()["norm_stats"], "libero_x")
BOUNDS = norm_stats.bounds(STATISTICS, "action", 7, "q01_q99")


def head() -> ActionTokensHead:
    return ActionTokensHead(7, "openvla", BOUNDS)


def as_published(actions: Tensor) -> Tensor:
    """With the gripper as the published model gives it: 1 opens, 0 closes."""
    return torch.cat([actions[..., :6], (1 - actions[..., 6:]) / 2], dim=-1)


def logits() -> Tensor:
    rows = [golden.tensor(f"oft_action_logits_{i}") for i in range(golden.SAMPLES)]
    return torch.stack(rows).reshape(golden.SAMPLES, 8, 7, 256)


def test_greedy_actions_are_those_of_simplevla_rl() -> None:
    expected = golden.tensor("simplevla_greedy_actions").float()
    torch.testing.assert_close(as_published(head().greedy(logits())), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("hidden", "actions"),
    [
        *((f"oft_hidden_{sample}", f"oft_full_vocab_actions_{sample}") for sample in range(golden.SAMPLES)),
        ("two_images_proprio_hidden", "two_images_proprio_actions"),
    ],
)
def test_greedy_actions_over_the_whole_vocabulary_are_those_of_openvla_oft(hidden: str, actions: str) -> None:
    """It takes any token; one that is no action counts as the nearest that is."""
    tokens = (golden.tensor(hidden) @ golden.published_weights()[LM_HEAD].T).argmax(-1)
    nearest = (tokens - FIRST_ACTION_TOKEN).clamp(0, 255).reshape(1, 8, 7)
    expected = golden.tensor(actions).float()
    torch.testing.assert_close(as_published(head().actions(nearest))[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("token", "centre"), [(31999, -254 / 255), (31872, 0.0), (31745, 254 / 255), (31744, 254 / 255)]
)
def test_tokens_decode_to_the_published_centres(token: int, centre: float) -> None:
    plain = ActionTokensHead(1, "simulator", None)
    found = plain.actions(torch.tensor([[[token - FIRST_ACTION_TOKEN]]]))
    assert found.item() == pytest.approx(centre, abs=1e-6)


def test_cloning_asks_for_the_token_that_openvlas_tokenizer_gives() -> None:
    plain = ActionTokensHead(1, "simulator", None)
    values = np.concatenate([np.random.default_rng(0).uniform(-1.2, 1.2, 500), [-1, 0, 1]]).astype(np.float32)
    tokens = 32000 - np.digitize(np.clip(values, -1, 1), np.linspace(-1, 1, 256)) - FIRST_ACTION_TOKEN
    sure = 50 * torch.nn.functional.one_hot(torch.from_numpy(tokens), 256).float().reshape(-1, 1, 1, 256)
    mask = torch.ones(len(values), 1, dtype=torch.bool)
    actions = torch.from_numpy(values).reshape(-1, 1, 1)
    assert plain.bc_loss(sure, actions, mask) < 1e-6
    assert plain.bc_loss(sure.roll(1, dims=-1), actions, mask) > 49


def test_log_probs_are_those_of_tokens_and_add_up_over_actions_and_chunks() -> None:
    """Token 0 and token 1 are one action: its probability is the sum of both."""
    outputs = logits()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(2, 256, (golden.SAMPLES, 8, 7)))
    found = head().log_prob(outputs, head().actions(tokens), SIMPLEVLA_TEMPERATURE)
    of_tokens = (outputs / SIMPLEVLA_TEMPERATURE).log_softmax(-1)
    expected = of_tokens.gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(-1), expected.sum(-1))
    torch.testing.assert_close(found.sum((-2, -1)), expected.sum((-2, -1)))
    shared = head().log_prob(outputs, head().actions(torch.zeros_like(tokens)), SIMPLEVLA_TEMPERATURE)
    torch.testing.assert_close(shared.exp(), of_tokens[..., :2].exp().sum(-1))


def test_probabilities_of_all_actions_add_up_to_one_and_their_entropy_is_the_heads() -> None:
    outputs = logits()[:1, :1]
    every = torch.arange(1, 256)[:, None, None].expand(-1, 1, 7)
    log_probs = head().log_prob(outputs.expand(255, -1, -1, -1), head().actions(every), SIMPLEVLA_TEMPERATURE)
    torch.testing.assert_close(log_probs.exp().sum(0), torch.ones(1, 7))
    expected = -(log_probs.exp() * log_probs).sum(0)
    torch.testing.assert_close(head().entropy(outputs, SIMPLEVLA_TEMPERATURE)[0], expected)


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    draws = 4000
    outputs = torch.tensor([3.0, 2.0, 1.0]).log().repeat(1)
    outputs = torch.cat([outputs, torch.full((253,), -1e4)]).expand(draws, 1, 1, 256)
    tokens = ActionTokensHead(1, "simulator", None).sample_tokens(outputs, generators(draws), 2.0)
    expected = torch.tensor([3.0, 2.0, 1.0]).sqrt()
    shares = torch.bincount(tokens.flatten(), minlength=3) / draws
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.03)


def test_the_gripper_opens_at_minus_one_and_closes_at_one_in_the_simulator() -> None:
    one, zero = (token(value) for value in (1.0, 0.0))
    assert head().actions(one)[0, 0, 6] < -0.98
    assert head().actions(zero)[0, 0, 6] > 0.98


def token(value: float) -> Tensor:
    """A chunk of one action, whose dimensions all are the token of a normalised value."""
    return torch.full((1, 1, 7), 256 - int(np.digitize(value, np.linspace(-1, 1, 256))))


def test_min_and_max_scale_as_they_say_and_masked_dimensions_not_at_all() -> None:
    bounds = norm_stats.Bounds(3)
    statistics = {"action": {"min": [-2, 0, 5], "max": [4, 1, 9], "mask": [True, True, False]}}
    bounds.set(norm_stats.bounds(statistics, "action", 3, "min_max"))
    torch.testing.assert_close(
        bounds.unscale(torch.tensor([[-1.0, -1, -1], [1, 1, 1]])), torch.tensor([[-2.0, 0, -1], [4, 1, 1]])
    )
    values = torch.tensor([0.3, 0.2, 7.0])
    torch.testing.assert_close(bounds.unscale(bounds.scale(values)), values)


def test_statistics_are_found_under_the_suites_name_and_with_its_suffix() -> None:
    plain = {"libero_x": {"action": 1}, "libero_x_no_noops": {"action": 2}, "bridge": {"action": 3}}
    assert norm_stats.entry(plain, "libero_x") == {"action": 1}
    assert norm_stats.entry({"libero_x_no_noops": {"action": 2}}, "libero_x") == {"action": 2}
    with pytest.raises(
        ConfigError, match=r"no statistics of libero_y nor of libero_y_no_noops; it has those of libero_x,"
    ):
        norm_stats.entry(plain, "libero_y")


@pytest.mark.parametrize(
    ("field", "values", "kind", "sentence"),
    [
        ("proprio", {}, "q01_q99", "have no proprio; they have action"),
        ("action", {"min": [0.0], "max": [1.0]}, "q01_q99", "have no q01 and no q99; they have min, max"),
        ("action", {"min": [0.0], "max": [1.0]}, "min_max", "have 1 dimensions, and the environment has 2"),
        ("action", {"min": [0.0, 1.0], "max": [1.0, 1.0]}, "min_max", "min equals max in dimension 1"),
    ],
)
def test_statistics_that_do_not_fit_are_one_sentence(
    field: str, values: dict[str, Any], kind: norm_stats.Range, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        norm_stats.bounds({"action": values}, field, 2, kind)


def test_the_continuous_head_has_the_density_of_a_laplace_distribution_in_the_simulators_units() -> None:
    laplace = LaplaceHead(7, "openvla", BOUNDS)
    outputs = torch.linspace(-0.5, 0.5, 56).reshape(1, 8, 7, 1)
    actions, log_probs = laplace.sample(outputs, generators(1), 2.0)
    normalised = laplace.action_scale.to_normalised(actions)
    density: Any = torch.distributions.Laplace(outputs[..., 0], 2 * torch.exp(torch.tensor(-3.0)))
    low, high, mask = (torch.tensor(BOUNDS[key]) for key in ("low", "high", "mask"))
    slope = torch.where(mask, (high - low) / 2, 2.0)  # the gripper is not scaled, and turned by 1 - 2x
    torch.testing.assert_close(log_probs, density.log_prob(normalised) - slope.log())
    torch.testing.assert_close(laplace.entropy(outputs, 2.0), (density.entropy() + slope.log()).expand(1, 8, 7))


def test_the_continuous_head_is_cloned_with_the_l1_loss_of_normalised_actions() -> None:
    laplace = LaplaceHead(7, "openvla", BOUNDS)
    target = torch.full((1, 8, 7), 0.25)
    actions = laplace.action_scale.to_simulator(target)
    loss = laplace.bc_loss(torch.zeros(1, 8, 7, 1), actions, torch.ones(1, 8, dtype=torch.bool))
    assert loss.item() == pytest.approx(0.25, abs=1e-6)
    torch.testing.assert_close(laplace.greedy(target[..., None]), actions)


def test_cloning_clips_what_lies_beyond_the_statistics_to_their_range_and_log_probs_do_not() -> None:
    """As OpenVLA's data pipeline does: one action in fifty lies beyond q01 and q99."""
    laplace = LaplaceHead(7, "openvla", BOUNDS)
    mask = torch.ones(1, 8, dtype=torch.bool)
    beyond = laplace.action_scale.to_simulator(torch.full((1, 8, 7), 1.5))
    outputs = torch.ones(1, 8, 7, 1)
    assert laplace.bc_loss(outputs, beyond, mask).item() == 0
    below = laplace.action_scale.to_simulator(torch.full((1, 8, 7), -1.5))
    assert laplace.bc_loss(-outputs, below, mask).item() == 0
    at_edge = laplace.action_scale.to_simulator(outputs[..., 0])
    assert (laplace.log_prob(outputs, beyond, 1.0) < laplace.log_prob(outputs, at_edge, 1.0) - 9).all()


@pytest.mark.parametrize("kind", [ActionTokensHead, LaplaceHead])
def test_statistics_of_a_checkpoint_stay_and_those_of_demos_fill_their_absence(
    kind: type[ActionTokensHead] | type[LaplaceHead],
) -> None:
    demos = {"min": [-3.0] * 7, "max": [3.0] * 7}
    published, fresh = kind(7, "openvla", BOUNDS), kind(7, "simulator", None)
    for one in (published, fresh):
        one.normalise_by(demos)
    assert published.action_scale.bounds.low.tolist() == pytest.approx(BOUNDS["low"])
    assert fresh.action_scale.bounds.low.tolist() == demos["min"]
