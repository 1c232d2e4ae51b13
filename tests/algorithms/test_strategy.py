"""What a strategy owns: gradients, their norm, and the state of networks and optimizers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nightshift.algorithms.strategy import SingleProcess, Trained, weights

STRATEGY = SingleProcess()


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return network, torch.optim.Adam(network.parameters(), lr=0.1)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss = network(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_restored_networks_go_on_exactly_where_they_were() -> None:
    first: Trained = {"policy": fresh(0), "critic": fresh(1)}
    second: Trained = {"policy": fresh(2), "critic": fresh(3)}
    for number in range(3):
        for name in first:
            step(*first[name], number)
    STRATEGY.restore(STRATEGY.state(first), second)
    for name in first:
        step(*first[name], 3)
        step(*second[name], 3)
    expected = STRATEGY.state(first)
    assert len(expected) == 2 * 4 * (1 + 3), "of each of four tensors of two networks: weights, two moments, steps"
    for key, tensor in STRATEGY.state(second).items():
        assert torch.equal(tensor, expected[key]), key


def test_a_state_is_a_copy_that_later_steps_leave_alone() -> None:
    trained: Trained = {"policy": fresh(0)}
    step(*trained["policy"], 0)
    state = STRATEGY.state(trained)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    step(*trained["policy"], 1)
    assert all(torch.equal(state[name], tensor) for name, tensor in copies.items())
    assert not torch.equal(state["policy.weights.0.weight"], STRATEGY.state(trained)["policy.weights.0.weight"])


def test_the_weights_of_a_network_are_found_in_a_state() -> None:
    network, optimizer = fresh(0)
    found = weights(STRATEGY.state({"critic": fresh(1), "policy": (network, optimizer)}), "policy")
    expected = network.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_parameter_without_a_gradient_has_one_of_zero_and_the_norm_is_over_all() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    STRATEGY.sum_gradients(parameters)
    norm = STRATEGY.clip_gradients(parameters, 1.0)
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert norm == 5.0
    assert math.isclose(float(torch.cat(gradients).norm()), 1.0, abs_tol=1e-5)
    assert torch.equal(gradients[2], torch.zeros(2))
