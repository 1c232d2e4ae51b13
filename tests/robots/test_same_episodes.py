"""Through the HTTP server a run gives the same episodes as in process, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from nightshift import config, envs, policies
from nightshift.data.episode import to_bytes
from nightshift.data.episode_store import EpisodeStore
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.project import paths
from nightshift.rollouts.local import LocalPool
from nightshift.stages import collect, states
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import REPOSITORY, small_params
from tests.envs.test_suites import needs_assets
from tests.robots.parts import FAKE, NO_CAMERAS, served

SEEN = config.Cameras(names=("agentview",), size=32, shadows=False)
FILMED = config.Cameras(names=("agentview",), size=256, shadows=False)
MINI = config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=60, cameras=NO_CAMERAS)
PUBLISHED = config.Env(
    suite="libero_object",
    tasks=("pick_up_the_alphabet_soup_and_place_it_in_the_basket",),
    protocol="openvla-oft",
    horizon=4,
    cameras=NO_CAMERAS,
)
SHORT = MINI.model_copy(update={"cameras": SEEN, "horizon": 2})


def play(env: config.Env, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None) -> list[Trajectory]:
    pool = LocalPool(env)
    try:
        played = dict(pool.run(requests, policy))
    finally:
        pool.close()
    return [trajectory for index in range(len(requests)) for trajectory in played[index]]


def assert_same(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.valid and other.valid
        assert (one.success, one.success_step, one.length) == (other.success, other.success_step, other.length)
        for left, right in ((one.observations, other.observations), (one.final, other.final)):
            assert left.keys() == right.keys()
            for name in left:
                assert left[name].dtype == right[name].dtype
                assert left[name].tobytes() == right[name].tobytes(), name
        for name in ("actions", "executed", "log_probs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


def fresh_policy(env: config.Env) -> PolicySnapshot:
    params = config.Params.model_validate({**small_params(), "seed": 0})
    shapes = {name: spec.shape for name, spec in envs.observation_space(env).items()}
    torch.manual_seed(3)
    return snapshot(policies.fresh(params.policy, shapes, envs.suite(env.suite).action_space.size))


def requests(task: str, split: str, starts: Sequence[int], controller: str) -> list[RolloutRequest]:
    return [
        RolloutRequest(task=task, split=split, init_state=state, controller=controller, seed=7, disturbance=0.15)  # type: ignore[arg-type]
        for state in starts
    ]


def demos(job: Job, env: config.Env, params: config.Params) -> dict[str, bytes]:
    """The demos that the stage collects, as their files but for where they say that they were played."""
    collecting = params.collect.model_copy(update={"demos_per_task": 2, "disturbance": 0.15})
    collect.run(job, seed=0, env=env, states=params.states, collect=collecting)
    store = EpisodeStore(paths.DEMOS)
    found = {}
    for key in store.keys():  # noqa: SIM118 - it is no mapping
        demo = store.get(key)
        assert demo.success
        assert demo.provenance.suite == env.suite
        anywhere = replace(demo.provenance, suite="", versions={})
        found[key] = to_bytes(replace(demo, provenance=anywhere))
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a minute, so a project takes what this checkout has compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(REPOSITORY / ".state" / "libero" / "numba"))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("simulated", [FAKE, SHORT.model_copy(update={"cameras": FILMED})])
def test_people_see_the_scene_of_a_robot_server_as_in_process_whatever_way_round_the_policy_sees_it(
    simulated: config.Env,
) -> None:
    with contextlib.closing(envs.make(envs.tasks(simulated)[0], simulated)) as env:
        env.reset("eval", 0)
        in_process, seen = env.render(), env.camera_images(["agentview"])["agentview"]
    with served(simulated) as remote, contextlib.closing(envs.make(envs.tasks(remote)[0], remote)) as env:
        env.reset("eval", 0)
        through_http = env.render()
        assert np.array_equal(env.camera_images(["agentview"])["agentview"], seen)
    assert in_process is not None and through_http is not None
    assert np.array_equal(through_http, in_process) and not np.array_equal(in_process, seen)


@pytest.mark.usefixtures("compiled", "project")
def test_the_stage_collect_makes_the_same_demos_of_libero_through_http(
    job: Callable[[str], Job], params: config.Params
) -> None:
    with served(MINI) as env:
        through_http = demos(job("http"), env, params)
    in_process = demos(job("process"), MINI, params)
    assert len(in_process) == 2
    assert through_http == in_process


def test_camera_images_of_libero_are_the_same_bits_through_http() -> None:
    asked = requests("lift_cube", "eval", (3,), "expert")
    with served(SHORT) as env:
        through_http = play(env, asked)
    in_process = play(SHORT, asked)
    assert in_process[0].observations["agentview"].shape == (2, 32, 32, 3)
    assert_same(in_process, through_http)


@needs_assets
@pytest.mark.usefixtures("compiled", "project")
def test_a_published_task_of_libero_is_the_same_bits_through_http(job: Callable[[str], Job]) -> None:
    few = config.States(per_task=2, validation_share=0.5)
    states.run(job("states"), seed=0, env=PUBLISHED, states=few)
    asked = [one for split in ("train", "eval") for one in requests(PUBLISHED.tasks[0], split, (1,), "expert")]
    with served(PUBLISHED) as env:
        through_http = play(env, asked)
    in_process = play(PUBLISHED, asked)
    assert [one.length for one in in_process] == [PUBLISHED.horizon] * 2
    assert_same(in_process, through_http)


@pytest.mark.parametrize("split", ["train", "validation", "eval"])
def test_episodes_of_a_sampling_policy_are_the_same_bits_through_http(split: str) -> None:
    asked = [*requests("near", split, (0, 5), "sample"), *requests("far", split, (1,), "greedy")]
    with served(FAKE) as env:
        policy = fresh_policy(FAKE)
        through_http = play(env, asked, policy)
    assert_same(play(FAKE, asked, policy), through_http)


def test_the_suite_offers_what_the_simulator_behind_the_server_offers() -> None:
    with served(FAKE) as env:
        for task, theirs in zip(envs.tasks(env), envs.tasks(FAKE), strict=True):
            assert task == replace(theirs, suite="robot")
            assert envs.init_state_count(task, "eval") == envs.init_state_count(theirs, "eval")
            assert envs.init_states_digest(task, "train") == envs.init_states_digest(theirs, "train")
        assert envs.observation_space(env) == envs.observation_space(FAKE)
        assert envs.selected(env).action_space == envs.selected(FAKE).action_space
        assert envs.conditions(env, [])["versions"]["robot"] == env.robot.description  # type: ignore[union-attr]
