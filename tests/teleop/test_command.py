"""The command itself: a killed one loses the episode in the making alone, and says so when it is started again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from websockets.exceptions import InvalidHandshake
from websockets.sync.client import connect

from nightshift.data import sources
from tests.command import Command
from tests.conftest import nightshift
from tests.teleop.serving import Visitor

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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def play(page: Visitor, steps: int) -> None:
    """Start an episode and make so many control steps at least."""
    page.say(type="pilot", who="Ada")
    state = page.hear("state")
    while state["phase"] != "ready":
        page.drive(*FORWARD)
        state = page.hear("state")
    page.drive(*FORWARD)
    page.say(type="start")
    while state["step"] < steps:
        page.drive(*FORWARD)
        state = page.hear("state")


def test_a_killed_session_loses_the_episode_in_the_making_alone_and_says_so(project: Path) -> None:
    port = free_port()
    command = Command(project, "teleop", "--name", "shown", "--port", str(port))
    with flown(port) as page:
        play(page, 2)
        page.say(type="mark", success=True)
        while not page.hear("episodes")["episodes"]:
            pass
        page.say(type="reset", task="near", init_state=5)
        play(page, 3)
        os.kill(command.pid, signal.SIGKILL)
    command.wait()
    again = Command(project, "teleop", "--name", "shown", "--port", str(port))
    with flown(port) as page:
        assert "in the middle of an episode (of near from init state 5 by Ada" in page.hear("welcome")["lost"]
        assert [entry["number"] for entry in page.hear("episodes")["episodes"]] == [0]
    os.kill(again.pid, signal.SIGINT)
    ended = again.wait()
    assert "that episode is lost" in ended.stdout
    assert "sources: [shown]" in ended.stdout and "git add data/imports/shown.dvc" in ended.stdout
    assert ended.returncode == 0
    assert len(list(sources.open_store("shown"))) == 1


def test_other_machines_are_not_let_in_without_a_token(project: Path) -> None:
    ended = nightshift(project, "teleop", "--name", "shown", "--host", "0.0.0.0", NIGHTSHIFT_TOKEN="")
    assert ended.returncode == 1
    assert "--host 0.0.0.0 lets other machines move the robot, and there is no token" in ended.stderr
