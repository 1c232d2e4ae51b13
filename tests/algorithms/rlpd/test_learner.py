"""What an update of RLPD changes, what it leaves alone, and that it resumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nightshift.algorithms.rlpd.learner import Draws, RlpdLearner, _adam, _descend, mean_entropy
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.errors import ConfigError
from nightshift.policies.heads import HeadPolicy
from tests.algorithms.rlpd.parts import ROWS, concatenated, seeing_policy, settings, state_policy, transitions
from tests.policies import examples

MAKERS = [state_policy, seeing_policy]


@pytest.fixture(params=MAKERS, ids=["state", "seeing"])
def learner(request: pytest.FixtureRequest) -> RlpdLearner:
    return RlpdLearner(request.param(), settings(), seed=0)


def weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def batch(policy: HeadPolicy, count: int = 2, seed: int = 0) -> Transitions:
    """Of `count` slices."""
    return concatenated([transitions(policy, seed=seed + index) for index in range(count)])


def targets(learner: RlpdLearner, part: Transitions, draws: Draws) -> Tensor:
    return learner._targets(part, draws.members[0], draws.next_noise[0])


def encoder(policy: HeadPolicy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.encoder_parameters()]


def test_warming_up_trains_critics_and_temperature_and_leaves_the_actor_bit_for_bit() -> None:
    learner = RlpdLearner(state_policy(), settings(), seed=0)
    actor, critics, temperature = weights(learner.policy), weights(learner.critics), weights(learner.temperature)
    for seed in range(3):
        learner.update(batch(learner.policy, seed=seed), train_actor=False)
    assert same(weights(learner.policy), actor)
    assert not same(weights(learner.critics), critics)
    assert not same(weights(learner.temperature), temperature)
    assert not any(value.any() for state in learner._actor_optimizer.state.values() for value in state.values())


def test_warming_up_trains_a_shared_encoder_but_nothing_that_only_acts() -> None:
    learner = RlpdLearner(seeing_policy(), settings(), seed=0)
    shared = {id(parameter) for parameter in learner.policy.encoder_parameters()}
    acting = {name for name, parameter in learner.policy.named_parameters() if id(parameter) not in shared}
    before = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    learner.update(batch(learner.policy), train_actor=False)
    changed = {name for name, p in learner.policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(before) - acting


def test_the_encoder_of_a_clone_stays_bit_for_bit_while_critics_and_actor_learn() -> None:
    learner = RlpdLearner(seeing_policy(), settings(actor={"start": "clone"}), seed=0)
    shared = {id(parameter) for parameter in learner.policy.encoder_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    critics = weights(learner.critics)
    for train_actor in (False, True):
        learner.update(batch(learner.policy), train_actor=train_actor)
    changed = {name for name, p in learner.policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in learner.policy.named_parameters() if id(p) not in shared}
    assert not same(weights(learner.critics), critics)


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    """On a GPU, gradients of convolutions may have their channels last, and fused Adam refuses them."""
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
    factor = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    _descend((weight * factor).sum(), _adam([weight], 1e-3))
    assert weight.grad is not None and weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, factor)


def test_an_update_changes_the_actor_once_whatever_the_update_to_data_ratio(learner: RlpdLearner) -> None:
    learner.update(batch(learner.policy, count=4))
    assert {int(state["step"]) for state in learner._actor_optimizer.state.values()} == {1}
    assert {int(state["step"]) for state in learner._temperature_optimizer.state.values()} == {1}
    assert {int(state["step"]) for state in learner._critic_optimizer.state.values()} == {4}


def test_the_actors_loss_does_not_move_the_encoder_that_it_shares() -> None:
    """With values that do not depend on the features, an update must leave the encoder as it is."""
    learner = RlpdLearner(seeing_policy(), settings(critics={"layer_norm": False}), seed=0)
    size = learner.policy.critic_size
    with torch.no_grad():
        next(learner.critics.parameters())[:, :size] = 0
    before = encoder(learner.policy)
    part = transitions(learner.policy)
    learner._update_actor(part, learner._draw(1, 0.0), train_actor=True, clone=False)
    assert all(torch.equal(a, b) for a, b in zip(before, encoder(learner.policy), strict=True))


def test_the_encoder_of_the_target_is_a_polyak_average() -> None:
    learner = RlpdLearner(seeing_policy(), settings(critics={"tau": 0.25}), seed=0)
    start = encoder(learner.policy)
    learner.update(batch(learner.policy, count=1))
    for before, now, average in zip(start, encoder(learner.policy), learner._target_encoder, strict=True):
        torch.testing.assert_close(average, 0.75 * before + 0.25 * now)


def test_both_sides_of_a_transition_and_all_cameras_are_shifted_independently() -> None:
    learner = RlpdLearner(seeing_policy(), settings(), seed=0)
    part = transitions(learner.policy)
    part = replace(part, inputs={**part.inputs, "wrist": part.inputs["agentview"]}, next_inputs=part.inputs)
    changed = learner._augmented(part, learner._draw(1, 0.0).augmentation[0])
    assert not torch.equal(changed.inputs["agentview"], part.inputs["agentview"])
    assert not torch.equal(changed.inputs["agentview"], changed.inputs["wrist"])
    assert not torch.equal(changed.inputs["agentview"], changed.next_inputs["agentview"])


def test_what_follows_a_termination_has_no_influence(learner: RlpdLearner) -> None:
    part = transitions(learner.policy)
    ended = part.discounts == 0
    draws = learner._draw(1, 0.0)
    found = targets(learner, part, draws)
    assert torch.equal(found[ended], part.rewards[ended])
    elsewhere = transitions(learner.policy, seed=5).next_inputs
    others = targets(learner, replace(part, next_inputs=elsewhere), draws)
    assert torch.equal(others[ended], found[ended])
    assert not torch.isclose(others[~ended], found[~ended]).any()


def test_the_entropy_is_backed_up_only_where_that_is_asked_for() -> None:
    with_entropy, without = (
        RlpdLearner(state_policy(), settings(entropy={"backup": backup}), seed=0) for backup in (True, False)
    )
    part = transitions(without.policy)
    draws = without._draw(1, 0.0)
    expected = targets(without, part, draws)
    assert not torch.allclose(targets(with_entropy, part, draws), expected)
    with torch.no_grad():
        with_entropy.temperature.log_value.fill_(-100.0)
    torch.testing.assert_close(targets(with_entropy, part, draws), expected)


def test_critics_are_drawn_without_replacement_and_anew_for_every_step() -> None:
    learner = RlpdLearner(state_policy(), settings(critics={"num_qs": 4, "num_min_qs": 3}), seed=0)
    draws = [tuple(learner._draw(1, 0.0).members[0].tolist()) for _ in range(200)]
    assert all(len(set(drawn)) == 3 for drawn in draws)
    assert {member for drawn in draws for member in drawn} == {0, 1, 2, 3}
    assert len({frozenset(drawn) for drawn in draws}) == 4


def test_a_resumed_learner_makes_the_same_weights_bit_for_bit(learner: RlpdLearner) -> None:
    for seed in range(2):
        learner.update(batch(learner.policy, seed=seed))
    saved = learner.state()
    resumed = RlpdLearner(_fresh_like(learner.policy), settings(), seed=99)
    resumed.restore(saved)
    for seed in range(2, 5):
        for one in (learner, resumed):
            one.update(batch(one.policy, seed=seed))
    left, right = learner.state(), resumed.state()
    assert left.keys() == right.keys()
    assert same(left, right)


def test_the_state_is_a_copy(learner: RlpdLearner) -> None:
    saved = learner.state()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    learner.update(batch(learner.policy))
    assert same(saved, kept)


def test_the_averaged_policy_follows_the_actor_by_its_decay(learner: RlpdLearner) -> None:
    expected = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    for seed in range(3):
        learner.update(batch(learner.policy, seed=seed))
        for average, newest in zip(expected, learner.policy.parameters(), strict=True):
            average.lerp_(newest.detach(), 1 - settings().actor.ema_decay)
    assert [*map(torch.Tensor.tolist, expected)] == [*map(torch.Tensor.tolist, learner.averaged.parameters())]


def test_without_decay_the_averaged_policy_is_the_newest() -> None:
    learner = RlpdLearner(state_policy(), settings(actor={"ema_decay": 0.0}), seed=0)
    learner.update(batch(learner.policy))
    assert same(dict(learner.averaged.state_dict()), dict(learner.policy.state_dict()))


def test_the_cloning_loss_pulls_the_actor_to_the_demos_and_fades() -> None:
    chosen = settings(actor={"bc_weight": 1000.0, "bc_steps": 40, "learning_rate": 1e-2})
    learner = RlpdLearner(state_policy(), chosen, seed=0)
    part = transitions(learner.policy)

    def error() -> float:
        return learner.policy.bc_loss(part.inputs, part.bc_actions, part.bc_mask).item()

    start = error()
    weights_of_cloning = []
    for _ in range(41):
        weights_of_cloning.append(learner._bc_weight())
        metrics = learner.update(part)
    assert error() < 0.5 * start
    assert weights_of_cloning[0] == 1000
    assert weights_of_cloning[20] == pytest.approx(500)
    assert weights_of_cloning[-1] == 0
    assert "actor/bc_loss" not in metrics


def test_interventions_in_doubt_are_cloned_where_the_critics_value_them_above_the_actors_actions() -> None:
    chosen = settings(interventions={"imitate": "better"}, actor={"bc_weight": 1.0, "bc_steps": 10})
    learner = RlpdLearner(state_policy(), chosen, seed=0)
    part = transitions(learner.policy)
    demos, in_doubt = torch.zeros_like(part.bc_filter), torch.zeros_like(part.bc_filter)
    demos[:2] = in_doubt[2:] = True
    part = replace(part, bc_mask=demos | in_doubt, bc_filter=in_doubt)
    features = learner.policy.critic_view(learner.policy.encode(part.inputs))
    values = learner.critics(features, part.actions.flatten(1)).detach()
    own = values + torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])  # worth less than the demo's, or more
    cloned = learner._cloned(part, learner.policy.encode(part.inputs), own)
    assert [bool(row.all()) for row in cloned] == [True, True, True, False, True, False]


def test_the_mean_entropy_weighs_every_decision_the_same() -> None:
    policy = state_policy()
    parts = [policy.inputs(examples.observe(count, seed=count)) for count in (1, 5)]
    every = [policy.evaluate_actions(part, torch.zeros_like(policy.greedy(part)), 1.0)[1] for part in parts]
    assert mean_entropy(policy, parts) == pytest.approx(torch.cat(every).sum((1, 2)).mean().item())


@pytest.mark.parametrize(("above", "rises"), [(1.0, True), (-1.0, False)])
def test_the_temperature_follows_a_target_that_is_added_to_the_base_entropy(above: float, rises: bool) -> None:
    policy = state_policy()
    part = batch(policy)
    own = mean_entropy(policy, [part.inputs])
    learner = RlpdLearner(policy, settings(entropy={"target": above}), seed=0, base_entropy=own)
    assert learner.target_entropy == pytest.approx(own + above * policy.chunk * policy.action_dim)
    before = learner.temperature().item()
    for _ in range(20):
        learner.update(part, train_actor=False)
    assert (learner.temperature().item() > before) is rises


def test_critics_learn_the_value_of_a_chain_through_a_time_limit() -> None:
    """Every transition leads to a state like itself with reward 1: bootstrapped, that is worth 1 / (1 - 0.5)."""
    chosen = settings(entropy={"backup": False, "initial_temperature": 1e-6}, critics={"tau": 0.5})
    learner = RlpdLearner(state_policy(), chosen, seed=0)
    part = transitions(learner.policy)
    part = replace(part, rewards=torch.ones(ROWS), discounts=torch.full((ROWS,), 0.5), next_inputs=part.inputs)
    for _ in range(400):
        metrics = learner.update(part, train_actor=False)
    assert metrics["critic/value"].item() == pytest.approx(2.0, abs=0.15)


def test_a_policy_with_another_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="Gaussian through tanh"):
        RlpdLearner(examples.make("gaussian_mlp"), settings(), seed=0)


def _fresh_like(policy: HeadPolicy) -> HeadPolicy:
    made = next(maker() for maker in MAKERS if type(maker()) is type(policy))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made
