"""Back to a start: by the server alone, or with the help of a person."""

from __future__ import annotations

from typing import Any, Protocol

from nightshift import config
from nightshift.envs.robot.client import RobotClient
from nightshift.envs.robot.messages import RobotState
from nightshift.envs.robot.people import Person, Question, wait_for_answer
from nightshift.types import Task


class Resetter(Protocol):
    def reset(self, robot: RobotClient, task: Task, split: str, init_state: int) -> RobotState:
        """Bring robot and scene to start `init_state` of `task` in `split` ("train" or "eval")."""
        ...


class ScriptedReset:
    """The server does it: a simulator restores the exact state, an arm goes to its rest joints."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def reset(self, robot: RobotClient, task: Task, split: str, init_state: int) -> RobotState:
        if "init_states" not in robot.description.capabilities:
            return robot.command("jointreset", deadline_s=self._deadline_s)
        start: dict[str, Any] = {"task": task.name, "split": split, "init_state": init_state}
        return robot.command("reset", deadline_s=self._deadline_s, **start)


class PersonReset:
    """The arm goes to its rest joints and is stopped there, until a person says that everything is in place."""

    def __init__(self, person: Person, deadline_s: float, answer_within_s: float) -> None:
        self._person = person
        self._deadline_s = deadline_s
        self._answer_within_s = answer_within_s

    def reset(self, robot: RobotClient, task: Task, split: str, init_state: int) -> RobotState:
        robot.command("jointreset", deadline_s=self._deadline_s)
        if not robot.halt("a person puts the scene back"):
            raise robot.fault("the stop before a person puts the scene back was not confirmed")
        words = f"Put everything at place {init_state} ({split}) for: {task.language}. Is it in place?"
        question = Question(kind="reset", words=words)
        while not wait_for_answer(self._person, question, self._answer_within_s, robot.clock):
            pass  # "no": not yet
        return robot.make_ready()


def open_resetter(settings: config.Robot, person: Person) -> Resetter:
    """What `env.robot.reset` names."""
    if settings.reset == "script":
        return ScriptedReset(settings.reset_deadline_s)
    return PersonReset(person, settings.reset_deadline_s, settings.answer_within_s)
