"""The ensemble as one batched computation is the same as a loop over single networks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nightshift.algorithms.rlpd.critics import CriticEnsemble, polyak_update
from tests.algorithms.rlpd.parts import settings

FEATURES, ACTIONS, ROWS = 5, 3, 7


def ensemble(**changes: Any) -> CriticEnsemble:
    torch.manual_seed(0)
    made = CriticEnsemble(FEATURES + ACTIONS, settings(critics=changes).critics)
    for parameter in made.parameters():  # gains and shifts, too: fresh ones hide a mix-up of networks
        nn.init.normal_(parameter, std=0.5)
    return made


def single(critics: CriticEnsemble, index: int, activation: type[nn.Module]) -> nn.Sequential:
    """Network `index` of the ensemble out of torch's own layers."""
    layers: list[nn.Module] = []
    linears: list[Any] = [*critics.linears, critics.output]
    norms: list[Any] = [*critics.norms]
    for number, stacked in enumerate(linears):
        weight, bias = stacked.weight[index].T, stacked.bias[index, 0]
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight, linear.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        layers.append(linear)
        if number < len(linears) - 1:
            if norms:
                norm = nn.LayerNorm(weight.shape[0], eps=1e-6)
                norm.weight = nn.Parameter(norms[number].gain[index, 0].detach().clone())
                norm.bias = nn.Parameter(norms[number].shift[index, 0].detach().clone())
                layers.append(norm)
            layers.append(activation())
    return nn.Sequential(*layers)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.rand(ROWS, ACTIONS, generator=generator)


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize(("name", "activation"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
def test_values_and_gradients_are_those_of_a_loop_over_single_networks(
    layer_norm: bool, name: str, activation: type[nn.Module]
) -> None:
    critics = ensemble(layer_norm=layer_norm, activation=name)
    networks = [single(critics, index, activation) for index in range(critics.count)]
    joint = torch.cat(inputs(), dim=-1)
    expected = torch.stack([network(joint).squeeze(-1) for network in networks])
    values = critics(*inputs())
    torch.testing.assert_close(values, expected)
    first: Any = critics.linears[0]
    gradients = torch.autograd.grad(values.square().mean(), [critics.output.weight, first.weight])
    expected.square().mean().backward()  # type: ignore[no-untyped-call]
    for index, network in enumerate(networks):
        for gradient, layer in zip(gradients, (network[-1], network[0]), strict=True):
            torch.testing.assert_close(gradient[index].T, layer.weight.grad)


def test_the_values_of_some_members_are_those_rows_of_all_values() -> None:
    critics = ensemble()
    members = torch.tensor([3, 0])
    torch.testing.assert_close(critics(*inputs(), members), critics(*inputs())[members])


def test_networks_start_apart_within_xaviers_bound() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(FEATURES + ACTIONS, settings().critics)
    for a, b in pairwise(critics(*inputs())):
        assert not torch.allclose(a, b)
    first: Any = critics.linears[0]
    assert first.weight.abs().max() <= (6 / (FEATURES + ACTIONS + 8)) ** 0.5


def test_the_polyak_average_moves_by_tau_of_the_distance() -> None:
    target, source = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 20.0])
    polyak_update([target], [source], 0.1)
    torch.testing.assert_close(target, torch.tensor([0.1, 11.0]))
