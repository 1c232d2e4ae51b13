from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nightshift import config
from nightshift.algorithms.batch import collate
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.objectives import Level, elements
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import REPOSITORY

REQUEST = RolloutRequest(task="near", split="train", init_state=0, controller="sample", seed=0, count=4)
SMALL = {
    "group_size": 4,
    "epochs": 3,
    "mini_batch": 16,
    "micro_batch": 16,
    "kl_limit": 10.0,
    "temperature": 0.3,
    "optimizer.learning_rate": 5e-4,
    "optimizer.warmup": 0,
}
CHUNK = 2


def settings(**changes: Any) -> config.Rloo:
    """The defaults of params.yaml with changes by dotted name."""
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text())["rloo"]
    for name, value in {**SMALL, **changes}.items():
        *path, last = name.split(".")
        section = values
        for key in path:
            section = section[key]
        section[last] = value
    return config.Rloo.model_validate(values)


def policy() -> GaussianMlp:
    torch.manual_seed(0)
    return GaussianMlp(inputs={"proprio": 3}, hidden=[16], chunk=CHUNK, action_dim=7)


def episode(actor: GaussianMlp, *, member: int, success: bool, seed: int) -> Trajectory:
    """As a policy that acts in chunks would have played it; the last chunk may be cut short."""
    random = np.random.default_rng([seed, member])
    length = 5 + member
    seen = random.standard_normal((length, 3)).astype(np.float32)
    noise = random.standard_normal((math.ceil(length / CHUNK), CHUNK, 7)).astype(np.float32)
    actions, log_probs = actor.sample({"proprio": seen[::CHUNK]}, noise, settings().temperature)
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
    generator = torch.Generator().manual_seed(5)
    return Demos(
        torch.randn(9, 3, generator=generator),
        torch.randn(9, CHUNK, 7, generator=generator),
        torch.tensor([[True, number % 3 > 0] for number in range(9)]),
    )


MIXED = ([True, False, True, False], [False, False, True, False], [True] * 4)


def updated(chosen: config.Rloo, *, times: int = 2) -> dict[str, torch.Tensor]:
    """The weights after a few updates on the same episodes."""
    actor = policy()
    learner = OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0), demos=demos())
    played = groups(actor, *MIXED)
    for time in range(times):
        learner.update(played, time / times)
    return {name: value.clone() for name, value in actor.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


GAE = {"advantage": "gae"}
WIDE = {"learn_width": True}
PENALISED = {"kl.weight": 0.5}
KNOBS: list[tuple[str, Any, dict[str, Any]]] = [
    ("learn_width", True, {}),
    ("advantage", "rloo_batch", {}),
    ("advantage", "grpo", {}),
    ("advantage", "reinforce++", {}),
    ("advantage", "gae", {}),
    ("level", "token", {}),
    ("level", "chunk", {}),
    ("average", "episode", {}),
    ("clip.low", 0.01, {}),
    ("clip.high", 0.01, {}),
    ("clip.dual", 1.0001, {"optimizer.learning_rate": 0.02}),
    ("clip.log_ratio", 0.001, {}),
    ("old_log_probs", "recomputed", {}),
    ("kl.weight", 0.5, {}),
    ("kl.form", "k1", PENALISED),
    ("kl.form", "k2", PENALISED),
    ("kl.form", "abs", PENALISED),
    ("kl.target", 0.001, PENALISED),
    ("kl.horizon", 100, {**PENALISED, "kl.target": 0.001}),
    ("entropy", 0.1, WIDE),
    ("imitation", 0.5, {}),
    ("critic.hidden", [5], GAE),
    ("critic.learning_rate", 0.1, GAE),
    ("critic.discount", 0.5, GAE),
    ("critic.decay", 0.1, GAE),
    ("epochs", 2, {}),
    ("mini_batch", 9, {}),
    ("optimizer.learning_rate", 0.02, {}),
    ("optimizer.weight_decay", 0.1, {}),
    ("optimizer.warmup", 4, {}),
    ("optimizer.decay", "cosine", {}),
    ("optimizer.gradient_norm", 1e-9, {}),
    ("kl_limit", 1e-6, {}),
    ("kl_limit", None, {"kl_limit": 1e-6}),
    ("temperature", 0.4, {}),
]
NOT_THE_LEARNERS = {"iterations", "groups", "group_size", "ranks"}
"""How much is played and by how many; tests/distributed/test_sampling.py walks through the knobs of sampling."""


@pytest.mark.parametrize(("knob", "value", "context"), KNOBS)
def test_every_knob_changes_what_is_learned(knob: str, value: Any, context: dict[str, Any]) -> None:
    assert not same(updated(settings(**context)), updated(settings(**{**context, knob: value})))


def test_no_knob_was_forgotten() -> None:
    fields = set()
    for name, field in config.Rloo.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        fields |= {f"{name}.{key}" for key in inner} if inner else {name}
    fields -= {f"sampling.{key}" for key in config.Sampling.model_fields}
    assert {knob for knob, _, _ in KNOBS} | NOT_THE_LEARNERS | {"micro_batch"} == fields


@pytest.mark.parametrize(
    "chosen",
    [
        {"advantage": "rloo", "average": "step"},
        {"advantage": "rloo", "average": "episode"},
        {"advantage": "gae", "average": "step"},
        {"advantage": "gae", "average": "episode"},
        {"imitation": 5.0},
    ],
)
def test_gradients_do_not_depend_on_the_micro_batch(chosen: dict[str, Any]) -> None:
    whole = updated(settings(**chosen, micro_batch=1000))
    for size in (1, 3, 7):
        pieces = updated(settings(**chosen, micro_batch=size))
        for name, value in whole.items():
            torch.testing.assert_close(pieces[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_without_an_update_every_ratio_is_one(level: Level) -> None:
    actor = policy()
    batch = collate(actor, [e for group in groups(actor, *MIXED) for e in group])
    with torch.no_grad():
        now = actor.log_prob(batch.features, batch.actions, settings().temperature)
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
        now = actor.log_prob(batch.features, batch.actions, settings().temperature)
    return float(((now - batch.log_probs) * batch.mask[..., None]).sum())


@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
def test_what_worked_becomes_likelier_and_what_failed_less_likely(advantage: str) -> None:
    actor = policy()
    played = groups(actor, *([True, False, True, False],) * 2)
    chosen = settings(advantage=advantage, **{"critic.decay": 1.0, "epochs": 10})
    OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0)).update(played, 0.0)
    assert change(actor, played, True) > 0 > change(actor, played, False)


def test_the_update_stops_at_the_kl_limit() -> None:
    actor = policy()
    played = groups(actor, *([True, False, True, False],) * 2)
    chosen = settings(kl_limit=0.02, epochs=50)
    metrics = OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0)).update(played, 0.0)
    assert 0 < metrics["update/gradients"] < 50
    assert 0.02 < metrics["update/kl"] < 1


def test_without_a_kl_limit_the_update_is_that_of_a_limit_too_far_to_reach() -> None:
    def learned(limit: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        actor = policy()
        learner = OnPolicyLearner(actor, settings(kl_limit=limit), torch.Generator().manual_seed(0))
        return actor.state_dict(), learner.update(groups(actor, *MIXED), 0.0)

    (free, of_free), (bound, of_bound) = learned(None), learned(1000.0)
    assert same(free, bound)
    assert of_free == of_bound
    assert of_free["update/kl"] > 0


def test_the_count_of_pieces_moves_with_everything_that_goes_piece_by_piece() -> None:
    actor = policy()
    played = groups(actor, *MIXED[:2])
    decisions = len(collate(actor, [e for group in played for e in group]))
    chosen = settings(micro_batch=1, mini_batch=8, epochs=3, advantage="gae", imitation=0.5, kl_limit=None)
    learner = OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0), demos=demos())
    gradients = learner.update(played, 0.0)["update/gradients"]
    passes = 1 + chosen.epochs + 1 + chosen.epochs  # before, the policy's, after, the critic's
    assert learner.pieces == passes * decisions + gradients * chosen.mini_batch


class Counting(GaussianMlp):
    """Counts the decisions it has judged."""

    judged = 0

    def log_prob(self, features: torch.Tensor, actions: torch.Tensor, temperature: float) -> torch.Tensor:
        self.judged += len(features)
        return super().log_prob(features, actions, temperature)


@pytest.mark.parametrize("old", ["rollout", "recomputed"])
def test_without_a_kl_limit_the_batch_is_judged_before_the_first_gradient_and_after_the_last(old: str) -> None:
    torch.manual_seed(0)
    actor = Counting(inputs={"proprio": 3}, hidden=[16], chunk=CHUNK, action_dim=7)
    played = groups(actor, *MIXED[:2])
    decisions = len(collate(actor, [e for group in played for e in group]))
    chosen = settings(kl_limit=None, epochs=3, old_log_probs=old)
    actor.judged = 0
    OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0)).update(played, 0.0)
    assert actor.judged == (1 + chosen.epochs + 1) * decisions


@pytest.mark.parametrize(("average", "weigh"), [("step", [5, 6, 7, 8]), ("episode", [1, 1, 1, 1])])
def test_every_step_or_every_episode_weighs_the_same(average: str, weigh: list[float]) -> None:
    actor = policy()
    chosen = settings(average=average, epochs=1, mini_batch=1000, micro_batch=2)
    learner = OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0))
    metrics = learner.update(groups(actor, [True, False, False, False]), 0.0)
    of_episodes = np.array([1, -1 / 3, -1 / 3, -1 / 3])  # before the first step every ratio is one
    assert metrics["update/loss"] == pytest.approx(-np.average(of_episodes, weights=weigh), abs=1e-6)


def test_ppo_kl_is_what_the_policy_moved_on_average_before_each_gradient() -> None:
    actor = policy()
    learner = OnPolicyLearner(actor, settings(epochs=1, mini_batch=1000), torch.Generator().manual_seed(0))
    played = groups(actor, *MIXED[:2])
    assert learner.update(played, 0.0)["update/ppo_kl"] == pytest.approx(0, abs=1e-6)
    batch = collate(actor, [e for group in played for e in group])
    with torch.no_grad():
        now = actor.log_prob(batch.features, batch.actions, settings().temperature)
    moved = ((batch.log_probs - now) * batch.mask[..., None]).sum() / batch.mask.sum()
    assert learner.update(played, 0.0)["update/ppo_kl"] == pytest.approx(moved.item(), rel=1e-4)


def test_uniform_groups_leave_the_policy_alone() -> None:
    actor = policy()
    before = copy.deepcopy(actor.state_dict())
    played = groups(actor, [True] * 4, [False] * 4)
    metrics = OnPolicyLearner(actor, settings(), torch.Generator().manual_seed(0)).update(played, 0.0)
    assert metrics["update/gradients"] == 0
    assert same(before, actor.state_dict())


@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
def test_an_iteration_without_episodes_changes_nothing_and_harms_nothing(advantage: str) -> None:
    def learned(*, idle_first: bool) -> dict[str, torch.Tensor]:
        actor = policy()
        learner = OnPolicyLearner(actor, settings(advantage=advantage), torch.Generator().manual_seed(0))
        torch.manual_seed(7)
        if idle_first:
            assert learner.update([], 0.0)["update/gradients"] == 0
        learner.update(groups(actor, *MIXED), 0.0)
        return actor.state_dict()

    assert same(learned(idle_first=True), learned(idle_first=False))


@pytest.mark.parametrize(
    ("changes", "words"), [({"entropy": 0.1}, "learn_width"), ({"kl.target": 0.1}, "kl.weight is 0")]
)
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
    learner = OnPolicyLearner(actor, settings(epochs=1, mini_batch=1000), torch.Generator().manual_seed(0))
    metrics = learner.update(blind(groups(actor, *MIXED)), 0.0)
    assert metrics["update/skipped"] == 1
    assert "update/critic_skipped" not in metrics
    assert same(before, actor.state_dict())


def test_skipped_steps_of_the_critic_are_counted_and_kept() -> None:
    chosen = settings(advantage="gae", epochs=2, mini_batch=1000)
    actor = policy()
    learner = OnPolicyLearner(actor, chosen, torch.Generator().manual_seed(0))
    assert learner.update(groups(actor, *MIXED), 0.0)["update/critic_skipped"] == 0
    assert learner.critic is not None
    before = copy.deepcopy(learner.critic.state_dict())
    assert learner.update(blind(groups(actor, *MIXED)), 0.0)["update/critic_skipped"] == 2
    assert same(before, learner.critic.state_dict())
    other = OnPolicyLearner(policy(), chosen, torch.Generator().manual_seed(0))
    other.restore(learner.state)
    assert other.state == learner.state
    assert other.update([], 0.0)["update/critic_skipped"] == 2
