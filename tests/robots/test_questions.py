"""The page asks the person beside the robot: to put the scene back, and whether the task is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.access import TOKEN_VARIABLE, Access
from nightshift.cli import robot_commands
from nightshift.envs.robot.people import FolderPerson, Question
from nightshift.errors import ConfigError
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import ONE_AT_A_TIME
from nightshift.rollouts.local import LocalPool
from nightshift.teleop import pilot
from nightshift.teleop.board import open_board
from nightshift.types import RolloutRequest, Trajectory
from tests.browser import browser
from tests.command import Command
from tests.interventions.test_browser import PAGES_OWN, PERSON, settings_of_browser
from tests.ports import free_port
from tests.robots.parts import FAKE, PATIENT_S, served
from tests.rollouts.parts import policy
from tests.teleop.serving import Visitor, until, visitor
from tests.teleop.test_command import flown, interrupted

pytestmark = pytest.mark.usefixtures("project")
IN_PLACE = Question(kind="reset", words="Put everything at place 7 (train) for: reach it. Is it in place?")
DONE = Question(kind="success", words="Is this done: reach it?")
TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class At:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def board(token: str | None = None) -> Iterator[At]:
    server = open_board(Access(token), ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield At(server.port)
    finally:
        server.stop()
        thread.join()


def asked(page: Visitor, kind: str) -> str:
    """The id of the question of this kind, once it is shown."""
    found: list[str] = []

    def is_it(message: Any) -> bool:
        found[:] = [message["id"]]
        return bool(message["kind"] == kind)

    page.hear_until("question", is_it)
    return found[0]


def test_only_the_pilot_answers_and_only_the_question_that_was_read() -> None:
    person = FolderPerson()
    person.ask(IN_PLACE)
    with board() as at, visitor(at) as page, visitor(at) as other:
        first = asked(page, "reset")
        page.say(type="answer", id=first, yes=True)
        page.hear_until("notice", lambda notice: "take the controls first" in notice["text"])
        assert page.fly("Ada")
        other.hear_until("state", lambda state: state["pilot"] == "Ada")
        person.ask(IN_PLACE)  # again, under another id
        page.hear_until("question", lambda message: message["id"] not in ("", first))
        page.say(type="answer", id=first, yes=True)
        page.hear_until("notice", lambda notice: "no longer open" in notice["text"])
        assert person.answer() is None
        question = person.question()
        assert question is not None
        page.say(type="answer", id=question["id"], yes=True)
        until(lambda: person.answer() is True)
        person.withdraw()
        asked(page, "")


def test_the_questions_need_the_token() -> None:
    from websockets.exceptions import ConnectionClosed

    FolderPerson().ask(IN_PLACE)
    with board(TOKEN) as at:
        with visitor(at, token=TOKEN) as page:
            assert asked(page, "reset")
        with pytest.raises(ConnectionClosed), visitor(at, token="wrong") as stranger:
            stranger.hear("question")


def take_part(page: Visitor, steps: int) -> None:
    """Take over for at least so many steps. A stop would end the episode of a robot."""

    def drive(state: Mapping[str, Any]) -> bool:
        page.drive(*PAGES_OWN)
        if state["phase"] == "running" and state["in_control"] == "policy":
            page.say(type="take_over")
        return bool(state["interventions"] >= steps)

    page.hear_until("state", drive)
    page.say(type="hand_back")
    page.hear_until("state", lambda state: state["in_control"] == "policy")


def test_an_episode_on_a_robot_begins_when_the_page_says_that_the_scene_is_back_and_is_taken_over_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pilot, "DEAD_MAN_SECONDS", PATIENT_S)
    with served(FAKE.model_copy(update={"horizon": 60}), reset="person") as env:
        pool = LocalPool(env, ONE_AT_A_TIME)
        request = RolloutRequest(
            task="near", split="train", init_state=7, controller="sample", seed=0, interventions=settings_of_browser()
        )
        played: list[Trajectory] = []
        acting = snapshot(policy())
        playing = threading.Thread(
            target=lambda: played.extend(one for _, found in pool.run([request], acting) for one in found)
        )
        playing.start()
        try:
            until(lambda: pool._engine._interventions._person is not None)
            source: Any = pool._engine._interventions._person
            with visitor(At(source.port)) as page:
                question = asked(page, "reset")
                assert page.fly("Ada")
                assert source.state()["phase"] == "waiting" and source.state()["step"] == 0
                page.say(type="answer", id=question, yes=False)
                page.hear_until("question", lambda message: message["id"] not in ("", question))
                assert source.state()["phase"] == "waiting", "no: it is asked again"
                current = FolderPerson().question()
                assert current is not None and "place 7 (train)" in current["words"]
                page.say(type="answer", id=current["id"], yes=True)
                asked(page, "")
                take_part(page, steps=5)
        finally:
            playing.join()
            pool.close()
    (trajectory,) = played
    assert trajectory.valid and trajectory.interventions is not None
    driven = np.flatnonzero(trajectory.interventions)
    assert len(driven) >= 5 and (np.diff(driven) == 1).all()
    assert (trajectory.executed[driven, :6] == PERSON[:6]).all()


def test_in_a_real_browser_ready_answers_once_and_the_next_question_has_to_be_read_first() -> None:
    person = FolderPerson()
    with board() as at, browser() as tab:
        tab.visit(at.url, 820)
        tab.wait("welcome !== null && phaseInWords() === '… nothing is asked now'")
        assert tab.evaluate("document.getElementById('pads').hidden && document.getElementById('question').hidden")
        person.ask(IN_PLACE)
        tab.wait("document.getElementById('question').innerText.includes('Put the scene back, then press Ready')")
        assert "place 7" in tab.evaluate("document.getElementById('question').innerText")
        assert tab.evaluate("document.getElementById('yes').disabled"), "nobody has the controls"
        tab.evaluate("document.getElementById('who').value = 'Ada'")
        tab.click("#controls")
        tab.wait("isPilot && !document.getElementById('yes').disabled")
        assert tab.evaluate("document.getElementById('no').hidden")
        tab.click("#yes")
        until(lambda: person.answer() is True)
        assert tab.evaluate("document.getElementById('yes').disabled"), "once"
        person.ask(DONE)
        tab.wait("document.getElementById('question-title').textContent === 'Is it done?'")
        fresh = "ask({id: 'x', kind: 'success', words: ''}), document.getElementById('yes').disabled"
        assert tab.evaluate(fresh), "the second click of a double click answers nothing"
        person.ask(DONE)
        tab.wait("question.id !== 'x' && !document.getElementById('no').disabled")
        tab.click("#no")
        until(lambda: person.answer() is False)
        assert not tab.complaints()


def test_the_command_serves_the_page_until_it_is_interrupted(project: Path) -> None:
    port = free_port()
    command = Command(project, "robot", "page", "--port", str(port))
    FolderPerson().ask(IN_PLACE)
    with flown(port) as page:
        assert asked(page, "reset")
    assert f"http://127.0.0.1:{port}/" in interrupted(command)


def test_the_command_lets_no_other_machine_in_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines move the robot"):
        robot_commands.page("0.0.0.0", 0)
