"""Episodes in which somebody may take over: who acts when, what is recorded, and that it depends on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nightshift import config, envs
from nightshift.errors import RolloutError
from nightshift.interventions.base import Moment
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.intervened import IntervenedPlay
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.rollout import Observer
from nightshift.types import Array, Controller, InterventionSettings, RolloutRequest, Task, Trajectory
from tests.conftest import REPOSITORY
from tests.rollouts.parts import NO_CAMERAS, policy

HORIZON = 12
FAKE = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=HORIZON, cameras=NO_CAMERAS)
REQUEST = RolloutRequest(task="far", split="train", init_state=3, controller="sample", seed=5)
RULE = InterventionSettings(
    source="scripted",
    stall_steps=3,
    stall_distance=0.01,
    stray_steps=2,
    stray_distance=1e9,
    hold_steps=2,
    release_seconds=1.0,
)
NEVER = replace(RULE, stall_distance=0.0)


class Script:
    """Acts at these steps, with its own number at each."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.moments: list[Moment] = []
        self.is_over = False

    def begin(self, task: Task) -> None:
        self.moments.clear()

    def override(self, moment: Moment) -> Array | None:
        self.moments.append(moment)
        return np.full(7, 0.5 + moment.step / 100, np.float32) if moment.step in self.steps else None

    def before_reset(self) -> None:
        assert not self.moments

    def end(self) -> None:
        self.is_over = True


def play(script: Script, chunk: int, horizon: int = 10) -> tuple[Trajectory, list[int]]:
    """An episode whose policy's chunks are numbered: action i of decision d is 0.01 d + 0.001 i, and its log-prob 1
    less. Also the steps at which the policy decided."""
    fleet = envs.make_fleet(envs.tasks(FAKE)[1], FAKE)
    group = IntervenedPlay(REQUEST, fleet, Observer(["objects"], ()), horizon, lambda: None, script)
    decided: list[int] = []
    group.reset()
    group.see()
    while not group.done:
        if group.awaits_decision:
            actions = 0.01 * len(decided) + 0.001 * np.arange(chunk, dtype=np.float32)
            decided.append(len(script.moments))
            chosen = np.tile(actions[None, :, None], (1, 1, 7))
            group.decide(np.array([0]), chosen, chosen - 1, {})
        group.advance()
        group.see()
    (trajectory,) = group.trajectories(version=4)
    return trajectory, decided


def test_an_intervention_ends_the_chunk_and_the_policy_decides_anew_until_it_has_control_back() -> None:
    script = Script(4, 5)
    trajectory, decided = play(script, chunk=3)
    assert decided == [0, 3, 5, 6, 9], "at step 4 the policy's second chunk was in its middle"
    assert script.is_over
    planned = [0.0, 0.001, 0.002, 0.01, 0.011, 0.02, 0.03, 0.031, 0.032, 0.04]
    assert trajectory.actions[:, 0].tolist() == pytest.approx(planned), "the policy's own, at every step"
    assert trajectory.interventions is not None
    assert np.flatnonzero(trajectory.interventions).tolist() == [4, 5]
    assert trajectory.executed[[4, 5], 0].tolist() == pytest.approx([0.54, 0.55])
    assert np.array_equal(trajectory.log_probs, trajectory.actions - 1), (
        "of the policy's own, also where it was overridden"
    )
    others = np.setdiff1d(np.arange(10), [4, 5])
    assert np.array_equal(trajectory.executed[others], trajectory.actions[others])


def test_every_step_is_recorded_with_what_was_seen_before_it() -> None:
    script = Script(1)
    trajectory, _ = play(script, chunk=4)
    assert (trajectory.chunk, trajectory.length) == (1, 10)
    assert len(trajectory.observations["objects"]) == 10
    seen = [moment.observation["objects"] for moment in script.moments]
    assert np.array_equal(trajectory.observations["objects"], np.stack(seen))
    assert [moment.step for moment in script.moments] == list(range(10))


def test_the_scene_of_a_moment_is_the_one_before_the_step() -> None:
    positions: list[float] = []

    class Looking(Script):
        def override(self, moment: Moment) -> Array | None:
            positions.append(float(moment.scene().gripper_position[0]))
            return super().override(moment)

    play(Looking(0, 1, 2), chunk=1, horizon=4)
    assert positions[0] == 0.0
    assert (np.diff(positions) > 0).all()


def test_an_episode_that_somebody_solves_ends_inside_the_intervention() -> None:
    (solved,) = run([replace(REQUEST, interventions=replace(RULE, hold_steps=100))], still(chunk=1))
    assert solved.success
    assert solved.length < HORIZON
    assert solved.interventions is not None
    assert np.flatnonzero(~solved.interventions).tolist() == [0, 1, 2], "it stood still for stall_steps"


def still(chunk: int) -> GaussianMlp:
    """Its greedy action is zero."""
    made = policy(chunk)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    return made


def run(
    requests: list[RolloutRequest],
    acting: GaussianMlp,
    *,
    threads: int = 1,
    at_once: int = 1,
    env: config.Env = FAKE,
    controller: Controller = "greedy",
) -> list[Trajectory]:
    settings = EngineSettings(device=torch.device("cpu"), threads=threads, requests_at_once=at_once)
    pool = LocalPool(env, settings)
    try:
        played = dict(pool.run([replace(one, controller=controller) for one in requests], snapshot(acting)))
    finally:
        pool.close()
    return [played[index][0] for index in range(len(requests))]


def test_log_probs_are_those_of_the_policys_own_samples_and_never_of_what_somebody_else_did() -> None:
    strays = replace(NEVER, stray_steps=2, stray_distance=0.5, hold_steps=3)
    acting = policy(chunk=1)
    (trajectory,) = run([replace(REQUEST, interventions=strays)], acting, controller="sample")
    helped = trajectory.interventions
    assert helped is not None and helped.any() and not helped.all()
    inputs = acting.inputs(trajectory.observations)

    def log_prob_of(actions: Array) -> Array:
        with torch.inference_mode():
            found: Array = acting.log_prob(inputs, torch.from_numpy(actions)[:, None], REQUEST.temperature)[
                :, 0
            ].numpy()
        return found

    np.testing.assert_allclose(trajectory.log_probs, log_prob_of(trajectory.actions), rtol=1e-4, atol=1e-5)
    persons = log_prob_of(trajectory.executed)
    assert (np.abs(trajectory.log_probs - persons).max(axis=1)[helped] > 0.1).all(), "the test can tell them apart"


def test_a_policy_that_stalls_is_relieved_for_so_many_steps_and_watched_anew() -> None:
    (trajectory,) = run([replace(REQUEST, interventions=replace(RULE, stall_steps=3, hold_steps=2))], still(chunk=4))
    assert trajectory.interventions is not None
    assert np.flatnonzero(trajectory.interventions).tolist() == [3, 4, 8, 9]


def test_a_policy_that_strays_is_relieved_after_so_many_actions_in_a_row() -> None:
    strays = replace(NEVER, stray_steps=2, stray_distance=0.5, hold_steps=3)
    (trajectory,) = run([replace(REQUEST, interventions=strays)], still(chunk=1))
    assert trajectory.interventions is not None
    assert np.flatnonzero(trajectory.interventions)[:3].tolist() == [1, 2, 3]
    (close,) = run([replace(REQUEST, interventions=replace(strays, stray_distance=10.0))], still(chunk=1))
    assert close.interventions is not None
    assert not close.interventions.any()


@pytest.mark.parametrize("chunk", [1, 3])
def test_where_nobody_takes_over_the_episode_is_the_one_without_interventions(chunk: int) -> None:
    plain, watched = run([REQUEST, replace(REQUEST, interventions=NEVER)], policy(chunk))
    assert watched.interventions is not None
    assert not watched.interventions.any()
    assert np.array_equal(plain.actions, watched.actions)
    assert np.array_equal(plain.executed, watched.executed)
    assert np.array_equal(plain.observations["objects"], watched.observations["objects"][::chunk])
    assert (plain.success, plain.length) == (watched.success, watched.length)


def test_an_episode_with_interventions_does_not_depend_on_what_is_played_beside_it() -> None:
    requests = [replace(REQUEST, init_state=state, interventions=RULE) for state in range(6)]
    alone = run(requests, policy(2))
    beside = run(requests, policy(2), threads=2, at_once=4)
    assert any(one.interventions is not None and one.interventions.any() for one in alone)
    for one, other in zip(alone, beside, strict=True):
        assert np.array_equal(one.executed, other.executed)
        assert np.array_equal(one.actions, other.actions)
        assert one.interventions is not None
        assert other.interventions is not None
        assert np.array_equal(one.interventions, other.interventions)


def test_a_group_of_several_episodes_cannot_be_intervened_in() -> None:
    with pytest.raises(RolloutError, match="2 episodes of the greedy"):
        run([replace(REQUEST, count=2, interventions=RULE)], policy())


def test_on_the_real_simulator_a_policy_that_stands_still_lifts_the_cube_with_interventions_alone() -> None:
    params = config.load(REPOSITORY / "params.yaml")
    stands = GaussianMlp(inputs={"task": 6}, hidden=[4], chunk=4, action_dim=7)
    for parameter in stands.parameters():
        torch.nn.init.zeros_(parameter)
    request = RolloutRequest(task="lift_cube", split="train", init_state=0, controller="greedy", seed=0)
    rule = replace(RULE, stall_steps=5, hold_steps=12)
    helped, alone = run([replace(request, interventions=rule), request], stands, env=params.env)
    assert (helped.success, alone.success) == (True, False)
    assert helped.interventions is not None
    began = np.flatnonzero(helped.interventions & ~np.append(False, helped.interventions[:-1]))
    assert began[0] == 5, "five steps without moving"
    assert helped.interventions[5:17].all(), "it holds for twelve steps, also across decisions of the policy"
    assert not helped.interventions[17:22].any(), "and lets go until the hand has stood still again"
    assert not helped.actions.any(), "the policy's own actions are recorded"
    assert np.abs(helped.executed[helped.interventions]).max() == pytest.approx(1.0)
