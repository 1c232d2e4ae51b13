"""The server as it is started: over HTTP, with its watchdog, until it ends; and the commands `nightshift robot …`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from nightshift import config, envs
from nightshift.cli import robot_commands
from nightshift.envs.base import Step
from nightshift.envs.robot.client import TOKEN_VARIABLE, RobotClient, connect
from nightshift.envs.robot.env import RobotEnv
from nightshift.envs.robot.poses import Vector
from nightshift.envs.robot.suite import ROBOT
from nightshift.errors import ConfigError, SimulatorError, StreamError
from nightshift.robot_server.app import LARGEST_BODY, check_address, make_app
from nightshift.robot_server.controller import Controller
from nightshift.types import Array, RolloutRequest
from tests.command import Command
from tests.ports import free_port
from tests.robots.parts import FAKE, PATIENT_S, WatchedArm
from tests.robots.test_same_episodes import assert_same, play

JSON = {"Content-Type": "application/json"}
TOKEN = "0123456789abcdef"


class BlockingArm(WatchedArm):
    """Its movements wait for the test; its first holds fail as often as the test says."""

    def __init__(self, watchdog_s: float) -> None:
        self.failing_holds = 0
        self.moving, self.goes_on, self.is_held = threading.Event(), threading.Event(), threading.Event()
        super().__init__(FAKE, watchdog_s=watchdog_s)

    def joint_reset(self) -> None:
        self.moving.set()
        assert self.goes_on.wait(PATIENT_S)

    def hold(self) -> None:
        if self.failing_holds:
            self.failing_holds -= 1
            raise ConnectionResetError("no arm")
        super().hold()
        self.is_held.set()

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        raise AssertionError("no test here moves it")


@contextlib.contextmanager
def serving(arm: BlockingArm, token: str = "") -> Iterator[str]:
    with ThreadPoolExecutor(1) as thread:
        app = make_app(Controller(arm, token=token), thread, token)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        running = threading.Thread(target=server.run)
        running.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            arm.goes_on.set()
            server.should_exit = True
            running.join()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(url: str, endpoint: str, content: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
    with contextlib.closing(connect(url, PATIENT_S)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", f"/{endpoint}", body, {**JSON, **named})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_stop_is_answered_while_the_arm_moves_and_the_movement_is_refused() -> None:
    arm = BlockingArm(PATIENT_S)
    with serving(arm) as url, ThreadPoolExecutor(1) as other:
        session = post(url, "open")[1]["session"]
        post(url, "clearerr", {"session": session, "seq": 1})
        moving = other.submit(post, url, "jointreset", {"session": session, "seq": 2})
        assert arm.moving.wait(PATIENT_S)
        assert post(url, "stop", {"latched": True}) == (200, {"mode": "stopped"})
        assert not moving.done()
        arm.goes_on.set()
        assert moving.result(PATIENT_S)[1]["error"] == "latched"
        assert arm.told == ["stop", "stop"]


def test_the_watchdog_needs_no_request_and_outlives_a_hold_that_fails() -> None:
    arm = BlockingArm(watchdog_s=0.2)
    arm.failing_holds = 2
    with serving(arm) as url:
        session = post(url, "open")[1]["session"]
        post(url, "clearerr", {"session": session, "seq": 1})
        assert arm.is_held.wait(PATIENT_S)
        assert post(url, "getstate")[1]["mode"] == "held"


def test_the_end_of_the_server_stops_the_arm() -> None:
    arm = BlockingArm(PATIENT_S)
    with serving(arm) as url:
        post(url, "describe")
        assert arm.told == []
    assert arm.told == ["stop"]


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"Host": "evil.example"}, "this machine only"),
        ({"Origin": "http://evil.example"}, "pages of other sites"),
        ({"Content_Type": "text/plain"}, "Content-Type"),
    ],
)
def test_a_web_page_cannot_command_the_robot_of_this_machine(headers: dict[str, str], what: str) -> None:
    arm = BlockingArm(PATIENT_S)
    with serving(arm) as url:
        post(url, "stop", {"latched": True})
        status, answer = post(url, "release", **headers)
        assert (status, answer["error"]) == (403, "forbidden")
        assert what in answer["what"]
        session = post(url, "open")[1]["session"]
        assert post(url, "clearerr", {"session": session, "seq": 1})[1]["error"] == "latched"


def test_over_http_a_token_is_asked_for_and_a_long_body_is_refused() -> None:
    with serving(BlockingArm(PATIENT_S), TOKEN) as url:
        assert post(url, "describe")[1]["error"] == "unauthorized"
        assert post(url, "describe", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, answer = post(url, "getstate", b" " * (LARGEST_BODY + 1), Authorization=f"Bearer {TOKEN}")
        assert (status, answer["error"]) == (413, "too_long")
        status, answer = post(url, "stop", b" " * (LARGEST_BODY + 1), Authorization=f"Bearer {TOKEN}")
        assert (status, answer["mode"]) == (200, "stopped"), "a stop of any length stops"


def test_a_stop_that_breaks_off_stops_the_arm() -> None:
    arm = BlockingArm(PATIENT_S)
    with serving(arm) as url:
        with contextlib.closing(connect(url, PATIENT_S)) as connection:
            connection.request("POST", "/stop", b"{", {**JSON, "Content-Length": "99"})
        until(lambda: arm.told == ["stop"])


def test_an_open_address_needs_a_token_and_a_free_port() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        check_address("0.0.0.0", 0, "")
    with pytest.raises(StreamError, match="short enough to guess"):
        check_address("0.0.0.0", 0, TOKEN[:-1])
    check_address("0.0.0.0", 0, TOKEN)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            check_address("127.0.0.1", port, "")


@pytest.mark.parametrize("token", ["a token of 20 €urs", "a token\nof two lines"])
def test_a_token_that_http_cannot_carry_is_one_sentence_that_does_not_show_it(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match="press the robot's own stop button") as refusal:
        robot_commands.stop("http://127.0.0.1:1")
    assert token not in str(refusal.value)


def test_the_end_of_line_of_a_file_is_no_part_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f"{TOKEN}\n")
    with serving(BlockingArm(PATIENT_S), TOKEN) as url:
        robot_commands.stop(url)


@pytest.mark.parametrize("url", ["nonsense", "http://host:abc", "http://[::1", "ftp://host:1"])
def test_an_address_that_is_none_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a robot server"):
        connect(url, 1.0)


def run(project: Path, *arguments: str) -> str:
    done = Command(project, "robot", *arguments).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def serve(project: Path, port: int, *options: str) -> Command:
    return Command(project, "robot", "serve", *options, "--port", str(port), "--watchdog", "60")


def printed_section(command: Command, port: int) -> config.Env:
    """For a client, when the server answers."""
    until(lambda: "answer_within_s" in command.printed() or not command.is_running())
    section = yaml.safe_load(command.printed().split("client:\n")[1])
    until(lambda: answers(f"http://127.0.0.1:{port}"))
    return config.Env.model_validate(section["env"])


@contextlib.contextmanager
def served_by_command(project: Path, *options: str) -> Iterator[tuple[str, config.Env]]:
    """Its address, and the section that it prints; `options` of `nightshift robot serve`."""
    port = free_port()
    command = serve(project, port, *options)
    try:
        yield f"http://127.0.0.1:{port}", printed_section(command, port)
    finally:
        ROBOT.forget()
        if command.is_running():
            os.kill(command.pid, signal.SIGTERM)
        assert command.wait().returncode == 0


def answers(url: str) -> bool:
    try:
        return post(url, "describe")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_the_commands_serve_check_stop_release_and_the_section_that_serve_prints(project: Path) -> None:
    request = RolloutRequest(task="near", split="train", init_state=4, controller="expert", seed=1)
    with served_by_command(project, "--suite", "fake") as (url, env):
        assert "passes 8 checks; the robot is stopped now" in run(project, "check", url)
        assert_same(
            play(FAKE.model_copy(update={"cameras": env.cameras.model_copy(update={"size": 32})}), [request]),
            play(env, [request]),
        )
        run(project, "stop", url)
        assert env.robot is not None
        client = RobotClient(env.robot, envs.suite("robot").configured(env)._description)  # type: ignore[attr-defined]
        client.open()
        with pytest.raises(SimulatorError, match="a person stopped the robot"):
            client.command("clearerr")
        run(project, "release", url)
        assert client.command("clearerr").mode == "ready"
        client.close()
    assert "no question is open" in run(project, "answer")
    refused = Command(project, "robot", "answer", "success", "yes").wait()
    assert refused.returncode != 0
    assert "no question is open" in refused.stdout + refused.stderr


def test_a_server_that_is_killed_in_mid_episode_ends_it_as_invalid_and_the_next_reset_takes_a_new_one(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    servers = [serve(project, port, "--suite", "fake")]
    asked = [RolloutRequest(task="near", split="train", init_state=4, controller="expert", seed=1)]
    steps, step = 0, RobotEnv.step

    def killed_at_the_third(env: RobotEnv, action: Array) -> Step:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(servers[0].pid, signal.SIGKILL)
            assert servers[0].wait().returncode == -signal.SIGKILL
        return step(env, action)

    monkeypatch.setattr(RobotEnv, "step", killed_at_the_third)
    try:
        env = printed_section(servers[0], port)
        (episode,) = play(env, asked)
        assert (episode.valid, episode.length, steps) == (False, 0, 3)
        assert "pose was not answered within" in caplog.text
        servers.append(serve(project, port, "--suite", "fake"))
        assert printed_section(servers[1], port) == env
        again = play(env, asked)
    finally:
        ROBOT.forget()
        servers[-1].kill()
    small = env.cameras.model_copy(update={"size": 32})
    assert_same(play(FAKE.model_copy(update={"cameras": small}), asked), again)


def test_a_published_task_without_training_states_says_how_to_draw_them(project: Path) -> None:
    task = "pick_up_the_alphabet_soup_and_place_it_in_the_basket"
    refused = Command(project, "robot", "serve", "--suite", "libero_object", "--task", task).wait()
    assert refused.returncode != 0
    said = " ".join((refused.stdout + refused.stderr).split())
    assert "no training states have been drawn" in said
    assert "set env.suite: libero_object" in said
