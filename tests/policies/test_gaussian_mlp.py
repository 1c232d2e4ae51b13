"""The state policy: an MLP with a Gaussian head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nightshift import config, policies
from nightshift.errors import ConfigError
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.types import Observation
from tests.policies.examples import generators

STATISTICS = {
    "observations.proprio": {"mean": [0.1, -0.2], "std": [0.5, 0.0]},
    "observations.task": {"mean": [0.3], "std": [0.4]},
    "actions": {"mean": [0.1, -0.3, 0.5], "std": [0.2, 0.7, 0.0]},
}
OBSERVATIONS: Observation = {
    "proprio": np.array([[0.2, -0.2], [9.0, -0.3]], np.float32),
    "task": np.array([[1.0], [0.0]], np.float32),
}


@pytest.fixture
def policy() -> GaussianMlp:
    torch.manual_seed(0)
    policy = GaussianMlp(inputs={"proprio": 2, "task": 1}, hidden=[4], chunk=2, action_dim=3)
    policy.normalise_by(STATISTICS)
    with torch.no_grad():
        policy.head.log_std.copy_(torch.tensor([0.1, -0.2, 0.3]))  # type: ignore[operator]
    return policy


def test_the_mean_action_is_the_mlp_of_normalised_and_clipped_observations(policy: GaussianMlp) -> None:
    scaled = torch.tensor([[0.2, 0.0, 1.75], [5.0, -5.0, -0.75]])  # std is at least 0.01, features at most 5 stds
    expected = policy.net(scaled).reshape(2, 2, 3) * torch.tensor([0.2, 0.7, 0.01]) + torch.tensor([0.1, -0.3, 0.5])
    torch.testing.assert_close(torch.from_numpy(policy.act(OBSERVATIONS)), expected, rtol=0, atol=1e-6)


def test_samples_are_gaussian_around_the_mean_with_the_density_that_torch_computes(policy: GaussianMlp) -> None:
    inputs = policy.inputs(OBSERVATIONS)
    std = 0.5 * torch.tensor([0.1, -0.2, 0.3]).exp() * torch.tensor([0.2, 0.7, 0.01])
    normal = torch.distributions.Normal(policy.greedy(inputs), std.expand(2, 2, 3))
    noise = np.stack([generator.standard_normal((2, 3), dtype=np.float32) for generator in generators(2)])
    actions, log_probs = policy.sample(inputs, generators(2), 0.5)
    torch.testing.assert_close(actions, normal.loc + normal.scale * torch.from_numpy(noise))
    torch.testing.assert_close(log_probs, normal.log_prob(actions))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(policy.evaluate_actions(inputs, actions, 0.5)[1], normal.entropy())  # type: ignore[no-untyped-call]


def test_the_cloning_loss_is_the_squared_error_in_standard_deviations(policy: GaussianMlp) -> None:
    inputs = policy.inputs(OBSERVATIONS)
    shifted = policy.greedy(inputs) + torch.tensor([0.2, 0.0, 0.02])
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert policy.bc_loss(inputs, shifted, mask).item() == pytest.approx((1 + 0 + 4) / 3, rel=1e-4)


def test_an_input_that_is_no_vector_or_not_observed_is_refused() -> None:
    shapes = {"proprio": (2,), "agentview": (128, 128, 3)}

    def fresh(name: str) -> None:
        layers = {"activation": "tanh", "layer_norm": False, "head": "gaussian"}
        settings = config.GaussianMlp.model_validate(
            {"family": "gaussian_mlp", "inputs": [name], "hidden": [4], "chunk": 1, **layers}
        )
        policies.fresh(settings, shapes, action_dim=7)

    with pytest.raises(ConfigError, match="reads state vectors, and agentview is none"):
        fresh("agentview")
    with pytest.raises(ConfigError, match=r"policy\.inputs has wrist, and the observations are proprio, agentview"):
        fresh("wrist")
