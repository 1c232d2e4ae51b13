from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift import config, files
from nightshift.data import episode
from nightshift.data.tensors import SUFFIX
from nightshift.errors import ConfigError, SimulatorError
from nightshift.pipeline.job import Job
from nightshift.policies.expert.robot import POSITION_GAIN, POSITION_SCALE
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths
from nightshift.rollouts.base import Pool
from nightshift.rollouts.local import LocalPool
from nightshift.stages import collect
from nightshift.types import RolloutRequest, Trajectory
from tests.rollouts.faulty import Unstable


class FailingPool:
    """Plays for real, then turns chosen init states into failures of the policy (or expert) or of the simulator, and
    counts what it was asked for."""

    def __init__(
        self,
        env: config.Env,
        fails: Callable[[RolloutRequest], bool] = lambda request: False,
        breaks: Callable[[RolloutRequest], bool] = lambda request: False,
    ) -> None:
        self._pool = LocalPool(env)
        self._fails = fails
        self._breaks = breaks
        self.played: list[RolloutRequest] = []
        self.versions: list[int] = []

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        for index, trajectories in self._pool.run(requests, policy):
            request = requests[index]
            self.played.append(request)
            self.versions.append(trajectories[0].version)
            if self._breaks(request):
                yield index, [Trajectory.lost(request, member) for member in range(request.count)]
            else:
                yield index, [replace(t, success=t.success and not self._fails(request)) for t in trajectories]

    workers = 1

    def spent(self) -> Mapping[str, float]:
        return self._pool.spent()

    def close(self) -> None:
        self._pool.close()


def with_pool(job: Job, pool: Pool) -> Job:
    return replace(job, pool=lambda env: pool)


def run(job: Job, params: config.Params) -> list[Path]:
    collect.run(job, seed=params.seed, env=params.env, states=params.states, collect=params.collect)
    return sorted(paths.DEMOS.glob(f"*{SUFFIX}"))


def test_every_demo_is_a_success_with_complete_provenance(job: Callable[[str], Job], params: config.Params) -> None:
    demos = [episode.load(path) for path in run(job("collect"), params)]
    assert len(demos) == 2 * params.collect.demos_per_task
    for demo in demos:
        assert demo.success
        origin = demo.provenance
        assert (origin.source, origin.suite, origin.split, origin.seed) == ("expert", "fake", "train", params.seed)
        assert (origin.task, origin.language) in {("near", "reach near"), ("far", "reach far")}
        assert origin.commit == "abc1234"
        assert "nightshift" in origin.versions
    files.verify_folder(paths.DEMOS, "")


def test_failures_are_replaced_by_other_init_states(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env, fails=lambda request: request.init_state % 5 == 0)
    demos = [episode.load(path) for path in run(with_pool(job("collect"), pool), params)]
    assert len(demos) == 2 * params.collect.demos_per_task
    assert all((demo.provenance.init_state or 0) % 5 for demo in demos)
    assert len(pool.played) > len(demos)


def test_an_expert_that_fails_too_often_is_said_and_nothing_is_written(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env, fails=lambda request: request.task == "far")
    with pytest.raises(SimulatorError, match="failed too often on far"):
        run(with_pool(job("collect"), pool), params)
    assert not paths.DEMOS.exists()


def test_an_episode_that_the_simulator_spoilt_is_no_failure_of_the_expert_and_no_demo(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.init_state % 5 == 0)
    demos = [episode.load(path) for path in run(with_pool(job("collect"), pool), params)]
    assert len(demos) == 2 * params.collect.demos_per_task
    assert any(request.init_state % 5 == 0 for request in pool.played)
    assert all((demo.provenance.init_state or 0) % 5 for demo in demos)


def test_an_expert_that_drives_the_physics_unstable_has_failed(
    job: Callable[[str], Job], params: config.Params
) -> None:
    every_fifth = LocalPool(params.env, make_fleet=Unstable(frozenset(range(0, 200, 5))))
    demos = [episode.load(path) for path in run(with_pool(job("collect"), every_fifth), params)]
    assert len(demos) == 2 * params.collect.demos_per_task
    assert all((demo.provenance.init_state or 0) % 5 for demo in demos)
    always = LocalPool(params.env, make_fleet=Unstable(frozenset(range(200))))
    fresh = replace(job("collect"), state=job("collect").state / "always")
    with pytest.raises(SimulatorError, match="the expert failed too often on near") as caught:
        collect.run(
            with_pool(fresh, always), seed=params.seed, env=params.env, states=params.states, collect=params.collect
        )
    assert "lost to the simulator" not in caught.value.what


def test_attempts_that_the_simulator_cost_are_told_apart(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.task == "far")
    with pytest.raises(SimulatorError, match="all attempts are used, 12 attempts lost to the simulator"):
        run(with_pool(job("collect"), pool), params)


def test_a_killed_collection_keeps_its_demos_and_ends_with_the_same_ones(
    job: Callable[[str], Job], params: config.Params
) -> None:
    uninterrupted = {path.name: path.read_bytes() for path in run(job("collect"), params)}
    drafts = sorted((job("collect").state / "episodes").iterdir())
    for draft in drafts[:3]:
        draft.unlink()
    (drafts[0].parent / f".{drafts[0].name}.partial-0123abcd").write_bytes(b"half an episode")
    pool = FailingPool(params.env)
    resumed = {path.name: path.read_bytes() for path in run(with_pool(job("collect"), pool), params)}
    assert resumed == uninterrupted
    assert len(pool.played) == 3


def test_a_disturbed_expert_is_recorded_as_it_meant_to_act(job: Callable[[str], Job], params: config.Params) -> None:
    pushed = params.collect.model_copy(update={"disturbance": 0.3})
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=pushed)
    demos = [episode.load(path) for path in sorted(paths.DEMOS.glob(f"*{SUFFIX}"))]
    assert {demo.provenance.disturbance for demo in demos} == {0.3}
    for demo in demos:
        to_go, meant = demo.observations["objects"][:-1], demo.policy_actions[:-1, :3]
        wanted = np.clip(to_go * POSITION_GAIN / POSITION_SCALE, -1, 1)
        np.testing.assert_allclose(meant, wanted, atol=1e-5)
        moved = to_go[:-1] - to_go[1:]
        assert np.abs(moved - POSITION_SCALE * meant[:-1]).max() > 1e-3
        np.testing.assert_allclose(moved, POSITION_SCALE * demo.actions[:-2, :3], atol=1e-5)


def test_more_demos_than_training_states_are_refused_for_what_they_are(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env)
    many = params.model_copy(update={"collect": params.collect.model_copy(update={"demos_per_task": 197})})
    with pytest.raises(ConfigError, match="demos_per_task is 197, but near has 196 training states"):
        run(with_pool(job("collect"), pool), many)
    assert not pool.played
