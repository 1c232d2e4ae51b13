"""The suite robot: what it refuses, how it keeps limits and rate, and how a person takes part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nightshift import config, envs
from nightshift.envs.robot.client import TOKEN_VARIABLE, RobotFault
from nightshift.envs.robot.env import RobotEnv
from nightshift.envs.robot.messages import BadMessage, description_of, dumps, loads
from nightshift.envs.robot.people import FolderPerson, Question
from nightshift.envs.robot.resetting import PersonReset, ScriptedReset
from nightshift.errors import ConfigError, SimulatorError
from nightshift.robot_server.controller import Controller
from nightshift.rollouts.opening import open_pool_for
from nightshift.stages.evaluate import grid
from nightshift.types import Task
from tests.conftest import REPOSITORY, small_params
from tests.robots.parts import FAKE, CompliantArm, FaultyServer, ManualClock, Send, faulty_server, robot_env, settings

NEAR = Task(suite="robot", name="near", language="reach near", index=0, suite_size=2)
STILL = np.zeros(7, np.float32)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as started:
        yield started


def settings_of(server: FaultyServer, **changes: Any) -> config.Robot:
    return settings(server.url, server.arm.description, **changes)


def narrowed(server: FaultyServer, **limits: Any) -> config.Robot:
    chosen = settings_of(server)
    return chosen.model_copy(update={"limits": chosen.limits.model_copy(update=limits)})


def make(server: FaultyServer, chosen: config.Robot, *, clock: Any = None, person: Any = None) -> RobotEnv:
    client = server.client(chosen, clock)
    return RobotEnv(NEAR, client, chosen, 3, (ScriptedReset(chosen.reset_deadline_s), person or FolderPerson()))


def test_another_server_than_params_name_is_refused(server: FaultyServer) -> None:
    with pytest.raises(ConfigError, match=r"env\.robot\.description is robot-0{12}, and http"):
        envs.tasks(robot_env(FAKE, settings_of(server, description="robot-000000000000")))


def test_limits_wider_than_the_servers_are_refused(server: FaultyServer) -> None:
    with pytest.raises(ConfigError, match=r"allows more than the server .* does: force"):
        envs.tasks(robot_env(FAKE, narrowed(server, force=1e9)))


def test_no_server_is_one_sentence() -> None:
    with faulty_server() as gone:
        chosen = settings_of(gone)
    with pytest.raises(SimulatorError, match="no robot server answers at http"):
        envs.tasks(robot_env(FAKE, chosen))


def test_a_second_client_is_refused_while_the_first_commands(server: FaultyServer) -> None:
    first, second = make(server, settings_of(server)), make(server, settings_of(server))
    first.reset("train", 0)
    with pytest.raises(SimulatorError, match="another session commands this robot"):
        second.reset("train", 0)
    first.close()
    second.reset("train", 0)


def test_a_group_and_a_sibling_are_refused_because_there_is_one_robot(server: FaultyServer) -> None:
    env = robot_env(FAKE, settings_of(server))
    fleet = envs.make_fleet(envs.tasks(env)[0], env)
    with pytest.raises(SimulatorError, match="there is one robot"):
        fleet.reset("train", [0, 0])
    with pytest.raises(SimulatorError, match="there is one robot"):
        fleet.sibling()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"machine": {"workers": 2}}, "one robot plays one episode at a time"),
        ({"machine": {"requests_at_once": 2}}, "one robot plays one episode at a time"),
        ({"machine": {"actors": 2}}, "one robot plays one episode at a time"),
        ({"machine": {"actors": 1, "listen": "0.0.0.0:0"}}, "actors of other machines would share one robot"),
        ({"algorithms": ["rloo"]}, "rloo plays groups"),
        (
            {"algorithms": ["rlpd"], "machine": {"actors": 1}, "rlpd": {"staleness": 1}},
            "the actor would play while the learner validates",
        ),
    ],
)
def test_settings_for_many_simulators_are_refused_before_the_run(
    server: FaultyServer, changes: dict[str, Any], sentence: str
) -> None:
    assert_refused(robot_env(FAKE, settings_of(server)), changes, sentence)


def test_a_run_in_which_nobody_would_say_that_an_episode_succeeded_is_refused(server: FaultyServer) -> None:
    env = robot_env(FAKE, settings_of(server, success="none"))
    assert_refused(env, {"algorithms": ["rlpd"]}, "nobody says that an episode succeeded")


def assert_refused(env: config.Env, changes: dict[str, Any], sentence: str) -> None:
    base = {**small_params(), "algorithms": [], "policy": {**small_params()["policy"], "head": "tanh_gaussian"}}
    sections = config.merged(base, changes)
    params = config.Params.model_validate(sections).model_copy(update={"env": env})
    suite = envs.selected(env)
    with pytest.raises(ConfigError, match=sentence):
        suite.check_machine(params.machine)
        suite.check_run(params)


def test_a_command_that_is_no_stage_plays_on_a_robot_with_one_client_only(server: FaultyServer) -> None:
    env = robot_env(FAKE, settings_of(server))
    machine = config.Params.model_validate(config.merged(small_params(), {"machine": {"workers": 2}})).machine
    with pytest.raises(ConfigError, match="one robot plays one episode at a time"):
        open_pool_for(grid(env, 1), machine, env)
    open_pool_for(grid(env, 1), machine.model_copy(update={"workers": 0}), env).close()


def test_the_suite_and_the_section_belong_together() -> None:
    with pytest.raises(ValueError, match="belong together"):
        FAKE.model_validate({**FAKE.model_dump(), "suite": "robot"})


def test_images_of_another_size_than_the_servers_are_refused(server: FaultyServer) -> None:
    env = robot_env(FAKE, settings_of(server))
    other = env.model_copy(update={"cameras": env.cameras.model_copy(update={"size": 64})})
    with pytest.raises(SimulatorError, match=r"env\.cameras\.size is 64 for agentview, and the robot's images have 32"):
        envs.check_cameras(other)


def test_the_client_slides_along_the_box_where_the_policy_pushes_against_it(server: FaultyServer) -> None:
    env = make(server, narrowed(server, box_high=(0.02, 2.0, 3.0)))
    env.reset("train", 0)
    push = np.array([1, 0.5, 0, 0, 0, 0, 0], np.float32)
    for _ in range(3):
        seen, _ = env.step(push)
    assert np.allclose(seen["proprio"], [0.02, 0.075, 0.0], atol=1e-6)


def test_an_action_that_is_not_finite_stops_the_robot_and_ends_the_run(server: FaultyServer) -> None:
    env = make(server, settings_of(server))
    env.reset("train", 0)
    with pytest.raises(SimulatorError, match="is not usable"):
        env.step(np.full(7, np.nan, np.float32))
    assert server.mode == "stopped"
    assert "move" not in server.arm.told


MEASURED = {
    "force": ("force", np.array([0.0, 0.0, 1.0])),
    "torque": ("torque", np.array([0.0, 1.0, 0.0])),
    "linear_speed": ("velocity", np.array([0.0, 0.6, 0.8, 0.0, 0.0, 0.0])),
    "angular_speed": ("velocity", np.array([0.0, 0.0, 0.0, 0.6, 0.0, 0.8])),
}
"""What is measured against each limit: the arm's reading, and where it has the length 1."""


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("limit", MEASURED)
def test_a_measurement_above_its_limit_stops_the_robot_on_either_side(
    server: FaultyServer, limit: str, side: str
) -> None:
    theirs = getattr(server.arm.description.limits, limit)
    ours, above = theirs / 2, (0.75 if side == "client" else 1.5) * theirs
    env = make(server, narrowed(server, **{limit: ours}))
    env.reset("train", 0)
    reading, direction = MEASURED[limit]
    setattr(server.arm, reading, 0.99 * ours * direction)
    env.step(STILL)
    assert server.mode == "ready"
    setattr(server.arm, reading, above * direction)
    exceeded = ours if side == "client" else theirs
    with pytest.raises(RobotFault, match=rf"{limit} is .*, and {exceeded:g} is the limit"):
        env.step(STILL)
    assert server.mode == "stopped"
    stops = {"client": 1, "server": 2}[side]
    assert server.arm.told.count("stop") == stops, "the server stops by itself, and the client says it once more"


STIFF = {"translational_stiffness": 2000.0, "damping": 89}


@pytest.fixture
def compliant() -> Iterator[FaultyServer]:
    with faulty_server(make_arm=CompliantArm) as started:
        yield started


def test_compliance_is_sent_after_the_error_is_cleared_and_before_anything_moves(compliant: FaultyServer) -> None:
    env = make(compliant, settings_of(compliant, compliance=STIFF))
    for _ in range(2):
        compliant.asked.clear()
        compliant.arm.compliance.clear()
        env.reset("train", 0)
        assert [endpoint for endpoint, _ in compliant.asked if endpoint != "open"] == [
            "clearerr",
            "update_param",
            "reset",
        ]
        assert compliant.arm.compliance == STIFF, "before every episode"


def test_without_compliance_in_params_the_arm_keeps_its_own(compliant: FaultyServer) -> None:
    make(compliant, settings_of(compliant)).reset("train", 0)
    assert "update_param" not in [endpoint for endpoint, _ in compliant.asked]


def test_compliance_whose_answer_is_lost_is_sent_again_and_set_once(compliant: FaultyServer) -> None:
    told: list[dict[str, float]] = []
    compliant.arm.update_param = told.append  # type: ignore[method-assign, assignment]

    def lose_the_first(endpoint: str, status: int, body: bytes, send: Send) -> None:
        if endpoint == "update_param" and [asked for asked, _ in compliant.asked].count(endpoint) == 1:
            raise ConnectionAbortedError
        send(status, body)

    compliant.misbehave = lose_the_first
    make(compliant, settings_of(compliant, compliance=STIFF)).reset("train", 0)
    sent = [content for endpoint, content in compliant.asked if endpoint == "update_param"]
    assert len(sent) == 2 and sent[0] == sent[1], "the same request, under one sequence number"
    assert told == [STIFF]


def test_a_person_who_resets_finds_the_arm_as_compliant_as_before_the_hold(
    compliant: FaultyServer, tmp_path: Path
) -> None:
    person = FolderPerson(tmp_path)
    client = compliant.client(settings_of(compliant, compliance=STIFF), Answering(person, True))
    client.open()
    client.make_ready()
    compliant.arm.compliance.clear()
    PersonReset(person, 60.0, 60.0).reset(client, NEAR, "train", 7)
    assert compliant.arm.compliance == STIFF


def test_compliance_that_the_server_does_not_have_is_refused_before_anything_moves(
    server: FaultyServer, compliant: FaultyServer
) -> None:
    with pytest.raises(ConfigError, match=r"has stifness, and http.* has translational_stiffness, damping"):
        envs.tasks(robot_env(FAKE, settings_of(compliant, compliance={"stifness": 2000.0})))
    with pytest.raises(ConfigError, match=r"has damping, and http.* has no compliance parameters"):
        envs.tasks(robot_env(FAKE, settings_of(server, compliance={"damping": 1.0})))
    assert {endpoint for endpoint, _ in [*server.asked, *compliant.asked]} == {"describe"}
    for number in (float("nan"), "stiff"):
        with pytest.raises(ValueError, match=r"compliance\.damping"):
            settings_of(compliant, compliance={"damping": number})


def test_a_number_that_the_arm_cannot_bear_ends_the_run_with_the_servers_words(
    compliant: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(values: Mapping[str, float]) -> None:
        raise BadMessage(f"damping should be below 80, and is {values['damping']:g}")

    monkeypatch.setattr(compliant.arm, "update_param", refuse)
    with pytest.raises(
        SimulatorError, match=r"refuses env\.robot\.compliance: .*damping should be below 80, and is 89"
    ):
        make(compliant, settings_of(compliant, compliance=STIFF)).reset("train", 0)
    assert [endpoint for endpoint, _ in compliant.asked][-2:] == ["update_param", "stop"], "nothing was moved"


def test_results_under_another_compliance_do_not_compare(compliant: FaultyServer) -> None:
    def versions(**changes: Any) -> dict[str, str]:
        return dict(envs.selected(robot_env(FAKE, settings_of(compliant, **changes))).versions())

    assert versions(compliance=STIFF)["compliance"] == "damping 89.0, translational_stiffness 2000.0"
    assert "compliance" not in versions()


def test_a_robot_that_a_person_stopped_ends_the_run(server: FaultyServer) -> None:
    server.controller.stop("too close", latched=True)
    with pytest.raises(SimulatorError, match="a person stopped the robot: too close"):
        make(server, settings_of(server)).reset("train", 0)
    server.controller.handle("release", b"{}")
    make(server, settings_of(server)).reset("train", 0)


def test_a_token_is_asked_for(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.controller = Controller(server.arm, token="secret")
    with pytest.raises(SimulatorError, match="token"):
        make(server, settings_of(server)).reset("train", 0)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    make(server, settings_of(server)).reset("train", 0)


def test_on_a_robot_in_real_time_the_client_keeps_the_control_rate() -> None:
    clock = ManualClock()
    with faulty_server(clock=clock) as server:
        server.arm._description = replace(server.arm.description, realtime=True)
        server.controller = Controller(server.arm, clock=clock)
        env = make(server, settings_of(server), clock=clock)
        env.reset("train", 0)
        began = clock.now()
        for _ in range(2):
            env.step(STILL)
        assert clock.now() - began == pytest.approx(2 / 20, abs=0.01)
        assert [endpoint for endpoint, _ in server.asked][-4:] == ["pose", "getstate"] * 2


def test_the_suite_has_the_control_rate_of_the_robot_so_films_and_times_are_right() -> None:
    with faulty_server() as server:
        server.arm._description = replace(server.arm.description, control_hz=12.5)
        server.controller = Controller(server.arm)
        assert envs.selected(robot_env(FAKE, settings_of(server))).control_hz == 12.5


def test_without_observations_of_its_own_a_robot_shows_its_state_by_the_names_of_hil_serl() -> None:
    with faulty_server() as server:
        franka = replace(server.arm.description, capabilities=(), action_scale=None, observations={})
        server.arm._description = franka
        server.controller = Controller(server.arm)
        seen = make(server, settings_of(server)).reset("train", 0)
        assert {name: values.shape for name, values in seen.items()} == {
            **{"tcp_pose": (7,), "tcp_vel": (6,), "tcp_force": (3,), "tcp_torque": (3,)},
            **{"gripper_pose": (1,), "task": (2,), "instruction": ()},
        }
        stepping = make(server, settings_of(server))
        server.controller.handle("stop", b"{}")
        stepping.reset("train", 0)
        moved, _ = stepping.step(np.array([1, 0, 0, 0, 0, 0, -1], np.float32))
        assert moved["tcp_pose"][0] == pytest.approx(0.05)
        assert moved["gripper_pose"][0] == 1.0


class Answering(ManualClock):
    """Time in which a person answers, one after the other."""

    def __init__(self, person: FolderPerson, *answers: bool) -> None:
        super().__init__()
        self._person, self._answers = person, list(answers)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._answers:
            asked = self._person.question()
            assert asked is not None
            self._person.reply(asked["kind"], self._answers.pop(0))


def test_a_person_who_resets_is_asked_until_everything_is_in_place(server: FaultyServer, tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    chosen = settings_of(server)
    client = server.client(chosen, Answering(person, False, True))
    client.open()
    client.command("clearerr")
    state = PersonReset(person, 60.0, 60.0).reset(client, NEAR, "train", 7)
    assert state.mode == "ready"
    assert "jointreset" in [endpoint for endpoint, _ in server.asked]
    assert person.question() is None


def test_no_answer_of_a_person_ends_the_run_with_the_question(server: FaultyServer, tmp_path: Path) -> None:
    client = server.client(settings_of(server), ManualClock())
    client.open()
    client.command("clearerr")
    with pytest.raises(SimulatorError, match=r"no answer came within 5 s to: Put everything at place 7 \(eval\)"):
        PersonReset(FolderPerson(tmp_path), 60.0, 5.0).reset(client, NEAR, "eval", 7)
    assert server.mode == "stopped", "while hands may be near it"


def test_a_person_is_not_asked_to_reach_in_where_the_stop_was_not_confirmed(
    server: FaultyServer, tmp_path: Path
) -> None:
    person = FolderPerson(tmp_path)
    client = server.client(settings_of(server), Answering(person, True))
    client.open()
    client.command("clearerr")
    server.loses = lambda endpoint: endpoint == "stop"
    with pytest.raises(RobotFault, match="was not confirmed"):
        PersonReset(person, 60.0, 60.0).reset(client, NEAR, "train", 7)
    assert person.question() is None


@pytest.mark.parametrize("verdict", [True, False])
def test_a_person_judges_an_episode_at_its_end(server: FaultyServer, tmp_path: Path, verdict: bool) -> None:
    person = FolderPerson(tmp_path)
    env = make(server, settings_of(server, success="person"), clock=Answering(person, verdict), person=person)
    env.reset("train", 0)
    assert [env.step(STILL).success for _ in range(3)] == [False, False, verdict]


def test_where_nobody_judges_training_a_person_judges_the_evaluation(server: FaultyServer, tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    env = make(server, settings_of(server, success="none"), clock=Answering(person, True), person=person)
    for split in ("train", "validation"):
        env.reset(split, 0)
        assert person.question() is None
        assert [env.step(STILL).success for _ in range(3)] == [False, False, False]
    env.reset("eval", 0)
    assert [env.step(STILL).success for _ in range(3)] == [False, False, True]


def test_a_person_may_say_before_the_end_that_the_task_is_done(server: FaultyServer, tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    env = make(server, settings_of(server, success="person"), person=person)
    env.reset("train", 0)
    assert not env.step(STILL).success
    person.reply("success", True)
    assert env.step(STILL).success


def test_a_yes_before_the_end_holds_where_the_episode_goes_on(server: FaultyServer, tmp_path: Path) -> None:
    """A classifier ends episodes afterwards. Nobody is asked again at the horizon, where the run would wait."""
    person = FolderPerson(tmp_path)
    env = make(server, settings_of(server, success="person"), person=person)
    for _ in range(2):
        env.reset("train", 0)
        assert not env.step(STILL).success
        person.reply("success", True)
        assert [env.step(STILL).success for _ in range(2)] == [True, True]
        assert person.question() is None


def test_no_before_the_end_means_not_yet(server: FaultyServer, tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    env = make(server, settings_of(server, success="person"), clock=Answering(person, True), person=person)
    env.reset("train", 0)
    person.reply("success", False)
    assert not env.step(STILL).success
    assert person.question() is not None and person.answer() is None, "it is asked again"
    assert [env.step(STILL).success for _ in range(2)] == [False, True]


def test_a_picture_for_people_is_the_image_that_the_policy_has_seen(server: FaultyServer) -> None:
    env = make(server, settings_of(server))
    env.reset("train", 0)
    camera = next(iter(server.arm.description.cameras))

    def asked() -> int:
        return sum(endpoint == "getstate" for endpoint, _ in server.asked)

    seen = env.camera_images([camera])[camera]
    before = asked()
    shown = env.render()
    assert shown is not None and np.array_equal(shown, seen[::-1, ::-1]), "the other way round"
    assert asked() == before, "a camera has no newer image yet"
    env.step(STILL)
    before = asked()
    assert env.render() is not None
    assert asked() == before + 1


def test_how_people_see_a_camera_is_checked_and_changes_no_description(server: FaultyServer) -> None:
    described = server.arm.description
    assert described.flips == {"agentview": "both"}
    assert replace(described, flips={}).digest == described.digest
    content = loads(dumps(asdict(described)))
    assert description_of(content).flips == described.flips
    for flips in ({"agentview": "sideways"}, {"wrist": "both"}, {"agentview": ["both"]}, ["agentview"]):
        with pytest.raises(BadMessage, match=r"flips should have|has another type"):
            description_of({**content, "flips": flips})


def test_an_answer_to_another_question_does_not_count(tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    person.ask(Question(kind="reset", words="in place?"))
    person.reply("reset", True)
    person.ask(Question(kind="success", words="done?"))
    assert person.answer() is None


def test_yes_to_a_question_that_is_no_longer_open_is_refused(tmp_path: Path) -> None:
    person = FolderPerson(tmp_path)
    person.ask(Question(kind="success", words="Is this done?"))
    person.ask(Question(kind="reset", words="Is it in place?"))
    with pytest.raises(SimulatorError, match=r"another question is open now, reset: Is it in place\?"):
        person.reply("success", True)
    assert person.answer() is None


def test_the_sections_on_the_page_about_robots_are_some_of_params() -> None:
    page = (REPOSITORY / "docs" / "robots.md").read_text()
    small, robot = (yaml.safe_load(block.split("```")[0]) for block in page.split("```yaml\n")[1:])
    config.Params.model_validate(config.merged(config.read_yaml(REPOSITORY / "params.yaml"), small))
    assert config.Env.model_validate(robot["env"]).robot is not None


def test_what_a_stopped_robot_shows_is_seen_and_the_next_command_is_refused(server: FaultyServer) -> None:
    """A pilot who leaves while a person judges the last step stops the robot, and the episode is complete."""
    env = make(server, settings_of(server))
    env.reset("train", 0)
    env.step(np.zeros(7, np.float32))
    assert env.halt("the pilot is gone")
    camera = FAKE.cameras.names[0]
    assert env.camera_images([camera])[camera].any()
    with pytest.raises(RobotFault):
        env.step(np.zeros(7, np.float32))
