"""A person at the controls of a robot behind HTTP: what is recorded, what stops it, and what a fault costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.data import dataset_store
from nightshift.data.episode import Episode
from nightshift.envs.robot.messages import RobotState
from nightshift.envs.robot.people import FolderPerson
from nightshift.envs.robot.poses import Vector
from nightshift.envs.robot.suite import ROBOT
from nightshift.errors import DataError, SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.robot_server.simulated import CONTROL_HZ
from nightshift.stages import dataset
from nightshift.teleop import messages, robot
from nightshift.teleop.library import Library
from nightshift.teleop.pilot import DEAD_MAN_SECONDS
from nightshift.teleop.robot import IDLE_SECONDS
from tests.robots.parts import (
    FAKE,
    NO_CAMERAS,
    PATIENT_S,
    FaultyServer,
    ManualClock,
    WatchedArm,
    faulty_server,
    robot_env,
    served,
    settings,
    well_behaved,
)
from tests.robots.test_faults import FAULTS, SHORT_S, SLOW, at_step, dies
from tests.teleop.parts import ALICE, NAME, PERIOD, STILL, Rig, mark, rig, start, stored, straight
from tests.teleop.serving import until

pytestmark = pytest.mark.usefixtures("project")
FORWARD = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
MOVING = ("pose", "reset", "jointreset", "clearerr", "open_gripper", "close_gripper")
"""Endpoints that a robot may move by."""


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as started:
        yield started


@contextmanager
def rig_on(server: FaultyServer, params: config.Params, **changes: Any) -> Iterator[Rig]:
    env = robot_env(FAKE, settings(server.url, server.arm.description, **changes))
    with rig(params.model_copy(update={"env": env})) as one:
        yield one


def on(params: config.Params, env: config.Env) -> config.Params:
    return params.model_copy(update={"env": env})


def commands(server: FaultyServer) -> list[str]:
    """What a robot may have moved by, so far."""
    return [endpoint for endpoint, _ in server.asked if endpoint in MOVING]


def assert_same_as_in_process(episode: Episode) -> None:
    """Vectors and camera images of every state are those of a fresh simulator."""
    (task,) = [task for task in envs.tasks(FAKE) if task.name == episode.provenance.task]
    simulator = envs.make(task, FAKE)
    assert episode.provenance.init_state is not None
    seen: list[Any] = [simulator.reset("train", episode.provenance.init_state)]
    images = [simulator.camera_images(["agentview"])]
    for action in episode.actions[:-1]:
        seen.append(simulator.step(action).observation)
        images.append(simulator.camera_images(["agentview"]))
    assert set(episode.observations) == {"proprio", "objects", "task", "agentview"}
    expected = [{**vectors, **shown} for vectors, shown in zip(seen, images, strict=True)]
    for name, values in episode.observations.items():
        assert np.array_equal(values, np.stack([state[name] for state in expected])), name


def test_a_demo_on_a_robot_is_the_one_of_its_simulator_bit_for_bit_and_a_source_of_the_stage_dataset(
    params: config.Params, job: Callable[[str], Job]
) -> None:
    with served(FAKE) as env, rig(on(params, env)) as one:
        one.demonstrate()
        one.demonstrate()
        one.order(messages.Choose(type="reset", task="far", init_state=3))
        one.demonstrate()
        one.demonstrate()
        demos = stored(one.library)
        starts = [(demo.provenance.task, demo.provenance.init_state) for demo in demos]
        assert starts == [("near", 0), ("near", 1), ("far", 3), ("far", 4)]
        assert env.robot is not None
        for demo in demos:
            assert demo.success and demo.provenance.source == "human" and demo.provenance.suite == "robot"
            assert demo.provenance.versions["robot"] == env.robot.description
            assert demo.metadata == {"who": "Alice", "judge": "server", "fps": CONTROL_HZ}
            assert_same_as_in_process(demo)
        assert {frame.view for frame in one.ear.frames} == {"agentview"}
        assert one.library.film(0) and one.library.thumbnail(1)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset.model_copy(update={"sources": (NAME,)}))
    found = dataset_store.read(paths.DATASET)
    assert sum(len(list(found.episodes(part))) for part in dataset_store.SPLITS) == 4


def test_nothing_moves_before_a_pilot_says_so_and_its_cameras_are_live_all_the_same(
    server: FaultyServer, params: config.Params
) -> None:
    with rig_on(server, params) as one:
        for _ in range(20):
            one.tick()
        assert one.phase == "unset" and not commands(server) and one.session.welcome()["needs_pilot"]
        pictures = len(one.ear.frames)
        assert 3 <= pictures <= 2 + 20 * PERIOD / IDLE_SECONDS
        one.begin()
        one.drive(FORWARD)
        assert (one.phase, one.steps) == ("running", 1)
    assert commands(server) == ["clearerr", "reset", "clearerr", "pose"]
    assert server.mode == "held", "the session is closed"


def test_a_picture_is_as_old_as_the_request_for_it(server: FaultyServer, params: config.Params) -> None:
    with rig_on(server, params) as one:
        asked: list[float] = []

        def takes_long(endpoint: str, status: int, body: bytes, send: Any) -> None:
            asked.append(one.clock.now)
            one.clock.now += 0.1
            send(status, body)

        server.misbehave = takes_long
        one.clock.now += IDLE_SECONDS
        one.tick()
        assert len(asked) == 1 and one.ear.frames[-1].time == asked[-1], "nothing is commanded"
        one.begin()
        one.drive(FORWARD)
        assert one.ear.frames[-1].step == one.steps == 1
        assert one.ear.frames[-1].time == asked[-1]


def test_undo_failure_and_the_next_place(server: FaultyServer, params: config.Params) -> None:
    with rig_on(server, params) as one:
        one.demonstrate()
        one.begin()
        one.drive(FORWARD)
        one.order(mark(success=False))
        one.settle()
        assert [(entry.init_state, entry.success) for entry in one.library.entries] == [(0, True), (1, False)]
        one.order(messages.Undo(type="undo"))
        assert [entry.number for entry in one.library.entries] == [0]


def test_a_person_takes_over_from_a_policy_and_hands_back(params: config.Params) -> None:
    with served(FAKE) as env, rig(on(params, env), driver=straight()) as one:
        one.begin()  # the policy drives: one step
        one.drive()
        one.order(messages.TakeOver(type="take_over"))
        one.drive((0.0, 0.5, 0.0, 0.0, 0.0, 0.0))
        one.order(messages.HandBack(type="hand_back"))
        one.order(mark(success=True))
        one.settle()
        (episode,) = stored(one.library)
        assert episode.interventions.tolist() == [False, False, True, True, False, False]
        first, second = np.float32(0.1), np.float32(0.11)
        assert episode.policy_actions[:-1, 0].tolist() == [first, second, first, first, first]
        assert episode.actions[:-1, 1].tolist() == [0, 0, 0, 0.5, 0]
        assert_same_as_in_process(episode)


def test_the_pilot_marks_success_where_a_run_would_ask_a_person(params: config.Params) -> None:
    with served(FAKE, success="person") as env, rig(on(params, env)) as one:
        one.begin()
        assert isinstance(env.horizon, int)
        for _ in range(env.horizon + 3):
            one.drive((0.01, 0.0, 0.0, 0.0, 0.0, 0.0))
            assert FolderPerson().question() is None
        one.order(mark(success=True))
        one.settle()
        (demo,) = stored(one.library)
        assert demo.length == env.horizon + 4 and demo.metadata["judge"] == "person"


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_or_silent_tab_stops_the_robot_by_its_own_stop_and_resume_goes_on(
    server: FaultyServer, params: config.Params, closed: bool
) -> None:
    with rig_on(server, params) as one:
        one.begin()
        one.drive(FORWARD)
        if closed:
            one.pilot.release(ALICE)
        silent = 0.0
        while one.phase == "running":
            assert silent <= DEAD_MAN_SECONDS + PERIOD < 1
            one.tick()
            silent += PERIOD
        assert server.mode == "stopped" and server.arm.told[-1] == "stop"
        moved = one.steps
        for _ in range(20):
            one.tick()
        assert one.phase == "paused" and one.steps == moved and server.mode == "stopped"
        one.pilot.claim(ALICE, "Alice")
        one.order(messages.Resume(type="resume"))
        one.drive(FORWARD)
        one.order(mark(success=True))
        one.settle()
        (demo,) = stored(one.library)
        assert_same_as_in_process(demo)


class Looks:
    """The watcher looks for the pilot when a test says so."""

    def __init__(self) -> None:
        self._due = threading.Semaphore(0)
        self._is_waiting = False

    def __call__(self, is_over: threading.Event) -> bool:
        self._is_waiting = True
        while not is_over.is_set():
            if self._due.acquire(timeout=0.005):
                return False
        self._is_waiting = False
        return True

    def look(self) -> None:
        """Once, with what follows from it."""
        until(lambda: self._is_waiting)
        self._is_waiting = False
        self._due.release()
        until(lambda: self._is_waiting)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr(robot, "is_set_soon", made)
    return made


class SlowArm(WatchedArm):
    """Waits in the call that a test names, until it lets it go on."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.slow = ""
        self.entered, self.goes_on = threading.Event(), threading.Event()
        super().__init__(*arguments, **more)

    def reset(self, task: str, split: str, init_state: int) -> None:
        self._wait("reset")
        super().reset(task, split, init_state)

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        self._wait("move")
        super().move(target, gripper, action)

    def measure(self, cameras: Sequence[str]) -> RobotState:
        self._wait("measure")
        return super().measure(cameras)

    def _wait(self, call: str) -> None:
        if call == self.slow:
            self.slow = ""
            self.entered.set()
            assert self.goes_on.wait(PATIENT_S)


def leave(one: Rig, how: str) -> None:
    """What ends the pilot's attendance while another thread waits for the robot."""
    if how == "says stop":
        one.session.submit(ALICE, messages.Pause(type="pause"))
    elif how == "is silent":
        one.clock.now += DEAD_MAN_SECONDS + PERIOD
    else:
        one.pilot.release(ALICE)
        if how == "reloads":
            one.pilot.claim(ALICE + 1, "Alice")


@contextmanager
def waiting_in(slow: str, server: FaultyServer, one: Rig) -> Iterator[SlowArm]:
    """A pilot's Start that waits for the arm; at the end it is over."""
    arm = cast(SlowArm, server.arm)
    one.pilot.claim(ALICE, "Alice")
    arm.slow = slow
    waiting = threading.Thread(target=lambda: one.order(start()))
    waiting.start()
    assert arm.entered.wait(PATIENT_S)
    try:
        yield arm
    finally:
        arm.goes_on.set()
        waiting.join()


@pytest.mark.parametrize("how", ["leaves", "says stop", "is silent", "reloads"])
def test_a_stop_during_a_reset_is_sent_until_it_arrives(params: config.Params, looks: Looks, how: str) -> None:
    with faulty_server(make_arm=SlowArm) as server, rig_on(server, params) as one:
        with waiting_in("reset", server, one) as arm:
            looks.look()
            still_lost = ["stop"]
            server.loses = lambda endpoint: endpoint in still_lost and bool(still_lost.pop())
            leave(one, how)
            looks.look()
            assert not still_lost and "stop" not in arm.told
            looks.look()
            assert arm.told[-1] == "stop"
        assert one.phase == "unset" and server.mode == "stopped"
        assert "reset was refused: the robot is stopped: its pilot is gone" in one.ear.notices[-1]
        assert "The robot is stopped" in one.ear.notices[-1]


def test_a_stop_during_a_reset_that_never_arrives_is_said(params: config.Params, looks: Looks) -> None:
    with faulty_server(make_arm=SlowArm) as server, rig_on(server, params) as one:
        server.loses = lambda endpoint: endpoint == "stop"
        with waiting_in("reset", server, one):
            leave(one, "says stop")
            looks.look()
        assert one.phase == "unset" and "its watchdog has to hold the robot" in one.ear.notices[-1]
        assert not any(notice.startswith("stopped") for notice in one.ear.notices)


def test_a_stop_that_the_reset_itself_clears_keeps_the_robot_where_it_is(params: config.Params, looks: Looks) -> None:
    with faulty_server(make_arm=SlowArm) as server, rig_on(server, params) as one:
        ROBOT.release()
        server.controller._home = None  # /open measures, and /clearerr waits for it
        with waiting_in("measure", server, one) as arm:
            leave(one, "leaves")
            looks.look()
            assert arm.told == ["stop"]
        assert commands(server) == ["clearerr"], "which took that stop back"
        assert arm.told == ["stop", "stop"] and server.mode == "stopped"
        assert one.phase == "unset" and "its pilot is gone" in one.ear.notices[-1]


@pytest.mark.parametrize("how", ["leaves", "says stop", "is silent", "reloads"])
@pytest.mark.usefixtures("looks")
def test_a_pilot_who_leaves_before_the_reset_moves_anything_stops_it(
    server: FaultyServer, params: config.Params, how: str
) -> None:
    def leaves_at_clearerr(endpoint: str, *rest: Any) -> None:
        if endpoint == "clearerr":
            leave(one, how)
        well_behaved(endpoint, *rest)

    with rig_on(server, params) as one:
        server.misbehave = leaves_at_clearerr
        one.begin()
        assert commands(server) == ["clearerr"] and server.arm.told == ["stop"]
        assert one.phase == "unset" and server.mode == "stopped"
        assert "its pilot is gone, or said Stop. The robot is stopped" in one.ear.notices[-1]


def test_nothing_is_reset_for_a_pilot_who_has_said_stop_already(server: FaultyServer, params: config.Params) -> None:
    with rig_on(server, params) as one:
        one.pilot.claim(ALICE, "Alice")
        for order in (start(), start(), messages.Pause(type="pause")):
            one.session.submit(ALICE, order)
        one.tick()
        assert one.phase == "unset" and not commands(server)
        assert len(one.ear.notices) == 1


def test_orders_from_before_a_fault_are_not_carried_out_after_it(server: FaultyServer, params: config.Params) -> None:
    def fails_at_reset(endpoint: str, status: int, body: bytes, send: Any) -> None:
        send(*((status, body) if endpoint != "reset" else (200, b"{")))

    with rig_on(server, params) as one:
        server.misbehave = fails_at_reset
        one.pilot.claim(ALICE, "Alice")
        one.session.submit(ALICE, start())
        one.order(start())
        assert one.phase == "unset" and commands(server) == ["clearerr", "reset"]


def test_a_server_that_gives_no_session_was_not_stopped(server: FaultyServer, params: config.Params) -> None:
    def gives_none(endpoint: str, status: int, body: bytes, send: Any) -> None:
        send(*((status, body) if endpoint != "open" else (500, b"{}")))

    with rig_on(server, params) as one:
        ROBOT.release()
        server.misbehave = gives_none
        one.begin()
        assert "gives no session" in one.ear.notices[-1] and "The robot is stopped" not in one.ear.notices[-1]
        assert "stop" not in server.arm.told


@pytest.mark.parametrize("said_stop", [False, True])
@pytest.mark.parametrize(("slow", "command"), [("reset", "reset"), ("move", "pose")])
def test_a_pilot_who_leaves_or_says_stop_while_the_robot_is_waited_for_stops_it_there(
    params: config.Params, slow: str, command: str, said_stop: bool
) -> None:
    with faulty_server(make_arm=SlowArm) as server, rig_on(server, params) as one:
        arm = cast(SlowArm, server.arm)
        one.pilot.claim(ALICE, "Alice")
        if slow == "move":
            one.order(start())
        arm.slow = slow
        waiting = threading.Thread(target=lambda: one.drive(FORWARD) if slow == "move" else one.order(start()))
        waiting.start()
        assert arm.entered.wait(PATIENT_S)
        assert "stop" not in arm.told
        if said_stop:
            one.session.submit(ALICE, messages.Pause(type="pause"))
        else:
            one.pilot.release(ALICE)
        until(lambda: "stop" in arm.told)
        arm.goes_on.set()
        waiting.join()
        assert one.phase == "unset" and server.mode == "stopped"
        assert f"{command} was refused: the robot is stopped: its pilot is gone" in one.ear.notices[-1]
        one.pilot.claim(ALICE, "Alice")
        one.tick()
        one.demonstrate()
        assert len(stored(one.library)) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_episode_as_invalid_with_a_sentence_and_the_next_one_is_right(
    name: str, server: FaultyServer, params: config.Params
) -> None:
    fault, reason = FAULTS[name]
    quick = {"deadline_s": SHORT_S, "attempts": 1} if name in SLOW else {}
    with rig_on(server, params, **quick) as one:
        one.begin()
        server.misbehave = at_step(3, fault(server))
        for _ in range(4):
            if one.phase == "running":
                one.drive(FORWARD)
        assert one.phase == "unset" and server.mode == "stopped"
        said = one.ear.notices[-1]
        assert reason in said and "steps is invalid and not kept" in said and "The robot is stopped" in said
        assert one.session.welcome()["lost"] == said, "also to a page that comes later"
        assert not one.library.entries and not one.library.unsaved and not one.ear.errors
        server.misbehave = well_behaved
        if name not in SLOW:  # whose deadline may be too short for a busy machine
            one.demonstrate()
            assert not one.session.welcome()["lost"]
            (demo,) = stored(one.library)
            assert demo.provenance.init_state == 0
            assert_same_as_in_process(demo)


def test_a_server_that_dies_while_the_pilot_has_stopped_invalidates_the_episode_too(
    server: FaultyServer, params: config.Params
) -> None:
    with rig_on(server, params) as one:
        one.begin()
        one.drive(FORWARD)
        one.order(messages.Pause(type="pause"))
        assert one.phase == "paused" and server.mode == "stopped"
        server.misbehave = dies
        for _ in range(10):
            one.tick()
        assert one.phase == "unset" and "getstate was not answered" in one.ear.notices[-1]
        one.order(messages.Resume(type="resume"))
        one.order(mark(success=True))
        assert not one.library.entries
        server.misbehave = well_behaved


def test_a_stop_that_does_not_arrive_is_said(server: FaultyServer, params: config.Params) -> None:
    with rig_on(server, params) as one:
        one.begin()
        one.drive(FORWARD)
        server.misbehave = lambda endpoint, *rest: (dies if endpoint == "stop" else well_behaved)(endpoint, *rest)
        one.order(messages.Pause(type="pause"))
        assert one.ear.notices[-1] == "stopped. The robot has not confirmed it: its watchdog holds it"
        server.misbehave = well_behaved


def test_after_a_while_without_a_command_an_episode_begins_with_what_is_there_then(params: config.Params) -> None:
    clock = ManualClock()
    with faulty_server(clock=clock, watchdog_s=2.0) as server, rig_on(server, params, image_age_s=0.5) as one:
        one.begin()
        one.drive(STILL)
        clock.sleep(30.0)
        one.tick()
        assert server.mode == "held", "by its watchdog, and the state is older than a command may be based on"
        one.drive(FORWARD)
        one.order(messages.Pause(type="pause"))
        before = one.session._observation["proprio"].tolist()
        server.arm._observation = server.arm._env.step(np.array([0, 0.5, 0, 0, 0, 0, 0], np.float32)).observation
        sunk = server.arm._env.camera_images(["agentview"])["agentview"]
        one.order(messages.Resume(type="resume"))
        one.drive(FORWARD)
        one.order(mark(success=True))
        one.settle()
        (demo,) = stored(one.library)
        acted_on = demo.observations["proprio"][1].tolist()
        assert acted_on != before, "it sank while it stood: the next action was decided on that"
        assert acted_on == pytest.approx([0.05, 0.025, 0.0])
        assert np.array_equal(demo.observations["agentview"][1], sunk), "and so was the picture"


def test_a_short_tap_that_made_no_step_does_not_cost_the_episode_later(params: config.Params) -> None:
    clock = ManualClock()

    def taps(endpoint: str, *rest: Any) -> None:
        if endpoint == "clearerr":
            still = messages.Drive(type="drive", seq=2, axes=STILL, gripper="open", speed=1.0)
            assert one.pilot.drive(ALICE, still), "the key is up before the robot is awake"
            server.misbehave = well_behaved
        well_behaved(endpoint, *rest)

    with faulty_server(clock=clock, watchdog_s=2.0) as server, rig_on(server, params) as one:
        one.begin()
        server.misbehave = taps
        one.drive(FORWARD)
        assert (one.phase, one.steps) == ("running", 0)
        one._seq = 2
        clock.sleep(30.0)
        one.tick()
        assert server.mode == "held"
        one.drive(FORWARD)
        assert (one.phase, one.steps) == ("running", 1)


@pytest.fixture
def unsaved(server: FaultyServer, params: config.Params, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A session whose episode of one step was marked while the disk was full."""

    def full(*_: Any, **__: Any) -> None:
        raise DataError("no space left", "free some")

    with rig_on(server, params) as one:
        one.begin()
        one.drive(FORWARD)
        with monkeypatch.context() as patch:
            patch.setattr(Library, "_publish", full)
            one.order(mark(success=True))
            one.settle()
        assert one.phase == "paused" and "not saved: no space left" in one.ear.notices[-1]
        yield one


def test_an_episode_that_could_not_be_saved_goes_on_after_the_watchdog_held_the_robot(
    server: FaultyServer, unsaved: Rig
) -> None:
    server.controller._last_command -= 2 * PATIENT_S
    assert server.mode == "held"
    unsaved.order(messages.Resume(type="resume"))
    unsaved.drive(FORWARD)
    assert unsaved.phase == "running" and unsaved.steps > 1


def test_an_episode_that_could_not_be_saved_can_be_marked_after_a_fault(server: FaultyServer, unsaved: Rig) -> None:
    server.misbehave = dies
    for _ in range(10):
        unsaved.tick()
    assert unsaved.phase == "unset" and unsaved.steps == 1
    assert "can still be marked" in unsaved.ear.notices[-1]
    server.misbehave = well_behaved
    unsaved.order(mark(success=True))
    unsaved.settle()
    (demo,) = stored(unsaved.library)
    assert_same_as_in_process(demo)
    unsaved.demonstrate()
    assert [entry.init_state for entry in unsaved.library.entries] == [0, 1]


def test_who_resets_instead_of_marking_is_told_that_the_episode_is_not_kept(server: FaultyServer, unsaved: Rig) -> None:
    server.misbehave = dies
    for _ in range(10):
        unsaved.tick()
    server.misbehave = well_behaved
    unsaved.begin()
    assert unsaved.ear.notices[-1] == "reset: an episode of 1 steps was not kept"
    assert unsaved.phase == "running" and not unsaved.library.entries


def test_images_of_an_episode_are_kept_of_the_recorded_cameras_alone(
    server: FaultyServer, params: config.Params
) -> None:
    blind = robot_env(FAKE, settings(server.url, server.arm.description)).model_copy(update={"cameras": NO_CAMERAS})
    with rig(on(params, blind)) as one:
        one.begin()
        one.drive(FORWARD)
        plant: Any = one.session._plant
        assert [dict(shot.images) for shot in plant._shots] == [{}, {}] and all(shot.film for shot in plant._shots)
        newest = server.arm._env.camera_images(["agentview"])["agentview"]
        assert np.array_equal(plant.look(["agentview"])["agentview"], newest[None])


def test_images_of_an_episode_that_is_saved_are_in_memory_once(server: FaultyServer, params: config.Params) -> None:
    with rig_on(server, params) as one:
        one.begin()
        one.drive(FORWARD)
        plant: Any = one.session._plant
        before = [shot.images["agentview"] for shot in plant._shots]
        developed = plant.develop(np.zeros((1, 7), np.float32), ["agentview"]).result().images["agentview"]
        assert np.array_equal(developed, np.stack(before))
        assert all(np.shares_memory(shot.images["agentview"], developed) for shot in plant._shots)


def test_the_page_asks_for_the_reset_and_who_ends_the_session_is_not_waited_for(params: config.Params) -> None:
    with served(FAKE, reset="person") as env, rig(on(params, env)) as one:
        one.pilot.claim(ALICE, "Alice")
        resetting = threading.Thread(target=lambda: one.order(start()))
        resetting.start()
        until(lambda: FolderPerson().question() is not None)
        pictures = len(one.ear.frames)
        one.clock.now += 2 * IDLE_SECONDS
        until(lambda: len(one.ear.frames) > pictures)  # the scene is live while it is put back
        FolderPerson().reply("reset", True)
        resetting.join()
        assert one.phase == "running"
        one.drive(FORWARD)
        one.order(mark(success=True))
        one.settle()
        assert len(stored(one.library)) == 1
        again = threading.Thread(target=lambda: one.order(start()))
        again.start()
        until(lambda: FolderPerson().question() is not None)
        one.session.close()
        again.join()
        assert one.phase == "unset" and "before an answer came" in one.ear.notices[-1]
        assert FolderPerson().question() is None


def test_a_server_that_dies_while_the_scene_is_put_back_leaves_no_question(
    server: FaultyServer, params: config.Params
) -> None:
    with rig_on(server, params, reset="person") as one:
        one.pilot.claim(ALICE, "Alice")
        resetting = threading.Thread(target=lambda: one.order(start()))
        resetting.start()
        until(lambda: FolderPerson().question() is not None)
        server.misbehave = dies
        one.clock.now += 2 * IDLE_SECONDS
        resetting.join()
        assert one.phase == "unset" and "getstate was not answered" in one.ear.notices[-1]
        assert FolderPerson().question() is None
        server.misbehave = well_behaved


def test_a_robot_that_somebody_else_commands_is_not_taken(server: FaultyServer, params: config.Params) -> None:
    other = server.client(settings(server.url, server.arm.description))
    other.open()
    other.command("clearerr")
    with pytest.raises(SimulatorError, match="another session commands this robot"), rig_on(server, params):
        pass
