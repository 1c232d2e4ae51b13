"""Learning rates of both optimizers, and that a resumed schedule continues where it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nightshift import config
from nightshift.algorithms.optimizer import ClippedAdamW
from nightshift.algorithms.sft import DemoBatch, DemoLoader, SftOptimizer
from nightshift.algorithms.strategy import SingleProcess
from tests.algorithms.test_on_policy import demos, policy
from tests.policies import examples


def settings(**changes: Any) -> config.Optimizer:
    values = {"learning_rate": 2e-3, "weight_decay": 0.0, "warmup_steps": 4, "schedule": "constant"}
    return config.Optimizer.model_validate({**values, "max_grad_norm": 1.0, **changes})


def rates(optimizer: ClippedAdamW, parameter: torch.nn.Parameter, gradients: list[float]) -> list[float]:
    """The learning rate at which each gradient was applied."""
    seen: list[float] = []
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        seen.append(optimizer.optimizer.param_groups[0]["lr"])
        optimizer.step()
    return seen


def fresh(**changes: Any) -> tuple[ClippedAdamW, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    return ClippedAdamW([parameter], settings(**changes), SingleProcess()), parameter


def test_golden_rates_of_a_warm_up_over_two_iterations() -> None:
    optimizer, parameter = fresh()
    first = rates(optimizer, parameter, [1.0] * 3)
    optimizer.begin_update(progress=0.5)
    assert first + rates(optimizer, parameter, [1.0] * 3) == [0.0005, 0.001, 0.0015, 0.002, 0.002, 0.002]


def test_golden_rates_of_a_cosine_are_constant_within_an_iteration() -> None:
    optimizer, parameter = fresh(schedule="cosine", warmup_steps=2)
    seen = []
    for progress in (0.0, 0.25, 0.5, 0.75):
        optimizer.begin_update(progress)
        seen += rates(optimizer, parameter, [1.0] * 2)
    cosine = [2e-3 * 0.5 * (1 + math.cos(math.pi * progress)) for progress in (0.25, 0.5, 0.75)]
    assert seen == [0.001, 0.002, *(rate for rate in cosine for _ in range(2))]
    assert cosine == pytest.approx([0.0017071067811865476, 0.001, 0.00029289321881345256], rel=1e-12)


def test_a_gradient_that_is_not_finite_takes_no_step_of_the_warm_up() -> None:
    optimizer, parameter = fresh()
    assert rates(optimizer, parameter, [math.nan, 1.0, math.inf, 1.0]) == [0.0005, 0.0005, 0.001, 0.001]
    assert (optimizer.steps, optimizer.skipped) == (2, 2)


def test_a_restored_warm_up_continues_at_its_step() -> None:
    optimizer, parameter = fresh()
    rates(optimizer, parameter, [1.0] * 2)
    other, other_parameter = fresh()
    other.steps = optimizer.steps
    for each in (optimizer, other):
        each.begin_update(progress=0.5)
    assert rates(other, other_parameter, [1.0] * 3) == rates(optimizer, parameter, [1.0] * 3) == [0.0015, 0.002, 0.002]


SFT = config.Sft(steps=10, batch_size=4, learning_rate=1e-3, warmup_steps=0)


def all_demos() -> DemoBatch:
    return demos()[torch.arange(9)]


def sft_rate(optimizer: SftOptimizer) -> float:
    rate: float = optimizer.optimizer.param_groups[0]["lr"]
    return rate


def test_the_rate_of_behaviour_cloning_falls_linearly_to_zero() -> None:
    optimizer = SftOptimizer(policy(), SFT, microbatch_size=16)
    seen = []
    for _ in range(SFT.steps):
        seen.append(sft_rate(optimizer))
        optimizer.update(all_demos(), torch.Generator())
    assert seen == [1e-3 * (1 - step / 10) for step in range(10)]
    assert sft_rate(optimizer) == 0


def test_resumed_behaviour_cloning_ends_with_the_same_weights() -> None:
    generator = torch.Generator()
    whole = SftOptimizer(policy(), SFT, microbatch_size=16)
    for _ in range(4):
        whole.update(all_demos(), generator)
    resumed = SftOptimizer(policy(), SFT, microbatch_size=16)
    resumed.resume(whole.tensors(), 4)
    for optimizer in (whole, resumed):
        for _ in range(6):
            optimizer.update(all_demos(), generator)
    after = resumed.tensors()
    for name, tensor in whole.tensors().items():
        assert torch.equal(after[name], tensor), name


def test_behaviour_cloning_warms_up_linearly() -> None:
    optimizer = SftOptimizer(policy(), SFT.model_copy(update={"warmup_steps": 3}), microbatch_size=16)
    seen = []
    for _ in range(5):
        seen.append(sft_rate(optimizer))
        optimizer.update(all_demos(), torch.Generator())
    assert seen == pytest.approx([1e-3 * min((n + 1) / 4, 1) * (1 - n / 10) for n in range(5)])


def test_cloning_does_not_depend_on_the_microbatch_size() -> None:
    def learned(size: int) -> dict[str, torch.Tensor]:
        optimizer = SftOptimizer(policy(), SFT, microbatch_size=size)
        for _ in range(3):
            optimizer.update(all_demos(), torch.Generator())
        return optimizer.policy.state_dict()

    whole = learned(9)
    for size in (1, 2, 4):
        for name, value in learned(size).items():
            torch.testing.assert_close(value, whole[name], atol=1e-6, rtol=1e-4)


def loader(seed: int) -> DemoLoader:
    return DemoLoader(demos(), 4, torch.Generator().manual_seed(seed), SingleProcess(), pin=False)


def test_a_loader_continues_from_the_state_after_the_batch_that_was_handed_out_last() -> None:
    first, resumed = loader(3), loader(4)
    for _ in range(3):
        first.take()
    state = first.state
    expected = [first.take().actions for _ in range(12)]  # more than are read ahead
    resumed.take()
    resumed.restore(state)
    assert torch.equal(resumed.state, state)
    assert all(torch.equal(resumed.take().actions, actions) for actions in expected)


def test_augmentation_does_not_depend_on_the_microbatch_size() -> None:
    def learned(size: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        optimizer = SftOptimizer(examples.make("cnn"), SFT, microbatch_size=size)
        inputs = optimizer.policy.inputs(examples.observe(6))
        batch = DemoBatch(inputs, examples.demo_actions(6), torch.ones(6, examples.CHUNK, dtype=torch.bool))
        for step in range(3):
            optimizer.update(batch, torch.Generator().manual_seed(step))
        return optimizer.policy.state_dict()

    whole = learned(6)
    for name, value in learned(4).items():
        torch.testing.assert_close(value, whole[name], atol=2e-3, rtol=1e-2)
