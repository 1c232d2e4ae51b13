from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nightshift import config
from nightshift.algorithms.batch import collate
from nightshift.algorithms.collective import RankSlice
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.objectives import RatioLevel, elements
from nightshift.algorithms.on_policy import Iteration, OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.algorithms.strategy import SingleProcess
from nightshift.data.dataset_store import CloningSteps
from nightshift.policies.base import Inputs
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import section

TEMPERATURE = 0.3
REQUEST = RolloutRequest(
    task="near", split="train", init_state=0, controller="sample", seed=0, count=4, temperature=TEMPERATURE
)
SMALL = {
    "group_size": 4,
    "epochs": 3,
    "minibatch_size": 16,
    "target_kl": 10.0,
    "optimizer.learning_rate": 5e-4,
    "optimizer.warmup_steps": 0,
}
CHUNK = 2


def settings(**changes: Any) -> config.Rloo:
    """The defaults of params.yaml with changes by dotted name."""
    values = section("rloo")
    for name, value in {**SMALL, **changes}.items():
        *path, last = name.split(".")
        inner = values
        for key in path:
            inner = inner[key]
        inner[last] = value
    return config.Rloo.model_validate(values)


def policy() -> GaussianMlp:
    torch.manual_seed(0)
    return GaussianMlp(inputs={"proprio": 3}, hidden=[16], chunk=CHUNK, action_dim=7)


def episode(actor: GaussianMlp, *, member: int, success: bool, seed: int) -> Trajectory:
    """As a policy that acts in chunks would have played it; the last chunk may be cut short."""
    random = np.random.default_rng([seed, member])
    length = 5 + member
    decisions = math.ceil(length / CHUNK)
    seen = random.standard_normal((decisions, 3)).astype(np.float32)
    with torch.no_grad():
        sampled = actor.sample(actor.inputs({"proprio": seen}), [random] * decisions, TEMPERATURE)
    actions, log_probs = (tensor.numpy() for tensor in sampled)
    played = actions.reshape(-1, 7)[:length]
    return Trajectory(
        request=REQUEST,
        member=member,
        observations={"proprio": seen},
        final={"proprio": random.standard_normal(3).astype(np.float32)},
        actions=played,
        executed=played,
        log_probs=log_probs.reshape(-1, 7)[:length],
        chunk=CHUNK,
        success=success,
    )


def groups(actor: GaussianMlp, *outcomes: list[bool]) -> Groups:
    return [
        [episode(actor, member=member, success=success, seed=seed) for member, success in enumerate(group)]
        for seed, group in enumerate(outcomes)
    ]


def demos() -> Demos:
    """A few; of some chunks only the first action is still in the episode."""
    steps = demo_steps()
    return Demos(policy(), steps.observe, steps.actions, steps.mask)


def demo_steps() -> CloningSteps:
    generator = torch.Generator().manual_seed(5)
    return CloningSteps(
        observations={"proprio": (torch.randn(9, 3, generator=generator).numpy(), np.arange(9))},
        actions=torch.randn(9, CHUNK, 7, generator=generator).numpy(),
        mask=np.array([[True, number % 3 > 0] for number in range(9)]),
    )


MIXED = ([True, False, True, False], [False, False, True, False], [True] * 4)


def make_learner(
    actor: GaussianMlp, chosen: config.Rloo, *, microbatch_size: int = 16, demos: Demos | None = None
) -> OnPolicyLearner:
    generator = torch.Generator().manual_seed(0)
    return OnPolicyLearner(actor, chosen, generator, microbatch_size=microbatch_size, demos=demos)


def updated(chosen: config.Rloo, *, times: int = 2, microbatch_size: int = 16) -> dict[str, torch.Tensor]:
    """The weights after a few updates on the same episodes."""
    actor = policy()
    learner = make_learner(actor, chosen, microbatch_size=microbatch_size, demos=demos())
    played = groups(actor, *MIXED)
    for time in range(times):
        learner.update(Iteration(played, time / times))
    return {name: value.clone() for name, value in actor.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


GAE = {"advantage_estimator": "gae"}
WIDE = {"learn_std": True}
PENALISED = {"kl.coef": 0.5}
KNOBS: list[tuple[str, Any, dict[str, Any]]] = [
    ("learn_std", True, {}),
    ("advantage_estimator", "rloo_batch", {}),
    ("advantage_estimator", "grpo", {}),
    ("advantage_estimator", "reinforce++", {}),
    ("advantage_estimator", "gae", {}),
    ("ratio_level", "token", {}),
    ("ratio_level", "chunk", {}),
    ("loss_aggregation", "episode", {}),
    ("clip.low", 0.01, {}),
    ("clip.high", 0.01, {}),
    ("clip.dual", 1.0001, {"optimizer.learning_rate": 0.02}),
    ("clip.log_ratio", 0.001, {}),
    ("old_log_probs", "recomputed", {}),
    ("kl.coef", 0.5, {}),
    ("kl.form", "k1", PENALISED),
    ("kl.form", "k2", PENALISED),
    ("kl.form", "abs", PENALISED),
    ("kl.target", 0.001, PENALISED),
    ("kl.horizon", 100, {**PENALISED, "kl.target": 0.001}),
    ("entropy_coef", 0.1, WIDE),
    ("bc_weight", 0.5, {}),
    ("critic.hidden", [5], GAE),
    ("critic.learning_rate", 0.1, GAE),
    ("critic.gamma", 0.5, GAE),
    ("critic.gae_lambda", 0.1, GAE),
    ("epochs", 2, {}),
    ("minibatch_size", 9, {}),
    ("num_minibatches", 3, {"minibatch_size": None, "num_minibatches": 1}),
    ("optimizer.learning_rate", 0.02, {}),
    ("optimizer.weight_decay", 0.1, {}),
    ("optimizer.warmup_steps", 4, {}),
    ("optimizer.schedule", "constant", {}),
    ("optimizer.max_grad_norm", 1e-9, {}),
    ("target_kl", 1e-6, {}),
    ("target_kl", None, {"target_kl": 1e-6}),
]
NOT_THE_LEARNERS = {"iterations", "groups", "group_size", "temperature", "temperature_end"}
"""How much is played, and how; tests/rollouts/test_sampling.py and tests/stages/test_rloo.py cover these."""


@pytest.mark.parametrize(("knob", "value", "context"), KNOBS)
def test_every_knob_changes_what_is_learned(knob: str, value: Any, context: dict[str, Any]) -> None:
    assert not same(updated(settings(**context)), updated(settings(**{**context, knob: value})))


def test_no_knob_was_forgotten() -> None:
    fields = set()
    for name, field in config.Rloo.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        fields |= {f"{name}.{key}" for key in inner} if inner else {name}
    fields -= {f"sampling.{key}" for key in config.Sampling.model_fields}
    fields -= {f"validation.{key}" for key in config.Validation.model_fields}
    assert {knob for knob, _, _ in KNOBS} | NOT_THE_LEARNERS == fields


@pytest.mark.parametrize(
    "chosen",
    [
        {"advantage_estimator": "rloo", "loss_aggregation": "step"},
        {"advantage_estimator": "rloo", "loss_aggregation": "episode"},
        {"advantage_estimator": "gae", "loss_aggregation": "step"},
        {"advantage_estimator": "gae", "loss_aggregation": "episode"},
        {"bc_weight": 5.0},
    ],
)
def test_gradients_do_not_depend_on_the_microbatch_size(chosen: dict[str, Any]) -> None:
    whole = updated(settings(**chosen), microbatch_size=1000)
    for size in (1, 7):
        accumulated = updated(settings(**chosen), microbatch_size=size)
        for name, value in whole.items():
            torch.testing.assert_close(accumulated[name], value, atol=1e-5, rtol=1e-4)


class MorePasses(SingleProcess):
    """As if another rank had more data."""

    def passes(self, count: int) -> int:
        return count + 2


@pytest.mark.parametrize("chosen", [{}, {**GAE, **WIDE, **PENALISED, "bc_weight": 0.5, "entropy_coef": 0.1}])
def test_passes_without_data_change_nothing(chosen: dict[str, Any]) -> None:
    learned = []
    for strategy in (SingleProcess(), MorePasses()):
        actor = policy()
        generator = torch.Generator().manual_seed(0)
        learner = OnPolicyLearner(
            actor, settings(**chosen), generator, microbatch_size=7, demos=demos(), strategy=strategy
        )
        metrics = learner.update(Iteration(groups(policy(), *MIXED), 0.0))
        learned.append((learner.tensors(), metrics, learner.microbatches))
    (tensors, metrics, count), (with_more, same_metrics, more) = learned
    assert same(tensors, with_more)
    assert metrics == same_metrics
    assert more > count


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_without_an_update_every_ratio_is_one(level: RatioLevel) -> None:
    actor = policy()
    batch = collate(actor, [e for group in groups(actor, *MIXED) for e in group])
    with torch.no_grad():
        now = actor.log_prob(batch.inputs, batch.actions, TEMPERATURE)
    new, old = (elements(log_probs, batch.mask, level)[0] for log_probs in (now, batch.log_probs))
    torch.testing.assert_close((new - old).exp(), torch.ones_like(new), atol=1e-5, rtol=0)


def test_a_batch_counts_the_step_that_ended_the_episode_and_nothing_after_it() -> None:
    actor = policy()
    batch = collate(
        actor, [episode(actor, member=0, success=True, seed=0), episode(actor, member=1, success=False, seed=0)]
    )
    assert batch.mask.sum(1).tolist() == [2, 2, 1, 2, 2, 2]
    assert batch.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert not batch.actions[2, 1].any()


def change(actor: GaussianMlp, played: Groups, success: bool) -> float:
    chosen = [e for group in played for e in group if e.success is success]
    batch = collate(actor, chosen)
    with torch.no_grad():
        now = actor.log_prob(batch.inputs, batch.actions, TEMPERATURE)
    return float(((now - batch.log_probs) * batch.mask[..., None]).sum())


@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
def test_actions_that_worked_become_likelier_and_those_that_failed_less_likely(advantage: str) -> None:
    actor = policy()
    played = groups(actor, *([True, False, True, False],) * 2)
    chosen = settings(advantage_estimator=advantage, **{"critic.gae_lambda": 1.0, "epochs": 10})
    make_learner(actor, chosen).update(Iteration(played, 0.0))
    assert change(actor, played, True) > 0 > change(actor, played, False)


def test_the_update_stops_at_the_target_kl() -> None:
    actor = policy()
    played = groups(actor, *([True, False, True, False],) * 2)
    chosen = settings(target_kl=0.02, epochs=50)
    metrics = make_learner(actor, chosen).update(Iteration(played, 0.0))
    assert 0 < metrics["update/gradients"] < 50
    assert 0.02 < metrics["update/kl"] < 1


def test_without_a_target_kl_the_update_is_that_of_one_too_far_to_reach() -> None:
    def learned(limit: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        actor = policy()
        learner = make_learner(actor, settings(target_kl=limit))
        return actor.state_dict(), learner.update(Iteration(groups(actor, *MIXED), 0.0))

    (free, of_free), (bound, of_bound) = learned(None), learned(1000.0)
    assert same(free, bound)
    assert of_free == of_bound
    assert of_free["update/kl"] > 0


@pytest.mark.parametrize(
    ("minibatch_size", "num_minibatches", "sizes"),
    [(9, None, [9, 9, 2]), (20, None, [20]), (None, 3, [7, 7, 6]), (None, 1, [20]), (None, 30, [1] * 20)],
)
def test_an_epoch_is_split_by_size_with_a_rest_or_into_equal_parts(
    minibatch_size: int | None, num_minibatches: int | None, sizes: list[int]
) -> None:
    chosen = settings(epochs=1, minibatch_size=minibatch_size, num_minibatches=num_minibatches)
    parts = list(make_learner(policy(), chosen)._minibatches(RankSlice(0, 20, 20)))
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(20))


@pytest.mark.parametrize("both", [None, 4])
def test_a_minibatch_has_either_a_size_or_a_number(both: int | None) -> None:
    with pytest.raises(ValidationError, match="set one of minibatch_size and num_minibatches to a number"):
        settings(minibatch_size=both, num_minibatches=both)


def test_the_count_of_microbatches_rises_with_every_one_of_them() -> None:
    actor = policy()
    played = groups(actor, *MIXED[:2])
    decisions = len(collate(actor, [e for group in played for e in group]))
    chosen = settings(minibatch_size=8, epochs=3, advantage_estimator="gae", bc_weight=0.5, target_kl=None)
    learner = make_learner(actor, chosen, microbatch_size=1, demos=demos())
    gradients = learner.update(Iteration(played, 0.0))["update/gradients"]
    passes = 1 + 1 + chosen.epochs + 1 + chosen.epochs  # the critic's inputs, before, the policy's, after, the critic's
    finals = len(played) * 4
    assert learner.microbatches == passes * decisions + finals + gradients * 8


class Counting(GaussianMlp):
    """Counts the decisions that log-probs were computed of."""

    scored = 0

    def evaluate_actions(
        self, inputs: Inputs, actions: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.scored += len(actions)
        return super().evaluate_actions(inputs, actions, temperature)


@pytest.mark.parametrize("old", ["rollout", "recomputed"])
def test_without_a_target_kl_log_probs_are_computed_before_the_first_gradient_and_after_the_last(old: str) -> None:
    torch.manual_seed(0)
    actor = Counting(inputs={"proprio": 3}, hidden=[16], chunk=CHUNK, action_dim=7)
    played = groups(actor, *MIXED[:2])
    decisions = len(collate(actor, [e for group in played for e in group]))
    chosen = settings(target_kl=None, epochs=3, old_log_probs=old)
    actor.scored = 0
    make_learner(actor, chosen).update(Iteration(played, 0.0))
    assert actor.scored == (1 + chosen.epochs + 1) * decisions


@pytest.mark.parametrize(("aggregation", "weigh"), [("step", [5, 6, 7, 8]), ("episode", [1, 1, 1, 1])])
def test_every_step_or_every_episode_weighs_the_same(aggregation: str, weigh: list[float]) -> None:
    actor = policy()
    chosen = settings(loss_aggregation=aggregation, epochs=1, minibatch_size=1000)
    learner = make_learner(actor, chosen, microbatch_size=2)
    metrics = learner.update(Iteration(groups(actor, [True, False, False, False]), 0.0))
    of_episodes = np.array([1, -1 / 3, -1 / 3, -1 / 3])  # before the first step every ratio is one
    assert metrics["update/loss"] == pytest.approx(-np.average(of_episodes, weights=weigh), abs=1e-6)


def test_ppo_kl_is_what_the_policy_moved_on_average_before_each_gradient() -> None:
    actor = policy()
    learner = make_learner(actor, settings(epochs=1, minibatch_size=1000))
    played = groups(actor, *MIXED[:2])
    assert learner.update(Iteration(played, 0.0))["update/ppo_kl"] == pytest.approx(0, abs=1e-6)
    batch = collate(actor, [e for group in played for e in group])
    with torch.no_grad():
        now = actor.log_prob(batch.inputs, batch.actions, TEMPERATURE)
    moved = ((batch.log_probs - now) * batch.mask[..., None]).sum() / batch.mask.sum()
    assert learner.update(Iteration(played, 0.0))["update/ppo_kl"] == pytest.approx(moved.item(), rel=1e-4)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("old", ["rollout", "recomputed"])
def test_how_far_the_learners_probabilities_are_from_the_rollouts_is_measured(old: str, level: RatioLevel) -> None:
    actor = policy()
    learner = make_learner(actor, settings(old_log_probs=old, ratio_level=level))
    played = groups(actor, *MIXED[:2])
    first = learner.update(Iteration(played, 0.0))
    assert first["update/rollout_deviation"] < 1e-5 and first["update/rollout_deviation_std"] < 1e-5
    batch = collate(actor, [e for group in played for e in group])
    with torch.no_grad():
        now = actor.log_prob(batch.inputs, batch.actions, TEMPERATURE)
    (new, counted), (acted, _) = (elements(log_probs, batch.mask, level) for log_probs in (now, batch.log_probs))
    deviations = ((new - acted)[counted].exp() - 1).abs()
    second = learner.update(Iteration(played, 0.0))
    assert second["update/rollout_deviation"] == pytest.approx(deviations.mean().item(), rel=1e-4)
    assert second["update/rollout_deviation_std"] == pytest.approx(deviations.std(correction=0).item(), rel=1e-4)
    assert deviations.mean() > 1e-3


def test_uniform_groups_leave_the_policy_alone() -> None:
    actor = policy()
    before = copy.deepcopy(actor.state_dict())
    played = groups(actor, [True] * 4, [False] * 4)
    metrics = make_learner(actor, settings()).update(Iteration(played, 0.0))
    assert metrics["update/gradients"] == 0
    assert same(before, actor.state_dict())


@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
def test_an_iteration_without_episodes_changes_nothing_and_harms_nothing(advantage: str) -> None:
    def learned(*, idle_first: bool) -> dict[str, torch.Tensor]:
        actor = policy()
        learner = make_learner(actor, settings(advantage_estimator=advantage))
        torch.manual_seed(7)
        if idle_first:
            assert learner.update(Iteration([], 0.0))["update/gradients"] == 0
        learner.update(Iteration(groups(actor, *MIXED), 0.0))
        return actor.state_dict()

    assert same(learned(idle_first=True), learned(idle_first=False))


@pytest.mark.parametrize(("changes", "words"), [({"kl.target": 0.1}, "kl.coef is 0")])
def test_settings_without_effect_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**changes)


def blind(played: Groups) -> Groups:
    """The same episodes of a policy that saw nothing that is a number."""
    return [
        [replace(e, observations={"proprio": np.full((e.length, 3), np.nan, np.float32)}) for e in group]
        for group in played
    ]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    actor = policy()
    before = copy.deepcopy(actor.state_dict())
    learner = make_learner(actor, settings(epochs=1, minibatch_size=1000))
    metrics = learner.update(Iteration(blind(groups(actor, *MIXED)), 0.0))
    assert metrics["update/skipped_steps"] == 1
    assert "update/critic_skipped_steps" not in metrics
    assert same(before, actor.state_dict())


def test_skipped_steps_of_the_critic_are_counted_and_kept() -> None:
    chosen = settings(advantage_estimator="gae", epochs=2, minibatch_size=1000)
    actor = policy()
    learner = make_learner(actor, chosen)
    assert learner.update(Iteration(groups(actor, *MIXED), 0.0))["update/critic_skipped_steps"] == 0
    assert learner.critic is not None
    before = copy.deepcopy(learner.critic.state_dict())
    assert learner.update(Iteration(blind(groups(actor, *MIXED)), 0.0))["update/critic_skipped_steps"] == 2
    assert same(before, learner.critic.state_dict())
    other = make_learner(policy(), chosen)
    other.restore(learner.tensors(), learner.counters)
    assert other.counters == learner.counters
    assert other.update(Iteration([], 0.0))["update/critic_skipped_steps"] == 2


def test_an_update_uses_the_temperature_that_its_episodes_were_sampled_at() -> None:
    """Log-probs at any other temperature would give ratios other than 1 before the first gradient step."""
    actor = policy()
    learner = OnPolicyLearner(actor, settings(epochs=1, minibatch_size=1000), torch.Generator(), microbatch_size=1000)
    metrics = learner.update(Iteration(groups(actor, *MIXED), 0.0))
    assert metrics["update/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["update/clip_fraction"] == 0
