"""Asking a person beside the robot: to put things back, or whether the task is done.

A question is a file in the project, and so is its answer, which `nightshift robot answer` or a web page writes.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from nightshift import files
from nightshift.envs.robot.client import Clock
from nightshift.errors import RolloutError, SimulatorError
from nightshift.project import paths

Kind = Literal["reset", "success"]
KINDS: tuple[str, ...] = get_args(Kind)
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: Kind
    """reset: yes means that everything is in place. success: yes means that the task is done."""
    words: str


class Person(Protocol):
    def ask(self, question: Question) -> None:
        """Put a question up in the place of any other."""
        ...

    def answer(self) -> bool | None:
        """To the present question; None: not yet."""
        ...

    def withdraw(self) -> None:
        """The question no longer matters."""
        ...

    @property
    def is_let_go(self) -> bool:
        """The run ends: nobody waits for an answer."""
        ...

    def wait(self) -> None:
        """The answer is still waited for; called several times a second."""
        ...


class FolderPerson:
    """Questions and answers in `.state/robot`."""

    def __init__(self, folder: Path = paths.ROBOT_QUESTIONS) -> None:
        self._question = folder / "question.json"
        self._answer = folder / "answer.json"
        self._let_go = threading.Event()
        self._on_wait: Callable[[], None] = lambda: None

    def ask(self, question: Question) -> None:
        self._question.parent.mkdir(parents=True, exist_ok=True)
        self._answer.unlink(missing_ok=True)
        content = {"id": uuid.uuid4().hex, "kind": question.kind, "words": question.words}
        files.write_json(self._question, content)

    def answer(self) -> bool | None:
        asked, answered = self.question(), _read(self._answer)
        if asked is None or answered is None or answered.get("id") != asked["id"]:
            return None
        return bool(answered["answer"])

    def withdraw(self) -> None:
        self._question.unlink(missing_ok=True)
        self._answer.unlink(missing_ok=True)

    @property
    def is_let_go(self) -> bool:
        return self._let_go.is_set()

    def let_go(self) -> None:
        """Whoever waits for an answer waits no longer; from any thread."""
        self._let_go.set()

    def await_again(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._let_go.clear()

    def wait(self) -> None:
        self._on_wait()

    def question(self) -> dict[str, Any] | None:
        """What is asked now: its id, kind and words; None if nothing is."""
        return _read(self._question)

    def reply(self, kind: str, answer: bool) -> str:
        """Answer the open question, and return its words. SimulatorError if none of this kind is open: the person has
        read another one, and yes to "is it done?" must not say that no hand is on the table."""
        asked = self.question()
        if asked is None:
            raise SimulatorError("no question is open", "the run asks when it needs a person")
        if asked["kind"] != kind:
            raise SimulatorError(
                f"another question is open now, {asked['kind']}: {asked['words']}",
                f"answer that one: nightshift robot answer {asked['kind']} yes",
            )
        self._write(asked, answer)
        return str(asked["words"])

    def reply_to(self, asked_id: str, answer: bool) -> None:
        """Answer the question of this id. SimulatorError if it is no longer open."""
        asked = self.question()
        if asked is None or asked["id"] != asked_id:
            raise SimulatorError("this question is no longer open", "read the present one")
        self._write(asked, answer)

    def _write(self, asked: dict[str, Any], answer: bool) -> None:
        files.write_json(self._answer, {"id": asked["id"], "answer": answer})


def wait_for_answer(person: Person, question: Question, within_s: float, clock: Clock) -> bool:
    """Ask, wait, take the question down. SimulatorError if no answer comes in time, RolloutError if the run ended."""
    person.ask(question)
    return await_answer(person, question, within_s, clock)


def await_answer(person: Person, question: Question, within_s: float, clock: Clock) -> bool:
    """Wait for the answer to a question that is up already."""
    deadline = clock.now() + within_s
    while (answer := person.answer()) is None:
        if person.is_let_go:
            person.withdraw()
            raise RolloutError(f"the run ended before an answer came to: {question.words}")
        if clock.now() > deadline:
            person.withdraw()
            raise SimulatorError(
                f"no answer came within {within_s:g} s to: {question.words}",
                f"answer by nightshift robot answer {question.kind} yes, and run again",
            )
        person.wait()
        clock.sleep(_POLL_S)
    person.withdraw()
    return answer


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
