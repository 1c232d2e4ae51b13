"""Several ranks on a real Ray make the update that one process makes."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from nightshift import config
from nightshift.algorithms import strategy
from nightshift.algorithms.on_policy import Iteration
from nightshift.cluster.object_store import ObjectStoreWeights
from nightshift.envs import fake
from nightshift.errors import DataError, DeviceError, RolloutError
from nightshift.learners import checkpoint
from nightshift.learners.algorithms import OnPolicy
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.local import LocalLearner
from nightshift.learners.opening import open_learners
from nightshift.learners.ranks import RayLearners
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.playing import IterationPlayer
from nightshift.rollouts.sampling import Sampler
from nightshift.types import RolloutRequest, Trajectory
from tests.algorithms.test_on_policy import CHUNK, MIXED, demo_steps, groups, settings
from tests.conftest import REPOSITORY
from tests.rollouts.parts import NO_CAMERAS, run_out_of_memory

CPU = torch.device("cpu")
UPDATES = 3


pytestmark = pytest.mark.usefixtures("shared_ray")


def policy() -> GaussianMlp:
    """With weights that are larger than the metrics of an update."""
    torch.manual_seed(0)
    return GaussianMlp(inputs={"proprio": 3}, hidden=[64], chunk=CHUNK, action_dim=7)


def spec(*, microbatch_size: int = 16, **changes: Any) -> LearnerSpec[Iteration]:
    return LearnerSpec(
        policy=snapshot(policy()),
        algorithm=OnPolicy(settings=settings(**changes), demos=demo_steps()),
        seed=0,
        microbatch_size=microbatch_size,
        gradient_checkpointing=False,
        compile=False,
        strategy="data_parallel",
        cpu_offload=False,
        device=CPU,
    )


def machine(**changes: Any) -> config.Machine:
    return config.load(REPOSITORY / "params.yaml").machine.model_copy(update=changes)


def parts(ranks: int, progress: float) -> list[Iteration]:
    """The same groups in the same order, dealt out in runs; the last rank may get none."""
    played = groups(policy(), *MIXED)
    bounds = {1: [0, 3], 2: [0, 1, 3], 3: [0, 1, 3, 3]}[ranks]
    return [Iteration(played[a:b], progress) for a, b in pairwise(bounds)]


def trained(ranks: int, *, updates: int = 2, **changes: Any) -> LearnerState:
    learners = open_learners(spec(**changes), machine(ranks=ranks))
    for number in range(updates):
        learners.update(parts(ranks, number / updates))
    state = learners.state()
    learners.close()
    return state


def assert_same(one: LearnerState, other: LearnerState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, values in one.tensors.items():
        np.testing.assert_array_equal(values, other.tensors[name], err_msg=name)
    assert one.counters == other.counters


def assert_close(together: LearnerState, alone: LearnerState) -> None:
    for name, expected in alone.tensors.items():
        np.testing.assert_allclose(together.tensors[name], expected, atol=2e-6, rtol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def two_ranks(shared_ray: None) -> Iterator[RayLearners[Iteration]]:
    """Shared by the tests that end none of them: a rank takes seconds to start."""
    with closing(RayLearners(spec(), 2)) as learners:
        yield learners


@pytest.mark.usefixtures("shared_ray")
def test_a_learner_apart_from_workers_learns_what_one_in_the_stage_does() -> None:
    with closing(open_learners(spec(), machine(placement="apart"))) as learners:
        assert isinstance(learners, RayLearners)
        learners.update(parts(1, 0.0))
        assert_same(learners.state(), trained(1, updates=1))


@pytest.fixture(scope="module")
def undisturbed(two_ranks: RayLearners[Iteration]) -> list[LearnerState]:
    """The states after each update of two ranks."""
    states = []
    for number in range(UPDATES):
        two_ranks.update(parts(2, number / UPDATES))
        states.append(two_ranks.state())
    return states


def test_weights_that_do_not_fit_on_the_gpu_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianMlp, "to", run_out_of_memory)
    with pytest.raises(DeviceError, match=r"not enough memory.*\n.*lower the size of the policy"):
        LocalLearner(spec())


def test_two_ranks_make_the_updates_of_one(undisturbed: list[LearnerState]) -> None:
    assert_close(undisturbed[-1], trained(1, updates=UPDATES))


@pytest.mark.slow
def test_three_ranks_make_the_updates_of_one_and_clone_in_microbatches() -> None:
    changes: dict[str, Any] = {"advantage_estimator": "gae", "bc_weight": 5.0}
    assert_close(trained(3, microbatch_size=3, **changes), trained(1, microbatch_size=1000, **changes))


class MixedOutcomes(LocalPool):
    """Plays for real, and calls a third of the episodes of every group solved."""

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        for index, group in super().run(requests, policy):
            yield index, [replace(one, success=(one.member + requests[index].init_state) % 3 == 0) for one in group]


def trained_with_sampler(ranks: int) -> tuple[list[RolloutRequest], LearnerState]:
    """Three iterations from the sampler to the update."""
    torch.manual_seed(0)
    chosen = settings(groups=7, **{"sampling.curriculum_floor": 0.3, "sampling.skip_solved": 1})
    actor = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7)
    start = LearnerSpec(
        policy=snapshot(actor),
        algorithm=OnPolicy(settings=chosen, demos=None),
        seed=0,
        microbatch_size=64,
        gradient_checkpointing=False,
        compile=False,
        strategy="data_parallel",
        cpu_offload=False,
        device=CPU,
    )
    sampler = Sampler({task: range(50) for task in fake.TASKS}, chosen, seed=0)
    pool = MixedOutcomes(config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=6, cameras=NO_CAMERAS))
    requests: list[RolloutRequest] = []
    with (
        closing(open_learners(start, machine(ranks=ranks))) as learners,
        IterationPlayer(pool, sampler, chosen) as player,
    ):
        for iteration in range(3):
            played = player.play(learners.policy())
            requests += [group[0].request for group in played.played]
            learners.update([Iteration(part, iteration / 3) for part in played.by_rank(ranks)])
        return requests, learners.state()


def test_the_same_requests_are_played_and_the_same_update_is_made_whatever_the_number_of_ranks() -> None:
    requests, alone = trained_with_sampler(1)
    same, together = trained_with_sampler(2)
    assert same == requests
    assert len(requests) == 3 * 7
    assert_close(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_update_of_one_whatever_the_advantage(ranks: int, advantage: str) -> None:
    assert_close(trained(ranks, advantage_estimator=advantage), trained(1, advantage_estimator=advantage))


@pytest.mark.slow
@pytest.mark.parametrize("minibatch_size", [2, 16])
@pytest.mark.parametrize("microbatch_size", [1, 1000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_clones_what_one_would(ranks: int, microbatch_size: int, minibatch_size: int) -> None:
    """Two demos at a time leave nothing for the third rank to clone."""
    changes: dict[str, Any] = {"bc_weight": 5.0, "minibatch_size": minibatch_size}
    assert_close(
        trained(ranks, microbatch_size=microbatch_size, **changes), trained(1, microbatch_size=1000, **changes)
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_between_updates_is_replaced_and_the_update_is_the_same() -> None:
    expected = trained(2)
    learners = RayLearners(spec(), 2)
    learners.update(parts(2, 0.0))
    ray.kill(learners._ranks[1])
    learners.update(parts(2, 0.5))
    assert_same(learners.state(), expected)
    learners.close()


def strike_in_next_update(learners: RayLearners[Iteration], number: int, blow: signal.Signals) -> Any:
    """Make a rank send itself a signal between two sums of its next update; returns the rank."""

    def arm(actor: Any) -> None:
        strategy, sum_over_ranks = actor._strategy, actor._strategy.sum
        left = iter(range(5))

        def sum_or_fall(tensors: Any) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), blow)
            sum_over_ranks(tensors)

        strategy.sum = sum_or_fall

    rank = learners._ranks[number]
    ray.get(rank.__ray_call__.remote(arm))
    return rank


@pytest.mark.parametrize(("hangs", "dies"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_or_dies_in_the_middle_of_an_update_changes_nothing(
    undisturbed: list[LearnerState], hangs: int, dies: int
) -> None:
    """No checkpoint is made, so the new ranks can only begin with the copy that the other rank kept."""
    learners = RayLearners(spec(), 2, timeout=3.0)
    learners.update(parts(2, 0.0))
    for progress, number, blow in ((1 / 3, hangs, signal.SIGSTOP), (2 / 3, dies, signal.SIGKILL)):
        struck = strike_in_next_update(learners, number, blow)
        learners.update(parts(2, progress))
        assert struck not in learners._ranks
    assert_same(learners.state(), undisturbed[-1])
    learners.close()


def test_when_all_ranks_die_training_goes_on_from_a_checkpoint_of_the_last_update_or_ends(
    undisturbed: list[LearnerState],
) -> None:
    learners = RayLearners(spec(), 2)
    learners.restore(undisturbed[0])
    learners.update(parts(2, 1 / 3))
    assert_same(learners.state(), undisturbed[1])
    kill_all(learners)
    learners.update(parts(2, 2 / 3))
    assert_same(learners.state(), undisturbed[2])
    learners.update(parts(2, 2 / 3))
    kill_all(learners)
    with pytest.raises(
        RolloutError, match=r"weights after update 4\s+→ run again: it resumes from the last checkpoint"
    ):
        learners.update(parts(2, 2 / 3))
    learners.close()


def kill_all(learners: RayLearners[Iteration]) -> None:
    for rank in learners._ranks:
        ray.kill(rank)


@pytest.mark.usefixtures("undisturbed")  # these ranks have to make its updates first
def test_only_metrics_come_back_after_an_update_and_the_state_where_it_is_asked_for(
    two_ranks: RayLearners[Iteration], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    get = ray.get

    def counting(references: Any, **options: Any) -> Any:
        found = get(references, **options)
        fetched.append(len(pickle.dumps(found)))
        return found

    monkeypatch.setattr(ray, "get", counting)
    for number in range(UPDATES, 2 * UPDATES):
        two_ranks.update(parts(2, 1.0))
        assert two_ranks.policy().version == number + 1
    weights = sum(parameter.nbytes for parameter in policy().parameters())
    assert max(fetched) < 2000 < weights
    fetched.clear()
    state = two_ranks.state()
    assert max(fetched) > weights
    fetched.clear()
    learned = two_ranks.policy().tensors()
    assert max(fetched) > weights
    for name, values in learned.items():
        np.testing.assert_array_equal(values, state.tensors[f"policy.weights.{name}"], err_msg=name)


@pytest.mark.usefixtures("undisturbed")
def test_weights_are_sent_as_the_reference_that_the_ranks_made_also_where_the_driver_has_fetched_them(
    two_ranks: RayLearners[Iteration],
) -> None:
    policy = two_ranks.policy()
    here = policy.tensors()
    assert ObjectStoreWeights.of(policy.weights) is policy.weights

    def received(policy: PolicySnapshot) -> tuple[list[str], dict[str, torch.Tensor]]:
        return list(vars(policy.weights)), policy.tensors()

    fields, there = ray.get(ray.remote(num_cpus=0)(received).remote(policy))
    assert fields == ["_reference"]
    assert here.keys() == there.keys()
    assert all(torch.equal(there[name], values) for name, values in here.items())


def test_sharded_ranks_make_the_updates_of_one_go_on_from_a_checkpoint_and_end_where_one_dies(tmp_path: Path) -> None:
    sharded = replace(spec(), strategy="fsdp")
    with closing(RayLearners(sharded, 2)) as learners:
        learners.update(parts(2, 0.0))
        state = learners.state()
        checkpoint.save(tmp_path, Checkpoint(step=1, tensors=state.tensors, state={}), learners.write_shards)
        saved = checkpoint.newest(tmp_path)
        assert saved is not None
        learners.restore(LearnerState(tensors=saved.tensors, counters=state.counters, shards=saved.shards))
        learners.update(parts(2, 0.5))
        expected = strategy.weights(trained(1).tensors, "policy")
        for name, values in learners.policy().tensors().items():
            np.testing.assert_allclose(values, expected[name], atol=2e-6, rtol=1e-4, err_msg=name)
        ray.kill(learners._ranks[1])
        with pytest.raises(RolloutError, match=r"weights after update 2\s+→ run again: it resumes"):
            learners.update(parts(2, 0.5))


def test_a_checkpoint_of_another_policy_is_refused_before_the_ranks_start() -> None:
    other = GaussianMlp(inputs={"proprio": 3}, hidden=[32], chunk=CHUNK, action_dim=7)
    state = LocalLearner(replace(spec(), policy=snapshot(other))).state()
    for learners in (RayLearners(spec(), 2), LocalLearner(spec())):
        with pytest.raises(DataError, match=r"of another policy: net\.0\.bias is \[32\] there and \[64\] here"):
            learners.restore(state)


@pytest.mark.parametrize("limit", [1e-6, None])
def test_restored_learners_go_on_where_they_were(limit: float | None) -> None:
    """In the middle of the warm-up, of which the critic has seen more than a policy that reached its limit."""
    changes: dict[str, Any] = {
        "advantage_estimator": "gae",
        "optimizer.warmup_steps": 100,
        "target_kl": limit,
        "bc_weight": 0.5,
    }
    first = LocalLearner(spec(**changes))
    first.update(parts(1, 0.0))
    middle = first.state()
    first.update(parts(1, 0.5))
    second = LocalLearner(spec(**changes))
    second.restore(middle)
    second.update(parts(1, 0.5))
    assert_same(first.state(), second.state())
