"""Many requests at once in one process: the same episodes, seen once per decision; a failure costs only its request."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, envs
from nightshift.envs.fake import FAKE
from nightshift.envs.perturbations.base import Perturbation
from nightshift.envs.protocols import DEFAULT
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.errors import ConfigError, DeviceError, SimulatorError
from nightshift.policies import families
from nightshift.policies.expert import Expert
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts import engine
from nightshift.rollouts.acting import Actor
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.rollout import GroupPlay, Lanes, Observer
from nightshift.types import (
    INSTRUCTION,
    Array,
    Controller,
    Latents,
    PerturbationSpec,
    RolloutRequest,
    Split,
    Task,
    Trajectory,
)
from tests.rollouts.faulty import Faulty, Unstable, raise_something
from tests.rollouts.parts import (
    CAMERAS,
    NO_CAMERAS,
    QueueingSeeingFleet,
    Seeing,
    SeeingFleet,
    SeeingMlp,
    assert_same,
    plain_loop,
    policy,
    run_out_of_memory,
)
from tests.waiting import wait_until

HORIZON = 12
CHUNK = 5
ENV = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=HORIZON, cameras=NO_CAMERAS)
SEEN = ENV.model_copy(update={"cameras": CAMERAS})
MINI = config.Env(
    suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=HORIZON, cameras=NO_CAMERAS
)

pytestmark = pytest.mark.usefixtures("forked_processes")


def settings(requests_at_once: int, threads: int = 2) -> EngineSettings:
    return EngineSettings(device=torch.device("cpu"), threads=threads, requests_at_once=requests_at_once)


def request(state: int, controller: Controller = "sample", task: str = "near", **changes: Any) -> RolloutRequest:
    values: dict[str, Any] = {"seed": state + 3, "count": 3, "temperature": 0.6, **changes}
    return RolloutRequest(task=task, split="train", init_state=state, controller=controller, **values)


def mixed() -> list[RolloutRequest]:
    """Of two tasks and all controllers, from episodes of three steps to those that end at the horizon."""
    kinds: list[tuple[Controller, float, int]] = [("sample", 0.0, 4), ("expert", 0.15, 2), ("greedy", 0.0, 1)]
    return [
        request(state, controller, task, disturbance=disturbance, count=count)
        for state, task in enumerate(("near", "far", "far", "near"))
        for controller, disturbance, count in kinds
    ]


def play(
    requests: list[RolloutRequest],
    actor: PolicySnapshot,
    at_once: EngineSettings = engine.ONE_AT_A_TIME,
    *,
    env: config.Env = ENV,
    make_fleet: MakeFleet = envs.make_fleet,
) -> list[list[Trajectory]]:
    pool = LocalPool(env, at_once, make_fleet=make_fleet)
    results = dict(pool.run(requests, actor))
    pool.close()
    return [results[index] for index in range(len(requests))]


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> PolicySnapshot:
    """A policy that sees a camera and the instruction."""
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "seeing": SeeingMlp})
    torch.manual_seed(0)
    return snapshot(SeeingMlp(chunk=CHUNK))


# The same episodes


@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize(
    ("env", "task"), [(ENV, "near"), (ENV, "far"), pytest.param(MINI, "lift_cube", id="libero_mini")]
)
def test_episodes_are_those_of_a_plain_loop(env: config.Env, task: str, chunk: int) -> None:
    torch.manual_seed(0)
    (fleet,) = (envs.make_fleet(one, env) for one in envs.tasks(env) if one.name == task)
    shown = fleet.reset("train", [0])
    sizes = {name: shown[name].shape[1] for name in ("objects", "task")}
    acting = GaussianMlp(inputs=sizes, hidden=[16], chunk=chunk, action_dim=7)
    kinds: list[tuple[Controller, float]] = [("sample", 0.0), ("sample", 0.1), ("greedy", 0.0), ("expert", 0.15)]
    for controller, disturbance in kinds:
        wanted = request(2, controller, task, disturbance=disturbance)
        expected = plain_loop(fleet, wanted, acting, HORIZON)
        (group,) = play([wanted], snapshot(acting), env=env)
        for one, record in zip(group, expected, strict=True):
            assert one.success == record["success"]
            for name in ("actions", "executed", "log_probs"):
                np.testing.assert_array_equal(getattr(one, name), np.stack(record[name]), strict=True)
            assert set(one.observations) == set(one.final)
            for name, values in one.observations.items():
                np.testing.assert_array_equal(values, np.stack([seen[name] for seen in record["observations"]]))
                np.testing.assert_array_equal(one.final[name], record["final"][name])


GOLDEN = {
    ("sample", "near", 0, 3, 0.0): [
        (12, False, 5.280843, 5.899788, -83.141624, 0.465753, 0.072863),
        (12, False, 5.663492, 5.665981, -76.263382, 0.39337, 0.076307),
        (12, False, 11.400813, 11.146317, -80.263466, 0.527132, 0.013196),
    ],
    ("greedy", "far", 3, 1, 0.0): [(12, False, 3.687775, 3.687775, 0.0, 0.783168, 0.315166)],
    ("expert", "far", 5, 2, 0.15): [
        (9, True, 4.820943, 2.92333, 0.0, 0.174444, -0.013458),
        (8, True, 4.964137, 4.516044, 0.0, 0.163271, -0.00314),
    ],
}
"""Played when each process still played one request at a time, with a loop over steps."""


@pytest.mark.parametrize("wanted", GOLDEN)
def test_episodes_are_those_of_before(wanted: tuple[Controller, str, int, int, float]) -> None:
    controller, task, state, count, disturbance = wanted
    (group,) = play(
        [request(state, controller, task, seed=7, count=count, disturbance=disturbance)], snapshot(policy(chunk=3))
    )
    for one, (length, success, *sums) in zip(group, GOLDEN[wanted], strict=True):
        assert (one.length, one.success) == (length, success)
        assert [
            one.actions.sum(),
            one.executed.sum(),
            one.log_probs.sum(),
            one.observations["objects"].sum(axis=0)[0],
            one.final["objects"][1],
        ] == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize(("at_once", "threads"), [(2, 1), (3, 2), (8, 1), (8, 2), (50, 2)])
def test_the_same_bits_however_many_requests_are_played_at_once(at_once: int, threads: int) -> None:
    actor = snapshot(policy(chunk=CHUNK), version=4)
    alone = play(mixed(), actor)
    together = play(mixed(), actor, settings(at_once, threads))
    for one, other in zip(itertools.chain(*alone), itertools.chain(*together), strict=True):
        assert_same(one, other)
    assert {one.version for one in alone[0]} == {4}


def test_the_same_bits_with_cameras_whatever_is_played_beside(seeing: PolicySnapshot) -> None:
    wanted = [request(state, task=task) for state in range(3) for task in ("near", "far")]
    alone = play(wanted, seeing, env=SEEN, make_fleet=Seeing())
    together = play(wanted, seeing, settings(5), env=SEEN, make_fleet=Seeing())
    for one, other in zip(itertools.chain(*alone), itertools.chain(*together), strict=True):
        assert_same(one, other)


# A request that ends makes room


def test_short_requests_follow_one_another_while_a_long_one_is_played() -> None:
    seeing = Seeing()
    wanted = [request(0, "greedy"), *(request(state, "expert") for state in range(1, 5))]
    pool = LocalPool(ENV, settings(2, threads=1), make_fleet=seeing)
    order = [index for index, _ in pool.run(wanted, snapshot(policy(chunk=1)))]
    assert seeing.begun == [0, 1, 2, 3, 4], "requests begin in order"
    assert order == [1, 2, 0, 3, 4], "the long one was waited for"
    assert len(seeing.fleets) == 2, "as many fleets as requests at once"


def test_fleets_are_used_again_by_the_next_run_and_each_task_has_its_own() -> None:
    seeing = Seeing()
    pool = LocalPool(ENV, settings(4), make_fleet=seeing)
    wanted = [request(state, task=task) for state in range(4) for task in ("near", "far")]
    for _ in range(2):
        assert len(dict(pool.run(wanted, snapshot(policy())))) == 8
    assert sorted(fleet.task.name for fleet in seeing.fleets).count("near") <= 4
    made = len(seeing.fleets)
    list(pool.run(wanted, snapshot(policy())))
    assert len(seeing.fleets) == made


def test_a_run_keeps_its_policy_where_another_run_of_the_pool_takes_turns_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions of a policy that share frozen weights share a module."""
    first, *_ = policy().state_dict()
    monkeypatch.setattr(GaussianMlp, "frozen", frozenset({first}))
    one = snapshot(policy(), 1)
    changed = policy()
    for name, parameter in changed.named_parameters():
        parameter.data.add_(0.0 if name == first else 0.3)
    other = snapshot(changed, 2, one.frozen)
    wanted = [request(state, "greedy", "far", count=1) for state in range(6)]
    alone = play(wanted, one, settings(2))
    pool = LocalPool(ENV, settings(2))
    running = pool.run(wanted, one)
    played = dict([next(running)])
    between = dict(pool.run(wanted, other))
    played.update(running)
    assert any(not np.array_equal(alone[index][0].actions, between[index][0].actions) for index in between)
    for index, (expected,) in enumerate(alone):
        assert_same(expected, played[index][0])


def test_an_image_is_drawn_while_other_simulators_of_its_cohort_make_their_step(seeing: PolicySnapshot) -> None:
    parts = Seeing()

    def wait_for_an_image(state: int) -> None:
        if state == 1:  # of the first is one after the reset, and one after its first chunk
            wait_until(lambda: [drawn for drawn, _ in parts.looks].count(0) > 1, seconds=30)

    parts.before_step = wait_for_an_image
    wanted = [request(state) for state in range(4)]
    played = play(wanted, seeing, settings(4, threads=4), env=SEEN, make_fleet=parts)
    assert sorted(parts.begun) == [0, 1, 2, 3], "a step that waited for the image in vain was played again"
    for one, expected in zip(played, play(wanted, seeing, env=SEEN, make_fleet=Seeing()), strict=True):
        assert_same(one[0], expected[0])


def test_images_are_fetched_while_those_of_the_next_request_are_drawn(seeing: PolicySnapshot) -> None:
    parts = Seeing(made_as=QueueingSeeingFleet)
    wanted = [request(state) for state in range(8)]
    # One thread resets them in order, so those of the first cohort are all reset when the last of the second begins.
    parts.before_look = lambda: wait_until(lambda: len(parts.begun) == len(wanted), seconds=30)
    played = play(wanted, seeing, settings(8, threads=1), env=SEEN, make_fleet=parts)
    assert parts.fetched[:3] == [(0, 2), (1, 3), (2, 4)], "each after the next one was drawn"
    assert Counter(state for state, _ in parts.fetched) == Counter(state for state, _ in parts.looks)
    for group, expected in zip(played, play(wanted, seeing, env=SEEN, make_fleet=Seeing()), strict=True):
        for one, other in zip(group, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("fails", ["begin_look", "fetch"])
def test_cameras_that_fail_while_others_are_drawn_cost_only_their_request(
    seeing: PolicySnapshot, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    wanted = [request(state) for state in range(6)]
    begin = QueueingSeeingFleet.begin_look

    def fail() -> Any:
        raise OSError("no framebuffer")

    def begin_or_fail(fleet: Any, lanes: Any, cameras: Any) -> Any:
        if fleet.state != 2:
            return begin(fleet, lanes, cameras)
        return fail if fails == "fetch" else fail()

    monkeypatch.setattr(QueueingSeeingFleet, "begin_look", begin_or_fail)
    results = play(wanted, seeing, settings(6), env=SEEN, make_fleet=Seeing(made_as=QueueingSeeingFleet))
    undisturbed = play(wanted, seeing, env=SEEN, make_fleet=Seeing())
    assert [all(one.valid for one in group) for group in results] == [state != 2 for state in range(6)]
    for position in (0, 1, 3, 4, 5):
        for one, other in zip(results[position], undisturbed[position], strict=True):
            assert_same(one, other)


def test_a_run_that_is_left_early_leaves_a_pool_that_works() -> None:
    pool = LocalPool(ENV, settings(4))
    next(iter(pool.run(mixed(), snapshot(policy()))))
    assert len(dict(pool.run(mixed(), snapshot(policy())))) == len(mixed())


@dataclass
class Noted:
    """Threads, one for every fleet that was made, every scene that was changed and every one that was closed."""

    made: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)


class Alterable(SequentialFleet):
    """Of the fake suite, whose scene has nothing to change."""

    def __init__(self, task: Task, noted: Noted, *, is_altered: bool = False) -> None:
        super().__init__(lambda: FAKE.make_env(task, DEFAULT, NO_CAMERAS))
        self._noted, self._is_altered = noted, is_altered

    def altered(self, changes: Sequence[Perturbation], split: Split, init_state: int) -> Alterable:
        self._noted.altered.append(threading.get_ident())
        return Alterable(self.task, self._noted, is_altered=True)

    def sibling(self) -> Alterable:
        return Alterable(self.task, self._noted)

    def close(self) -> None:
        super().close()
        if self._is_altered:
            self._noted.closed.append(threading.get_ident())


@pytest.mark.parametrize("at_once", [1, 4])
def test_scenes_are_changed_by_the_threads_that_simulate_and_closed_after_their_request(at_once: int) -> None:
    noted = Noted()

    def make_fleet(task: Task, env: config.Env) -> Alterable:
        noted.made.append(threading.get_ident())  # the engine's thread
        return Alterable(task, noted)

    changed = (PerturbationSpec(name="camera_viewpoints", strength=1.0),)
    wanted = [request(state, perturbations=changed if state % 2 else ()) for state in range(8)]
    pool = LocalPool(ENV, settings(at_once), make_fleet=make_fleet)
    for index, played in pool.run(wanted, snapshot(policy())):
        assert all(one.valid for one in played), index
    assert len(noted.altered) == len(noted.closed) == 4
    assert set(noted.closed) == set(noted.made)
    assert (set(noted.altered) == set(noted.made)) == (at_once == 1)
    assert at_once == 1 or not set(noted.altered) & set(noted.made)
    pool.close()


class Sharing(SequentialFleet):
    """Notes the threads that it may step in."""

    def __init__(self, task: Task, given: list[Executor]) -> None:
        super().__init__(lambda: envs.make(task, ENV))
        self._given = given

    def share(self, threads: Executor) -> None:
        self._given.append(threads)


@pytest.mark.parametrize(("threads", "times"), [(1, 0), (2, 1)])
def test_a_fleet_may_step_its_simulators_in_the_threads_of_the_engine_where_they_are_several(
    threads: int, times: int
) -> None:
    given: list[Executor] = []
    wanted = [request(state) for state in range(3)]
    play(wanted, snapshot(policy()), settings(2, threads), make_fleet=lambda task, _: Sharing(task, given))
    assert len(given) == times


# Failures


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_simulator_that_fails_costs_only_its_request(at_once: int) -> None:
    wanted = [request(state) for state in range(6)]
    undisturbed = play(wanted, snapshot(policy()))
    results = play(wanted, snapshot(policy()), settings(at_once), make_fleet=Faulty({1: raise_something}))
    assert not any(one.valid for one in results.pop(1))
    for one, other in zip(itertools.chain(*results), itertools.chain(undisturbed[0], *undisturbed[2:]), strict=True):
        assert_same(one, other)


def test_cameras_that_fail_cost_only_their_request(seeing: PolicySnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [request(state) for state in range(4)]
    undisturbed = play(wanted, seeing, settings(3), env=SEEN, make_fleet=Seeing())
    draw = SeeingFleet.look

    def fail(fleet: Any, lanes: Any, cameras: Any) -> Any:
        if fleet.state == 2:
            raise OSError("no framebuffer")
        return draw(fleet, lanes, cameras)

    monkeypatch.setattr(SeeingFleet, "look", fail)
    results = play(wanted, seeing, settings(3), env=SEEN, make_fleet=Seeing())
    assert [all(one.valid for one in group) for group in results] == [True, True, False, True]
    for position in (0, 1, 3):
        for one, other in zip(results[position], undisturbed[position], strict=True):
            assert_same(one, other)


def test_an_error_for_people_ends_the_run_as_it_was_raised_and_the_pool_goes_on() -> None:
    pool = LocalPool(ENV, settings(3))
    with pytest.raises(SimulatorError, match="no task 'nowhere' here; there are near, far"):
        list(pool.run([request(0), request(1, task="nowhere"), request(2)], snapshot(policy())))
    assert len(dict(pool.run(mixed(), snapshot(policy())))) == len(mixed())


def test_images_that_are_being_drawn_when_a_run_ends_are_fetched(
    seeing: PolicySnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold memory of the GPU until then."""
    parts = Seeing(made_as=QueueingSeeingFleet)
    begin = QueueingSeeingFleet.begin_look

    def fail() -> Any:
        raise SimulatorError("the driver is gone")

    def begin_or_fail(fleet: Any, lanes: Any, cameras: Any) -> Any:
        look = begin(fleet, lanes, cameras)
        return fail if fleet.state == 0 else look

    monkeypatch.setattr(QueueingSeeingFleet, "begin_look", begin_or_fail)
    parts.before_look = lambda: wait_until(lambda: len(parts.begun) == 8, seconds=30)
    with pytest.raises(SimulatorError, match="the driver is gone"):
        play([request(state) for state in range(8)], seeing, settings(8, threads=1), env=SEEN, make_fleet=parts)
    assert [state for state, _ in parts.looks] == [0, 1]
    assert [state for state, _ in parts.fetched] == [1]


def test_a_gpu_without_enough_memory_is_one_sentence_with_the_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianMlp, "greedy", run_out_of_memory)
    with pytest.raises(DeviceError, match=r"not enough memory.*\n.*lower machine.requests_at_once"):
        play([request(0, "greedy")], snapshot(policy()))


def test_weights_that_do_not_fit_on_the_gpu_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianMlp, "to", run_out_of_memory)
    with pytest.raises(DeviceError, match=r"not enough memory.*\n.*lower machine.workers.* or the size of the policy"):
        play([request(0, "greedy")], snapshot(policy()))


def test_a_request_that_cannot_begin_costs_no_fleet() -> None:
    made = Seeing()
    pool = LocalPool(ENV, make_fleet=made)
    for _ in range(3):
        assert not dict(pool.run([request(0, seed=-1)], snapshot(policy())))[0][0].valid
    assert dict(pool.run([request(0)], snapshot(policy())))[0][0].valid
    assert len(made.fleets) == 1


def test_a_policy_that_needs_a_camera_that_is_not_drawn_is_refused(seeing: PolicySnapshot) -> None:
    with pytest.raises(ConfigError, match=r"the policy sees agentview.*\n.*env.cameras.names"):
        play([request(0)], seeing)


# What is recorded


def test_a_decision_is_recorded_once_with_what_the_policy_saw_then(seeing: PolicySnapshot) -> None:
    made = Seeing()
    (group,) = play([request(0, task="far")], seeing, env=SEEN, make_fleet=made)
    for one in group:
        decisions = -(-one.length // CHUNK)
        assert set(one.observations) == set(one.final) == {"objects", "agentview", INSTRUCTION}
        assert one.observations["agentview"].shape == (decisions, 4, 4, 3)
        assert one.observations["agentview"].dtype == np.uint8
        assert one.observations["agentview"][:, 0, 0, 0].tolist() == [CHUNK * k for k in range(decisions)]
        assert one.observations[INSTRUCTION].tolist() == ["reach far"] * decisions
        assert one.final["agentview"].shape == (4, 4, 3)
        assert int(one.final["agentview"][0, 0, 0]) == one.length, "what the last action led to"
        assert str(one.final[INSTRUCTION]) == "reach far"


def test_an_episode_that_ended_is_drawn_once_more_and_never_again() -> None:
    made = Seeing()
    (group,) = play([request(1, "expert", disturbance=0.4, count=6)], snapshot(policy()), env=SEEN, make_fleet=made)
    assert len({one.length for one in group}) > 1, "all episodes ended at once"
    for one in group:
        assert sum(one.member in lanes for _, lanes in made.looks) == one.length + 1


def test_the_expert_records_every_vector_and_every_camera_at_every_step() -> None:
    (group,) = play([request(0, "expert")], snapshot(policy()), env=SEEN, make_fleet=Seeing())
    for one in group:
        assert set(one.observations) == set(one.final) == {"proprio", "objects", "task", "agentview", "wrist"}
        assert one.chunk == 1
        assert all(len(values) == one.length for values in one.observations.values())
        assert one.observations["agentview"][:, 0, 0, 0].tolist() == list(range(one.length))
        assert one.observations["wrist"][:, 0, 0, 0].tolist() == [100 + step for step in range(one.length)]
        assert (one.final["agentview"] == one.length).all()


def test_only_the_cameras_that_the_policy_sees_are_drawn(seeing: PolicySnapshot) -> None:
    made = Seeing()
    play([request(0)], seeing, env=SEEN, make_fleet=made)
    assert made.drawn == {"agentview"}


@pytest.mark.parametrize("env", [ENV, SEEN])
def test_nothing_is_drawn_for_a_policy_without_cameras(env: config.Env) -> None:
    made = Seeing()
    play(mixed()[::3], snapshot(policy()), env=env, make_fleet=made)
    assert made.begun
    assert not made.looks


def test_the_final_observation_of_an_unstable_episode_is_that_of_its_last_decision() -> None:
    (group,) = play([request(1)], snapshot(policy(chunk=CHUNK)), make_fleet=Unstable(frozenset({1})))
    unstable, *_ = group
    assert unstable.unstable
    for name, values in unstable.final.items():
        np.testing.assert_array_equal(values, unstable.observations[name][-1])


def test_films_have_their_frames_within_chunks_too() -> None:
    (group,) = play(
        [request(0, "greedy", frames_every=3)], snapshot(policy(chunk=CHUNK)), env=SEEN, make_fleet=Seeing()
    )
    for one in group:
        assert one.frames is not None
        assert one.frames[:, 0, 0, 0].tolist() == [*range(0, one.length, 3), one.length]


def test_filming_changes_no_episode() -> None:
    actor = snapshot(policy(chunk=CHUNK))
    filmed = play([request(0, frames_every=1)], actor, env=SEEN, make_fleet=Seeing())
    (plain,) = play([request(0)], actor, env=SEEN, make_fleet=Seeing())
    for one, other in zip(filmed[0], plain, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)


def test_images_are_drawn_in_one_thread_whichever_thread_asks(seeing: PolicySnapshot) -> None:
    """The simulators of `Seeing` refuse to be drawn in two."""
    pool = LocalPool(SEEN, settings(3), make_fleet=Seeing())
    wanted = [request(state) for state in range(5)]
    played = [dict(pool.run(wanted, seeing))]
    other = threading.Thread(target=lambda: played.append(dict(pool.run(wanted, seeing))))
    other.start()
    other.join()
    assert all(one.valid for results in played for group in results.values() for one in group)


# Shared batches, as on a GPU


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Act as on a GPU, and keep what each batch was made of: init states and lanes."""
    found: list[list[tuple[int, int]]] = []

    class Sharing(Actor):
        def __init__(self, policy: Any, *, share_batches: bool) -> None:
            super().__init__(policy, share_batches=True)

        def decide(self, groups: Any) -> None:
            active = [(group.request.init_state, np.flatnonzero(group.active).tolist()) for group in groups]
            found.append([(state, lane) for state, lanes in active for lane in lanes])
            super().decide(groups)

    monkeypatch.setattr(engine, "Actor", Sharing)
    return found


def jitter(state: int) -> None:
    time.sleep(np.random.default_rng().uniform(0, 0.002))


def test_shared_batches_do_not_depend_on_time(seeing: PolicySnapshot, batches: list[list[tuple[int, int]]]) -> None:
    wanted = [request(state, task=task, count=2 + state % 3) for state in range(6) for task in ("near", "far")]
    first = play(wanted, seeing, settings(5), env=SEEN, make_fleet=Seeing(before_step=jitter))
    made = list(batches)
    batches.clear()
    second = play(wanted, seeing, settings(5), env=SEEN, make_fleet=Seeing(before_step=jitter))
    assert batches == made
    assert max(len({state for state, _ in batch}) for batch in made) >= 2, "no batch was shared"
    for one, other in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert_same(one, other)


class DecidedOnce(GroupPlay):
    """A group at its first decision; its second episode has ended."""

    def __init__(self, wanted: RolloutRequest) -> None:
        fleet = envs.make_fleet(envs.tasks(ENV)[0], ENV)
        super().__init__(wanted, fleet, Observer(["objects", "task"], ()), HORIZON, lambda: None, Expert().act)
        self.reset()
        self.see()
        self.active[1] = False

    def decide(self, lanes: Lanes, actions: Array, log_probs: Array, latents: Latents) -> None:
        self.decided = {lane: (actions[row], log_probs[row]) for row, lane in enumerate(lanes.tolist())}


def test_shared_batches_leave_out_episodes_that_ended_and_act_the_same_but_for_rounding() -> None:
    wanted = [request(0), request(1, temperature=0.2), request(2, "greedy"), request(3)]
    apart, shared = [DecidedOnce(one) for one in wanted], [DecidedOnce(one) for one in wanted]
    Actor(policy(), share_batches=False).decide(apart)
    Actor(policy(), share_batches=True).decide(shared)
    for one, other in zip(apart, shared, strict=True):
        assert sorted(one.decided) == [0, 1, 2]
        assert sorted(other.decided) == [0, 2]
        for lane, decided in other.decided.items():
            np.testing.assert_allclose(decided, one.decided[lane], atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_same_settings_give_the_same_bits_and_others_the_same_but_for_rounding() -> None:
    actor = snapshot(policy(chunk=CHUNK))
    cuda = EngineSettings(device=torch.device("cuda"), threads=2, requests_at_once=5)
    wanted = [request(state, task=task) for state in range(4) for task in ("near", "far")]
    first, second = play(wanted, actor, cuda), play(wanted, actor, cuda)
    for one, other in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert_same(one, other)
    for one, other in zip(itertools.chain(*first), itertools.chain(*play(wanted, actor)), strict=True):
        np.testing.assert_allclose(one.actions[:CHUNK], other.actions[:CHUNK], atol=1e-4)
        np.testing.assert_allclose(one.log_probs[:CHUNK], other.log_probs[:CHUNK], atol=1e-3)
