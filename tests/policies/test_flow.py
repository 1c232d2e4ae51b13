"""What holds for flow policies beyond what every family promises."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from nightshift import config, policies
from nightshift.policies import flow_matching
from nightshift.policies.base import Inputs
from nightshift.policies.blocks import prepare_network
from nightshift.policies.denoising import CHAIN, GAUSSIAN_STEPS
from nightshift.policies.flow import Flow
from tests.policies.examples import (
    ACTION_DIM,
    CHUNK,
    FLOW,
    SHAPES,
    STATISTICS,
    VLA,
    cloning_inputs,
    demo_actions,
    generators,
    make_policy,
    observe,
)

ROWS, STEPS = 5, 4
KINDS = ("sde", "noise")


def flow(kind: str) -> Flow:
    return cast(Flow, make_policy(f"flow {kind}"))


def fresh(kind: str = "sde") -> Flow:
    policy = Flow(**VLA, denoising_steps=STEPS, **FLOW[kind])
    policy.normalise_by(STATISTICS)
    return policy


def decided(policy: Flow, temperature: float = 1.0, rows: int = ROWS) -> tuple[Inputs, Tensor, Tensor]:
    """The inputs of an update, actions and log-probs of a rollout."""
    inputs = policy.inputs(observe(rows))
    with torch.no_grad():
        actions, log_probs, latents = policy.decide(inputs, generators(rows), temperature)
    return {**inputs, **latents}, actions, log_probs


def row(inputs: Inputs, index: int) -> Inputs:
    return {name: values[index : index + 1] for name, values in inputs.items()}


def test_the_loss_of_a_fresh_policy_is_the_square_of_the_target_velocity() -> None:
    """Its velocity is 0. Actions are 1 in standard deviations; the masked one is anything. The target is noise - 1."""
    mean, std = (torch.tensor(STATISTICS["actions"][name]) for name in ("mean", "std"))
    actions = (mean + std.clamp(min=0.01)).repeat(1, CHUNK, 1)
    actions[0, 1] = math.nan
    mask = torch.tensor([[True, False]])
    for uniform, noise in ((0.5, 0.0), (0.8413447, 1.0), (0.1586553, -1.0)):
        draws = torch.full((1, 1 + CHUNK * ACTION_DIM), uniform)
        loss = fresh().bc_loss({**fresh().inputs(observe(1)), "loss_draws": draws}, actions, mask)
        assert loss.item() == pytest.approx((noise - 1) ** 2, abs=1e-5)


class KnownVelocity(Flow):
    """Of which the velocity is the time times the noisy actions."""

    def velocity(self, noisy: Tensor, times: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        return times[:, None, None] * noisy, noisy


def test_the_loss_has_the_value_that_was_computed_by_hand() -> None:
    """u = 0.125 is t = 0.25 · 0.999 + 0.001 = 0.25075. Actions 2 and noise 1 are x = 0.25075 + 0.74925 · 2 = 1.74925,
    and the velocity is to be 1 - 2 = -1: the loss is (0.25075 · 1.74925 + 1)² = 2.069643."""
    policy = KnownVelocity(**VLA, denoising_steps=STEPS, **FLOW["sde"])
    draws = torch.full((1, 1 + CHUNK * ACTION_DIM), 0.8413447)
    draws[:, 0] = 0.125
    inputs = {**policy.inputs(observe(1)), "loss_draws": draws}
    loss = policy.bc_loss(inputs, torch.full((1, CHUNK, ACTION_DIM), 2.0), torch.ones(1, CHUNK, dtype=torch.bool))
    assert loss.item() == pytest.approx(2.069643, abs=1e-4)


@torch.no_grad()
def eulers(policy: Flow, inputs: Inputs, noise: Tensor) -> Tensor:
    """The actions that the ODE makes of `noise`."""
    noisy, context = noise, policy.context(inputs)
    for time in (1.0, 0.75, 0.5, 0.25):
        noisy = noisy - 0.25 * policy.velocity(noisy, torch.full((len(noise),), time), context)[0]
    return policy.action_mean + policy.action_std * noisy


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_actions_are_eulers_from_one_standard_normal_draw(kind: str) -> None:
    """Of every policy of that shape, so that a run repeats what a checkpoint did."""
    policy = flow(kind)
    inputs = policy.inputs(observe(ROWS))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((CHUNK, ACTION_DIM), np.float32))
    with torch.no_grad():
        greedy = policy.greedy(inputs)
    torch.testing.assert_close(greedy, eulers(policy, inputs, noise.expand(ROWS, -1, -1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_temperature_scales_gaussian_steps_and_not_the_initial_noise(kind: str) -> None:
    policy = flow(kind)
    inputs = policy.inputs(observe(ROWS))
    drawn = [generator.standard_normal((STEPS + 1, CHUNK, ACTION_DIM), np.float32)[0] for generator in generators(ROWS)]
    noise = torch.from_numpy(np.stack(drawn))
    with torch.no_grad():
        cold, warm = (policy.decide(inputs, generators(ROWS), temperature) for temperature in (1e-6, 1.0))
    assert torch.equal(cold.latents[CHAIN][:, 0], noise) and torch.equal(warm.latents[CHAIN][:, 0], noise)
    torch.testing.assert_close(cold.actions, eulers(policy, inputs, noise), rtol=0, atol=1e-5)
    assert (cold.actions - warm.actions).abs().max() > 0.05


class TwoWays(Flow):
    """Of which the velocity is the exact one of demos that show -1 and 1 equally often."""

    def velocity(self, noisy: Tensor, times: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        times = times[:, None, None]
        expected = torch.tanh((1 - times) * noisy / times.square())  # of the action, given noisy
        return (noisy - expected) / times, noisy


def test_greedy_actions_are_one_of_two_ways_and_not_their_mean() -> None:
    policy = TwoWays(**VLA, denoising_steps=20, **FLOW["sde"])
    torch.testing.assert_close(policy.greedy(policy.inputs(observe(1))).abs(), torch.ones(1, CHUNK, ACTION_DIM))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_the_observations_are_computed_once_per_decision(kind: str) -> None:
    policy = flow(kind)
    inputs = policy.inputs(observe(ROWS))
    context, noise = policy.context(inputs), torch.randn(ROWS, CHUNK, ACTION_DIM)
    with torch.no_grad():
        first, _ = policy.velocity(noise, torch.ones(ROWS), context)
        kept = list(context.observed)
        again, _ = policy.velocity(noise, torch.ones(ROWS), context)
    assert torch.equal(first, again)
    assert all(one is other and isinstance(one, tuple) for one, other in zip(kept, context.observed, strict=True))


def test_features_of_a_critic_do_not_depend_on_the_padding_of_the_instruction() -> None:
    policy = flow("sde")
    wide = Flow(**{**VLA, "max_words": 12}, denoising_steps=STEPS, **FLOW["sde"])
    weights = policy.state_dict()
    position = torch.cat([weights["words.position"], torch.ones(1, 6, VLA["width"])], dim=1)
    wide.load_state_dict({**weights, "words.position": position})
    seen = [made.critic_features(made.inputs(observe(ROWS))) for made in (policy, wide)]
    torch.testing.assert_close(*seen, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_chain_ends_in_the_actions(kind: str) -> None:
    policy = flow(kind)
    inputs, actions, _ = decided(policy)
    assert inputs[CHAIN].shape == (ROWS, STEPS + 1, CHUNK, ACTION_DIM)
    assert torch.equal(policy.action_mean + policy.action_std * inputs[CHAIN][:, -1], actions)


def test_one_step_of_a_flow_sde_is_gaussian_and_any_of_them_is() -> None:
    inputs, _, _ = decided(flow("sde"), rows=50)
    assert inputs[GAUSSIAN_STEPS].shape == (50, 1)
    assert set(inputs[GAUSSIAN_STEPS].flatten().tolist()) == set(range(STEPS))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_log_prob_of_a_flow_sde_is_that_of_the_noise_of_its_step(temperature: float) -> None:
    inputs, _, log_probs = decided(flow("sde"), temperature)
    for index, generator in enumerate(generators(ROWS)):
        noises = torch.from_numpy(generator.standard_normal((STEPS + 1, CHUNK, ACTION_DIM), dtype=np.float32))
        (step,) = inputs[GAUSSIAN_STEPS][index].tolist()
        std = temperature * [0.5, 0.433013, 0.25, 0.144338][step]
        expected = -0.5 * noises[step + 1].square() - math.log(std) - 0.5 * math.log(2 * math.pi)
        torch.testing.assert_close(log_probs[index], expected, rtol=0, atol=2e-5)


def test_the_steps_beside_the_gaussian_one_follow_the_ode() -> None:
    policy = flow("sde")
    inputs, _, _ = decided(policy)
    chain = inputs[CHAIN]
    with torch.no_grad():
        context = policy.context(inputs)
        for step in range(STEPS):
            velocity, _ = policy.velocity(chain[:, step], torch.full((ROWS,), 1 - step / STEPS), context)
            distance = (chain[:, step + 1] - (chain[:, step] - velocity / STEPS)).abs().amax((1, 2))
            is_gaussian = inputs[GAUSSIAN_STEPS][:, 0] == step
            assert (distance[~is_gaussian] < 1e-6).all() and (distance[is_gaussian] > 1e-2).all()


def test_the_std_of_a_noise_network_stays_in_its_range_and_differs_between_observations() -> None:
    policy = flow("noise")
    inputs, _, _ = decided(policy)
    with torch.no_grad():
        for parameter in policy.std_parameters():
            parameter.mul_(20)
        step = torch.zeros(ROWS, dtype=torch.int64)
        velocity, hidden = policy.velocity(inputs[CHAIN][:, 0], torch.ones(ROWS), policy.context(inputs))
        _, std = policy.denoising.transition(inputs[CHAIN][:, 0], velocity, hidden, step, 1.0)
        _, half = policy.denoising.transition(inputs[CHAIN][:, 0], velocity, hidden, step, 0.5)
    assert std.min() >= 0.08 - 1e-6 and std.max() <= 0.16 + 1e-6 and std.std() > 0.01
    torch.testing.assert_close(half, 0.5 * std)


def test_the_log_prob_of_a_flow_with_a_noise_network_is_that_of_the_whole_chain() -> None:
    """Or its mean over the initial noise and the steps, as in RLinf."""
    policy = flow("noise")
    inputs, _, log_probs = decided(policy)
    chain = inputs[CHAIN]
    with torch.no_grad():
        context = policy.context(inputs)
        total = flow_matching.normal_log_prob(chain[:, 0], torch.zeros(()), torch.ones(()))
        for step in range(STEPS):
            velocity, hidden = policy.velocity(chain[:, step], torch.full((ROWS,), 1 - step / STEPS), context)
            low, high = math.log(0.08**2), math.log(0.16**2)  # RLinf scales the logarithm of the variance
            log_variance = low + (high - low) * (policy.denoising.std(hidden).tanh() + 1) / 2  # type: ignore[operator]
            std = (0.5 * log_variance).exp()
            total = total + flow_matching.normal_log_prob(chain[:, step + 1], chain[:, step] - velocity / STEPS, std)
    torch.testing.assert_close(log_probs, total, rtol=0, atol=1e-4)
    averaging = {**FLOW["noise"], "flow_noise": {**FLOW["noise"]["flow_noise"], "log_prob": "mean"}}
    other = Flow(**VLA, denoising_steps=STEPS, **averaging)
    other.load_state_dict(policy.state_dict())
    mean, _ = other.evaluate_actions(inputs, chain[:, -1], 1.0)
    torch.testing.assert_close(mean, log_probs / (STEPS + 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_the_update_are_the_rollouts_bits_and_do_not_depend_on_the_batch(kind: str) -> None:
    policy = flow(kind)
    inputs, actions, log_probs = decided(policy)
    with torch.no_grad():
        assert torch.equal(policy.log_prob(inputs, actions, 1.0), log_probs)
        alone = torch.cat([policy.log_prob(row(inputs, i), actions[i : i + 1], 1.0) for i in range(ROWS)])
        order = torch.tensor([3, 0, 4, 1, 2])
        moved = policy.log_prob({name: values[order] for name, values in inputs.items()}, actions[order], 1.0)
    torch.testing.assert_close(alone, log_probs, rtol=0, atol=2e-5)
    torch.testing.assert_close(moved, log_probs[order], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_do_not_depend_on_the_padding_of_the_instruction(kind: str) -> None:
    policy = flow(kind)
    inputs, actions, log_probs = decided(policy)
    wide = Flow(**{**VLA, "max_words": 12}, denoising_steps=STEPS, **FLOW[kind])
    weights = policy.state_dict()
    position = torch.cat([weights["words.position"], torch.ones(1, 6, VLA["width"])], dim=1)
    wide.load_state_dict({**weights, "words.position": position})
    latents = {name: inputs[name] for name in (CHAIN, GAUSSIAN_STEPS)}
    with torch.no_grad():
        padded = wide.log_prob({**wide.inputs(observe(ROWS)), **latents}, actions, 1.0)
    torch.testing.assert_close(padded, log_probs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_another_chain_and_another_temperature_have_other_log_probs(kind: str) -> None:
    policy = flow(kind)
    inputs, actions, log_probs = decided(policy)
    with torch.no_grad():
        hotter = policy.log_prob(inputs, actions, 1.1)
        other = policy.log_prob({**inputs, CHAIN: inputs[CHAIN] + 0.05}, actions, 1.0)
        for parameter in policy.expert.parameters():
            parameter.mul_(1.01)
        moved = policy.log_prob(inputs, actions, 1.0)
    assert all((changed - log_probs).abs().max() > 1e-3 for changed in (hotter, other, moved))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_log_prob_is_that_of_finite_differences(kind: str) -> None:
    policy = flow(kind)
    inputs, actions, _ = decided(policy)
    parameters = list(policy.parameters())
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(ROWS, CHUNK, ACTION_DIM, generator=generator)
    directions = [torch.randn(p.shape, generator=generator) * p.detach().abs().mean() for p in parameters]

    def value(move: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(move * direction)
            found = (weights * policy.log_prob(inputs, actions, 1.0)).sum().item()
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(move * direction)
        return found

    (weights * policy.log_prob(inputs, actions, 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    slope = sum((p.grad * d).sum().item() for p, d in zip(parameters, directions, strict=True) if p.grad is not None)
    # Richardson's extrapolation: the error of the central difference is of the fourth order.
    coarse, fine = ((value(move) - value(-move)) / (2 * move) for move in (4e-3, 2e-3))
    assert slope == pytest.approx((4 * fine - coarse) / 3, rel=2e-2)


@pytest.mark.parametrize("family", ["flow sde", "pi0 sde"])
def test_activations_that_are_computed_again_give_the_same_gradient(family: str) -> None:
    gradients = []
    for again in (False, True):
        policy = make_policy(family)
        if again:
            prepare_network(policy, recomputed=True)
        actions, mask = demo_actions(ROWS, horizon=policy.horizon), torch.ones(ROWS, policy.horizon, dtype=torch.bool)
        policy.bc_loss(cloning_inputs(policy, ROWS), actions, mask).backward()  # type: ignore[no-untyped-call]
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-7)


def test_the_loss_is_the_same_in_parts() -> None:
    policy, actions = flow("sde"), demo_actions(8)
    inputs, mask = cloning_inputs(policy, 8), torch.ones(8, CHUNK, dtype=torch.bool)
    whole = policy.bc_loss(inputs, actions, mask)
    parts = [
        policy.bc_loss({name: values[part] for name, values in inputs.items()}, actions[part], mask[part])
        for part in torch.split(torch.arange(8), 2)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-5, atol=0)


def test_cloning_learns_random_decisions_by_heart() -> None:
    torch.manual_seed(0)
    policy = Flow(**{**VLA, "inputs": {"proprio": (4,)}}, denoising_steps=STEPS, **FLOW["sde"])
    policy.normalise_by(STATISTICS)
    decisions, copies = 4, 32
    inputs = policy.inputs({"proprio": np.repeat(observe(decisions)["proprio"], copies, axis=0)})
    actions = demo_actions(decisions).repeat_interleave(copies, dim=0)
    mask, generator = torch.ones(len(actions), CHUNK, dtype=torch.bool), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

    @torch.no_grad()
    def error() -> float:
        """The mean error in standard deviations of the actions; the last dimension is constant."""
        return float(((policy.greedy(inputs) - actions).abs().mean((0, 1)) / actions.std((0, 1)))[:-1].max())

    assert error() > 0.5
    for step in range(200):
        draws = torch.rand(len(actions), policy.loss_draws, generator=generator)
        loss = policy.bc_loss({**inputs, "loss_draws": draws}, actions, mask)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9 and error() < 0.1:
            return
    assert error() < 0.1


SECTION: dict[str, Any] = {
    "family": "flow",
    "inputs": list(SHAPES),
    **{name: VLA[name] for name in ("patch_size", "width", "depth", "heads", "max_words", "chunk", "augmentation")},
    "denoising_steps": STEPS,
    **FLOW["sde"],
}


def test_params_describe_the_policy() -> None:
    policy = policies.fresh(config.Flow.model_validate(SECTION), SHAPES, ACTION_DIM)
    assert policy.spec == fresh().spec


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"flow_sde": None}, "needs either flow_sde or flow_noise"),
        ({"flow_noise": FLOW["noise"]["flow_noise"]}, "needs either flow_sde or flow_noise"),
        ({"denoising_steps": 1}, "flow_sde needs denoising_steps of 2 or more"),
        ({"width": 31, "heads": 1}, "not even"),
        ({**FLOW["noise"], "flow_noise": {"min_std": 0.2, "max_std": 0.1, "log_prob": "sum"}}, "not below max_std"),
    ],
)
def test_a_section_that_does_not_fit_together_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config.Flow.model_validate({**SECTION, **changes})
