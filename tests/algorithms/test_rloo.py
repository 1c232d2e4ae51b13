import numpy as np
import torch

from nightshift import config
from nightshift.algorithms.rloo import RlooLearner
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.types import RolloutRequest, Trajectory

SETTINGS = config.Rloo(
    iterations=1,
    groups=2,
    group_size=4,
    std=0.1,
    learning_rate=1e-2,
    epochs=20,
    minibatch=16,
    clip_low=0.2,
    clip_high=0.28,
    kl_limit=0.03,
    gradient_norm=1.0,
)
REQUEST = RolloutRequest(task="near", split="train", init_state=0, controller="sample", seed=0, count=4)


def policy() -> GaussianMlp:
    torch.manual_seed(0)
    return GaussianMlp(inputs={"proprio": 3}, hidden=[16], std=SETTINGS.std)


def group(actor: GaussianMlp, outcomes: list[bool], seed: int) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    trajectories = []
    for member, success in enumerate(outcomes):
        observations = {"proprio": random.standard_normal((5 + member, 3)).astype(np.float32)}
        actions, log_probs = actor.sample(observations, random.standard_normal((5 + member, 7)).astype(np.float32))
        trajectories.append(
            Trajectory(
                request=REQUEST,
                member=member,
                observations=observations,
                final={},
                actions=actions,
                executed=actions,
                log_probs=log_probs,
                success=success,
            )
        )
    return trajectories


def test_what_worked_becomes_likelier_and_what_failed_less_likely() -> None:
    actor = policy()
    groups = [group(actor, [True, False, True, False], seed) for seed in range(2)]
    RlooLearner(actor, SETTINGS, torch.Generator().manual_seed(0)).update(groups)

    def change(success: bool) -> float:
        chosen = [t for g in groups for t in g if t.success is success]
        with torch.no_grad():
            return float(
                np.mean(
                    [
                        (
                            actor.log_prob(actor.features(t.observations), torch.tensor(t.actions)).numpy()
                            - t.log_probs
                        ).mean()
                        for t in chosen
                    ]
                )
            )

    assert change(True) > 0 > change(False)


def test_the_update_stops_at_the_kl_limit() -> None:
    actor = policy()
    groups = [group(actor, [True, False, True, False], seed) for seed in range(2)]
    metrics = RlooLearner(actor, SETTINGS, torch.Generator().manual_seed(0)).update(groups)
    steps = sum(t.length for g in groups for t in g)
    assert 0 < metrics["update/gradients"] < SETTINGS.epochs * np.ceil(steps / SETTINGS.minibatch)
    assert SETTINGS.kl_limit < metrics["update/kl"] < 2 * SETTINGS.kl_limit


def test_uniform_groups_leave_the_policy_alone() -> None:
    actor = policy()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    groups = [group(actor, [True] * 4, 0), group(actor, [False] * 4, 1)]
    metrics = RlooLearner(actor, SETTINGS, torch.Generator().manual_seed(0)).update(groups)
    assert metrics["update/gradients"] == 0
    assert all(torch.equal(before[name], value) for name, value in actor.state_dict().items())


def test_log_probs_of_the_rollout_agree_with_the_learner() -> None:
    actor = policy()
    (trajectory,) = group(actor, [True], 3)
    with torch.no_grad():
        again = actor.log_prob(actor.features(trajectory.observations), torch.tensor(trajectory.actions)).numpy()
    np.testing.assert_allclose(np.exp(again - trajectory.log_probs), 1, atol=1e-5)
