"""An update gives the weights of RLPD's update written out plainly, and those of no faulty one."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from nightshift.algorithms.rlpd.learner import RlpdLearner
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.policies.gaussian_mlp import STATE, GaussianMlp
from tests.algorithms.rlpd.parts import concatenated, settings
from tests.algorithms.rlpd.reference import Agent, Batch, Fault
from tests.algorithms.rlpd.test_critics import single

ROWS, STATES, ACTIONS, UTD, DISCOUNT = 16, 4, 3, 3, 0.9
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Sides(nn.Module):
    """The policy's network; its outputs are mean and log-std of each dimension in turn, and here side by side."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, states: Tensor) -> Tensor:
        outputs = self.net(states).reshape(-1, ACTIONS, 2)
        return torch.cat([outputs[..., 0], outputs[..., 1]], dim=-1)


def make_learner() -> RlpdLearner:
    torch.manual_seed(0)
    policy = GaussianMlp(inputs={"proprio": STATES}, hidden=[8], chunk=1, action_dim=ACTIONS, head="tanh_gaussian")
    return RlpdLearner(policy, settings(discount=DISCOUNT, batch_size=ROWS, critics={"num_min_qs": 3}), seed=0)


def make_reference(learner: RlpdLearner) -> Agent:
    policy = learner.policy
    assert isinstance(policy, GaussianMlp)
    return Agent(
        actor=Sides(copy.deepcopy(policy.net)),
        critics=[single(learner.critics, index, nn.ReLU) for index in range(learner.critics.count)],
        log_temperature=nn.Parameter(learner.temperature.log_value.detach().clone()),
        learning_rate=1e-2,
        discount=DISCOUNT,
        tau=0.1,
        target_entropy=-ACTIONS / 2,
    )


def make_slices(seed: int) -> list[Batch]:
    """Without the random numbers of the update."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 2 - 1

    ends = torch.zeros(2, ROWS)
    ends[0, :3] = ends[1, 3:6] = 1  # three terminations, three time limits
    empty = torch.zeros(0)
    return [
        Batch(
            draw(ROWS, STATES),
            draw(ROWS, ACTIONS),
            draw(ROWS),
            1 - ends[0],
            ends[1],
            draw(ROWS, STATES),
            (),
            empty,
            empty,
        )
        for _ in range(UTD)
    ]


def as_transitions(batch: Batch) -> Transitions:
    chunk = batch.actions[:, None]
    return Transitions(
        inputs={STATE: batch.states},
        actions=chunk,
        rewards=batch.rewards,
        discounts=DISCOUNT * batch.masks,
        next_inputs={STATE: batch.next_states},
        bc_actions=chunk,
        bc_mask=torch.zeros(ROWS, 1, dtype=torch.bool),
        bc_filter=torch.zeros(ROWS, 1, dtype=torch.bool),
    )


def with_draws(learner: RlpdLearner, slices: list[Batch]) -> list[Batch]:
    """The random numbers that the learner will draw, from a copy of its generator."""
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    for batch in slices:
        batch.members = torch.randperm(learner.critics.count, generator=generator)[:3].tolist()
    next_noise = torch.randn(UTD, ROWS, 1, ACTIONS, generator=generator)
    for batch, noise in zip(slices, next_noise, strict=True):
        batch.next_noise = noise[:, 0]
    slices[-1].noise = torch.randn(ROWS, 1, ACTIONS, generator=generator)[:, 0]
    return slices


def distance(fault: Fault | None) -> float:
    """The largest difference of a weight between the learner and the reference, after three updates of each."""
    learner = make_learner()
    reference = make_reference(learner)
    for number in range(3):
        slices = with_draws(learner, make_slices(number))
        reference.update(slices, fault)
        learner.update(concatenated([as_transitions(batch) for batch in slices]))
    pairs: list[tuple[Tensor, Tensor]] = [(learner.temperature.log_value, reference.log_temperature)]
    pairs += list(zip(learner.policy.parameters(), reference.actor.parameters(), strict=True))
    for ensemble, networks in ((learner.critics, reference.critics), (learner.target_critics, reference.targets)):
        for index, network in enumerate(networks):
            mine = single(ensemble, index, nn.ReLU)
            pairs += list(zip(mine.parameters(), network.parameters(), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs)


def test_three_updates_give_the_weights_of_the_plain_algorithm() -> None:
    assert distance(None) < 2e-4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_algorithm_gives_other_weights(fault: Fault) -> None:
    assert distance(fault) > 2e-3
