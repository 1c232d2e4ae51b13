"""Learners on flow policies: the chain of a rollout is what an update learns from, in parts of any size."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch

from nightshift import config
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.on_policy import Iteration, OnPolicyLearner
from nightshift.algorithms.sft import DemoBatch, Demos, SftOptimizer
from nightshift.policies.flow import Flow
from nightshift.types import Trajectory
from tests.algorithms.test_on_policy import REQUEST, TEMPERATURE, settings
from tests.conftest import section
from tests.policies.examples import FLOW, VLA, demo_actions, make, observe

CHUNK, DIM, STEPS = 2, 7, 3
KINDS = ("sde", "noise")


def policy(kind: str) -> Flow:
    torch.manual_seed(0)
    made = Flow(
        **{**VLA, "inputs": {"proprio": (3,)}, "width": 16, "action_dim": DIM}, denoising_steps=STEPS, **FLOW[kind]
    )
    torch.nn.init.normal_(made.output.weight, std=0.1)
    return made


def groups(actor: Flow) -> Groups:
    return [[episode(actor, member, seed) for member in range(4)] for seed in range(2)]


def episode(actor: Flow, member: int, seed: int) -> Trajectory:
    """The last chunk of some is cut short."""
    random, length = np.random.default_rng([seed, member]), 4 + member
    decisions = math.ceil(length / CHUNK)
    seen = random.standard_normal((decisions, 3)).astype(np.float32)
    with torch.no_grad():
        actions, log_probs, latents = actor.decide(actor.inputs({"proprio": seen}), [random] * decisions, TEMPERATURE)
    played = actions.numpy().reshape(-1, DIM)[:length]
    return Trajectory(
        request=REQUEST,
        member=member,
        observations={"proprio": seen},
        final={"proprio": seen[0]},
        actions=played,
        executed=played,
        log_probs=log_probs.numpy().reshape(-1, DIM)[:length],
        latents={name: tensor.numpy() for name, tensor in latents.items()},
        chunk=CHUNK,
        success=member % 2 == 0,
    )


def demos(actor: Flow) -> Demos:
    generator = torch.Generator().manual_seed(5)
    seen = torch.randn(9, 3, generator=generator).numpy()
    actions = torch.randn(9, CHUNK, DIM, generator=generator).numpy()
    return Demos(actor, lambda index: {"proprio": seen[index]}, actions, np.ones((9, CHUNK), np.bool_))


def reinforced(kind: str, microbatch_size: int, *, epochs: int) -> tuple[Flow, dict[str, float]]:
    actor = policy(kind)
    played = groups(actor)
    chosen = settings(epochs=epochs, bc_weight=0.3, minibatch_size=64, **{"kl.coef": 0.1})
    learner = OnPolicyLearner(
        actor, chosen, torch.Generator().manual_seed(0), microbatch_size=microbatch_size, demos=demos(actor)
    )
    return actor, learner.update(Iteration(played, 0.0))


def assert_same(one: Flow, other: Flow, kind: str) -> None:
    """They act alike. Not weight by weight: those that one token's attention does not depend on follow rounding."""
    inputs = one.inputs({"proprio": np.random.default_rng(0).standard_normal((20, 3), np.float32)})
    actions, others, fresh = (actor.greedy(inputs) for actor in (one, other, policy(kind)))
    torch.testing.assert_close(actions, others, rtol=0, atol=1e-4)
    assert (actions - fresh).abs().max() > 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_gradient_step_every_ratio_is_one(kind: str) -> None:
    _, metrics = reinforced(kind, 64, epochs=1)
    assert abs(metrics["update/ppo_kl"]) < 1e-5 and metrics["update/clip_fraction"] == 0
    assert metrics["update/kl"] > 0, "the step changed nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_does_not_depend_on_the_size_of_microbatches(kind: str) -> None:
    (one, _), (other, _) = (reinforced(kind, size, epochs=2) for size in (64, 3))
    assert_same(one, other, kind)


def test_cloning_does_not_depend_on_the_size_of_microbatches_and_draws_anew_in_every_step() -> None:
    sft = config.Sft.model_validate(section("sft"))
    learned: list[Flow] = []
    losses: list[list[float]] = []
    for size in (64, 2):
        optimizer = SftOptimizer(policy("sde"), sft, microbatch_size=size)
        batch = demos(learned_by(optimizer))[torch.arange(9)]
        losses.append(
            [step_loss(optimizer, batch, seed) for seed in range(3)] + [optimizer.loss(demos(learned_by(optimizer)))]
        )
        learned.append(learned_by(optimizer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_same(learned[0], learned[1], "sde")


def learned_by(optimizer: SftOptimizer) -> Flow:
    return cast(Flow, optimizer.policy)


def step_loss(optimizer: SftOptimizer, batch: DemoBatch, seed: int) -> float:
    return optimizer.update(batch, torch.Generator().manual_seed(seed)).item()


def test_the_validation_loss_is_the_same_every_time() -> None:
    sft = config.Sft.model_validate(section("sft"))
    optimizer = SftOptimizer(policy("sde"), sft, microbatch_size=64)
    assert optimizer.loss(demos(learned_by(optimizer))) == optimizer.loss(demos(learned_by(optimizer)))


def test_a_loss_that_is_not_random_takes_no_numbers_from_the_generator() -> None:
    """Results of other families do not depend on it."""
    sft = config.Sft.model_validate(section("sft"))
    optimizer = SftOptimizer(make("gaussian_mlp"), sft, microbatch_size=64)
    seen, mask = optimizer.policy.inputs(observe(4)), torch.ones(4, CHUNK, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    optimizer.update(DemoBatch(seen, demo_actions(4), mask), generator)
    assert torch.equal(generator.get_state(), before)
