"""What holds for every policy family and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nightshift import policies
from nightshift.algorithms.batch import idle
from nightshift.errors import DataError, OtherVersion
from nightshift.policies.base import Inputs, Policy
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.heads import HeadPolicy
from nightshift.types import INSTRUCTION, Observation
from tests.policies.examples import (
    ACTION_DIM,
    CHUNK,
    FAMILIES,
    SEES,
    STATISTICS,
    cloning_inputs,
    demo_actions,
    generators,
    make,
    make_policy,
    observe,
)

ROWS = 5
BY_HEART = [
    pytest.param(name, marks=[pytest.mark.slow] * name.startswith("openvla"))  # ten seconds each to train
    for name in SEES
    if not name.startswith(("flow", "pi0"))
]


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


@pytest.fixture(params=SEES)
def seeing(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


def outputs(policy: Policy, inputs: Inputs) -> Tensor:
    """What the network gives; of a policy that is no network with a head, its actions."""
    return policy.outputs(inputs) if isinstance(policy, HeadPolicy) else policy.greedy(inputs)


def row(observations: Observation, index: int) -> Observation:
    return {name: values[index : index + 1] for name, values in observations.items()}


def test_a_saved_policy_is_loaded_with_bit_identical_actions(policy: Policy, tmp_path: Path) -> None:
    policies.save(policy, tmp_path)
    loaded = policies.load(tmp_path)
    assert type(loaded) is type(policy)
    assert loaded.spec == policy.spec
    assert loaded.observations == policy.observations
    assert (loaded.act(observe(ROWS)) == policy.act(observe(ROWS))).all()


def test_weights_of_an_mlp_are_drawn_from_input_to_output() -> None:
    """Results that are published for a seed depend on it."""
    torch.manual_seed(0)
    fresh = GaussianMlp(inputs={"proprio": 4}, hidden=[8, 5], chunk=2, action_dim=3)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 5), torch.nn.Linear(5, 6)]
    drawn = [layer.weight for layer in fresh.net if isinstance(layer, torch.nn.Linear)]
    for one, expected in zip(drawn, layers, strict=True):
        torch.testing.assert_close(one, expected.weight, rtol=0, atol=0)


def test_actions_log_probs_and_entropy_have_one_number_per_dimension(policy: Policy) -> None:
    inputs = policy.inputs(observe(ROWS))
    actions, log_probs, latents = policy.decide(inputs, generators(ROWS), 0.5)
    again, entropy = policy.evaluate_actions({**inputs, **latents}, actions, 0.5)
    assert actions.shape == log_probs.shape == entropy.shape == (ROWS, CHUNK, ACTION_DIM)
    assert torch.equal(again, log_probs)
    assert policy.greedy(inputs).dtype == outputs(policy, inputs).dtype == torch.float32


def test_an_empty_batch_has_no_actions(policy: Policy) -> None:
    assert policy.act(observe(0)).shape == (0, CHUNK, ACTION_DIM)


def test_gradients_of_cloning_reach_every_parameter_that_decides_the_greedy_action(policy: Policy) -> None:
    actions, mask = demo_actions(8, horizon=policy.horizon), torch.ones(8, policy.horizon, dtype=torch.bool)
    loss = policy.bc_loss(cloning_inputs(policy, 8), actions, mask)
    loss.backward()  # type: ignore[no-untyped-call]
    spread = {id(parameter) for parameter in policy.std_parameters()}
    silent = [
        name
        for name, parameter in policy.named_parameters()
        if id(parameter) not in spread and (parameter.grad is None or not parameter.grad.any())
    ]
    assert silent == []


def test_a_row_does_not_depend_on_the_rows_beside_it(policy: Policy) -> None:
    observations = observe(ROWS)
    together = outputs(policy, policy.inputs(observations))
    for index in range(ROWS):
        alone = outputs(policy, policy.inputs(row(observations, index)))
        torch.testing.assert_close(alone[0], together[index], rtol=0, atol=1e-5)


def test_a_row_samples_from_its_own_generator_whatever_the_batch(policy: Policy) -> None:
    observations = observe(ROWS)
    together, _ = policy.sample(policy.inputs(observations), generators(ROWS), 0.5)
    for index in range(ROWS):
        alone, _ = policy.sample(policy.inputs(row(observations, index)), [generators(ROWS)[index]], 0.5)
        torch.testing.assert_close(alone[0], together[index], rtol=0, atol=1e-5)
    other, _ = policy.sample(policy.inputs(observations), generators(ROWS, seed=1), 0.5)
    assert not torch.equal(other, together)


def test_a_nan_in_masked_actions_reaches_neither_loss_nor_gradient(policy: Policy) -> None:
    inputs, actions = cloning_inputs(policy, ROWS), demo_actions(ROWS, horizon=policy.horizon)
    mask = torch.ones(ROWS, policy.horizon, dtype=torch.bool)
    mask[1:, 1:] = False

    def clone(padding: float) -> list[Tensor]:
        padded = torch.where(mask[..., None], actions, padding)
        loss = policy.bc_loss(inputs, padded, mask)
        used = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        return [loss, *(g for g in torch.autograd.grad(loss, used, allow_unused=True) if g is not None)]

    for with_nan, with_zero in zip(clone(float("nan")), clone(0.0), strict=True):
        assert torch.equal(with_nan, with_zero)


def test_critic_features_have_the_promised_size_and_no_gradient(policy: Policy) -> None:
    features = policy.critic_features(policy.inputs(observe(ROWS)))
    assert features.shape == (ROWS, policy.critic_size)
    assert not features.requires_grad
    assert not torch.equal(features[0], features[1])


def test_a_pass_that_counts_for_nothing_has_the_latents_of_a_decision_and_finite_log_probs(policy: Policy) -> None:
    nothing = idle(policy)
    inputs = policy.inputs(observe(1))
    recorded = {**inputs, **policy.decide(inputs, generators(1), 1.0).latents}
    assert {name: (values.shape, values.dtype) for name, values in nothing.inputs.items()} == {
        name: (values.shape, values.dtype) for name, values in recorded.items()
    }
    assert policy.log_prob(nothing.inputs, nothing.actions, 1.0).isfinite().all()


@pytest.mark.parametrize("family", ["cnn", "vla"])
def test_a_fresh_policy_that_sees_acts_the_mean_of_the_demos(family: str) -> None:
    fresh = policies.build(make_policy(family).spec)
    fresh.normalise_by(STATISTICS)
    expected = torch.tensor(STATISTICS["actions"]["mean"]).expand(ROWS, CHUNK, ACTION_DIM)
    assert torch.equal(torch.from_numpy(fresh.act(observe(ROWS))), expected)


@pytest.mark.parametrize("name", ["agentview", "wrist", "proprio", INSTRUCTION])
def test_every_input_of_a_policy_that_sees_changes_its_outputs(seeing: Policy, name: str) -> None:
    observations, other = observe(1), observe(2, seed=1)
    changed = {**observations, name: other[name][1:]}
    before, after = (outputs(seeing, seeing.inputs(o)) for o in (observations, changed))
    assert (before - after).abs().max() > 1e-4


def test_the_order_in_which_observations_come_is_irrelevant(policy: Policy) -> None:
    observations = observe(ROWS)
    assert (policy.act(dict(reversed(list(observations.items())))) == policy.act(observations)).all()


@pytest.mark.parametrize("family", BY_HEART)
def test_cloning_learns_random_decisions_by_heart(family: str) -> None:
    """The loss of a flow policy is random and takes more steps: test_flow.py has its own."""
    seeing = make_policy(family)
    inputs, actions = seeing.inputs(observe(32)), demo_actions(32)
    mask = torch.ones(32, CHUNK, dtype=torch.bool)
    optimizer = torch.optim.Adam(seeing.parameters(), lr=3e-3)

    @torch.no_grad()
    def error() -> float:
        """The mean error in standard deviations of the actions; the last dimension is constant."""
        return float(((seeing.greedy(inputs) - actions).abs().mean((0, 1)) / actions.std((0, 1)))[:-1].max())

    assert error() > 0.5
    for step in range(150):
        loss = seeing.bc_loss(cloning_inputs(seeing, 32, seed=step), actions, mask)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9 and error() < 0.1:
            return
    assert error() < 0.1


@pytest.mark.parametrize("other", ["cnn", "vla bins", "gaussian_mlp"])
def test_weights_of_another_policy_than_the_spec_beside_them_are_one_sentence(tmp_path: Path, other: str) -> None:
    policies.save(make(other), tmp_path)
    (tmp_path / policies.SPEC).write_text(json.dumps(make("vla").spec))
    with pytest.raises(DataError, match=r"has not the weights of the vla policy that policy\.json beside it describes"):
        policies.load(tmp_path)


def test_a_damaged_file_of_weights_is_one_sentence(tmp_path: Path) -> None:
    policies.save(make("vla"), tmp_path)
    (tmp_path / policies.WEIGHTS).write_bytes(b"not weights")
    with pytest.raises(DataError, match=r"policy\.safetensors is damaged"):
        policies.load(tmp_path)


@pytest.mark.parametrize(("family", "other"), [("vla", "cnn"), ("cnn", "gaussian_mlp"), ("gaussian_mlp", "vla")])
def test_a_spec_of_another_family_is_one_sentence(family: str, other: str) -> None:
    with pytest.raises(OtherVersion, match=f"none of the family {family} in this version of Nightshift"):
        policies.build({**make(other).spec, "family": family})


def test_an_unknown_family_is_named_with_those_that_exist() -> None:
    with pytest.raises(DataError, match="'rnn'; there are gaussian_mlp, cnn, vla"):
        policies.build({"family": "rnn"})
