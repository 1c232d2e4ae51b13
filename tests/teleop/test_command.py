"""The command itself: where it listens, which policy it loads, and what it says when it ends in mid-episode."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from websockets.exceptions import InvalidHandshake
from websockets.sync.client import connect

from nightshift import config, policies
from nightshift.adapters.dvc_store import DvcStore
from nightshift.cli import teleop_commands
from nightshift.data import sources
from nightshift.errors import ConfigError
from nightshift.project import paths
from nightshift.teleop.library import ORIGIN, Library
from tests.command import Command
from tests.conftest import edit, nightshift
from tests.data import examples
from tests.ports import free_port, free_ports
from tests.servers import responds
from tests.stages.test_opponent import register_champion
from tests.teleop.serving import Visitor
from tests.waiting import wait_until

FORWARD = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@contextmanager
def flown(port: int) -> Iterator[Visitor]:
    """A page of the command's server, once that listens."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with connect(f"ws://127.0.0.1:{port}/socket", open_timeout=60) as opened:
                visitor = Visitor(opened)
                visitor.say(type="hello")
                yield visitor
                return
        except (ConnectionRefusedError, InvalidHandshake):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def play(page: Visitor, steps: int, waiting: str = "ready") -> None:
    """Start an episode and make so many control steps at least, however slow the machine is."""

    def go_on(state: Mapping[str, Any]) -> None:
        page.drive(*FORWARD)
        if state["phase"] == "paused":  # this process was stalled for longer than the dead man's switch allows
            page.say(type="resume")
        if state["phase"] == "unset":  # or while a robot was reset
            page.say(type="start")

    page.say(type="pilot", who="Ada")
    page.hear_until("state", lambda state: state["phase"] == waiting, meanwhile=go_on)
    page.drive(*FORWARD)
    page.say(type="start")
    page.hear_until("state", lambda state: state["step"] >= steps, meanwhile=go_on)


def record(page: Visitor, waiting: str = "ready") -> None:
    """A demo that a person calls a success."""
    play(page, 2, waiting)
    page.say(type="mark", success=True)
    page.hear_until("episodes", lambda message: bool(message["episodes"]))


def interrupted(command: Command) -> str:
    """What a command prints until Ctrl-C has ended it."""
    os.kill(command.pid, signal.SIGINT)
    ended = command.wait()
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_session_that_ends_in_mid_episode_loses_that_episode_alone_and_says_so(project: Path) -> None:
    port = free_port()
    killed = Command(project, "teleop", "--name", "shown", "--port", str(port))
    with flown(port) as page:
        record(page)
        page.say(type="reset", task="near", init_state=5)
        play(page, 3)
        os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    again = Command(project, "teleop", "--name", "shown", "--port", str(port))
    with flown(port) as page:
        assert "in the middle of an episode (of near from init state 5 by Ada" in page.hear("welcome")["lost"]
        assert [entry["number"] for entry in page.hear("episodes")["episodes"]] == [0]
        play(page, 1)
        printed = interrupted(again)
    assert "that episode is lost" in printed and "an episode was not kept: of near from init state 1 by Ada" in printed
    assert "data/imports/shown: 1 episodes, 0 of them new" in printed and "data/failures" not in printed
    assert "sources: [shown]" in printed and "git add data/imports/shown.dvc" in printed
    assert len(list(sources.open_store("shown"))) == 1


def test_what_was_recorded_waits_until_another_command_of_dvc_is_done(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As imports do: where `dvc push` took more than three seconds, a session ended with an error and no .dvc file."""
    recorded = examples.make()
    with contextlib.closing(Library("shown", {})) as library, contextlib.ExitStack() as held:
        library.save(replace(recorded, provenance=replace(recorded.provenance, origin=ORIGIN)))
        held.enter_context(DvcStore(project)._locked())
        with ThreadPoolExecutor(1) as executor:
            ending = executor.submit(teleop_commands._conclude, project, library)
            wait_until(lambda: ending.done() or "waiting for another DVC command" in capsys.readouterr().out)
            assert not ending.done()
            held.close()
            ending.result(timeout=60)
    assert "git add data/imports/shown.dvc" in capsys.readouterr().out
    assert (project / paths.IMPORTS / "shown.dvc").exists()


def test_demos_are_recorded_on_a_served_robot_until_its_server_is_killed(project: Path) -> None:
    port, robot_port = free_ports(2)
    server = Command(project, "robot", "serve", "--suite", "fake", "--port", str(robot_port), "--watchdog", "60")
    wait_until(lambda: "answer_within_s" in server.printed())
    (section,) = yaml.safe_load(server.printed().split("client:\n")[1]).values()
    section["robot"].update(deadline_s=60.0, reset_deadline_s=60.0)
    edit(project, "env", **section)
    wait_until(lambda: responds(section["robot"]["url"]))
    command = Command(project, "teleop", "--name", "shown", "--port", str(port))
    with flown(port) as page:
        record(page, waiting="unset")
        play(page, 1, waiting="ended")
        os.kill(server.pid, signal.SIGKILL)
        page.hear_until("notice", lambda notice: "is invalid and not kept: " in notice["text"])
        page.hear_until("state", lambda state: state["phase"] == "unset")
        printed = interrupted(command)
    server.wait()
    assert f"moves the robot at {section['robot']['url']}" in printed
    assert "data/imports/shown: 1 episodes, 1 of them new" in printed and "not kept" not in printed
    (demo,) = sources.open_store("shown")
    assert demo.provenance.source == "human" and demo.provenance.suite == "robot"


def test_other_machines_are_not_let_in_without_a_token(project: Path) -> None:
    ended = nightshift(project, "teleop", "--name", "shown", "--host", "0.0.0.0", NIGHTSHIFT_TOKEN="")
    assert ended.returncode == 1
    assert "--host 0.0.0.0 lets other machines move the robot, and there is no token" in ended.stderr


def test_a_port_that_is_taken_is_said_in_one_sentence(project: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = nightshift(project, "teleop", "--name", "shown", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1 and "cannot be listened on" in ended.stderr and "Traceback" not in ended.stderr


def test_a_policy_that_reads_what_is_not_shown_here_is_refused_before_the_page_is_served(
    project: Path, params: config.Params
) -> None:
    register_champion(project, params.section("register").model, "grid")
    elsewhere = params.model_copy(update={"env": params.env.model_copy(update={"suite": "libero_mini", "tasks": ()})})
    with pytest.raises(ConfigError, match=r"the policy champion cannot act here: it reads"):
        teleop_commands._driver(project, elsewhere, "champion")


def test_a_version_of_the_registry_drives(project: Path, params: config.Params) -> None:
    register_champion(project, params.section("register").model, "grid")
    registered = policies.load(project / "registered")
    seen = {name: np.full((1, size), 0.3, np.float32) for name, size in (("objects", 3), ("task", 2))}
    for which in ("1", "champion"):
        driver = teleop_commands._driver(project, params, which)
        assert (driver.label, driver.version) == (which, 1)
        assert np.array_equal(driver.act(lambda: seen, alone=True), registered.act(seen)[0, 0])
    with pytest.raises(ConfigError, match=r"2 is no folder here, and .* has no version or alias '2'"):
        teleop_commands._driver(project, params, "2")
