"""Ctrl-C while a person's answer is awaited: the run ends at once, the robot is held, and no question stays open."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from nightshift import config, envs
from nightshift.envs.robot.people import FolderPerson
from nightshift.envs.splits import split_training_states
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import ONE_AT_A_TIME
from nightshift.rollouts.local import LocalPool
from nightshift.stages import _experience
from nightshift.types import RolloutRequest
from tests.robots.parts import FAKE, PATIENT_S, served
from tests.robots.test_serving import post
from tests.rollouts.parts import policy
from tests.stages.test_rlpd import (
    clone,  # noqa: F401 - a fixture
    cloned,  # noqa: F401 - a fixture
    learn,
)
from tests.waiting import wait_until

FOR_EVER_S = 1e6
REQUEST = RolloutRequest(task="near", split="train", init_state=7, controller="sample", seed=0)


class CtrlC(threading.Thread):
    """Interrupts this process at a question that is `meant`, and says yes to the others. If the run waits on, it says
    yes to that one, too: a test fails and does not hang."""

    def __init__(self, meant: Callable[[Any], bool]) -> None:
        super().__init__()
        self._meant = meant
        self._is_over = threading.Event()
        self.is_sent = self.was_waited_for = False

    def run(self) -> None:
        person = FolderPerson()
        while not self._is_over.wait(0.05):
            asked = person.question()
            if asked is None or self.is_sent:
                continue
            if self._meant(asked):
                self.is_sent = True
                os.kill(os.getpid(), signal.SIGINT)
                self.was_waited_for = not self._is_over.wait(PATIENT_S)
            if person.answer() is None and person.question() == asked:
                person.reply_to(asked["id"], True)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def ctrl_c(meant: Callable[[Any], bool] = lambda _: True) -> Iterator[CtrlC]:
    """In the block, which has to end by it."""
    found = CtrlC(meant)
    found.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield found
    finally:
        found.stop()
    assert found.is_sent and not found.was_waited_for


def assert_is_left_alone(env: config.Env) -> None:
    assert FolderPerson().question() is None
    assert env.robot is not None
    mode = "stopped" if env.robot.reset == "person" else "held"  # hands may be near the arm in a reset
    assert post(env.robot.url, "getstate")[1]["mode"] == mode


@pytest.mark.usefixtures("project_without_code")
@pytest.mark.parametrize("who", [{"reset": "person"}, {"success": "person"}])
def test_ctrl_c_ends_an_episode_that_waits_for_a_person_and_holds_the_robot(who: dict[str, str]) -> None:
    """At the end of an episode with `success`: in its middle the question is open, and nothing waits for it."""
    with served(FAKE.model_copy(update={"horizon": 2}), answer_within_s=FOR_EVER_S, **who) as env:
        pool = LocalPool(env, ONE_AT_A_TIME)
        try:
            with ctrl_c():
                list(pool.run([REQUEST] * 1000, snapshot(policy())))
            assert_is_left_alone(env)
        finally:
            pool.close()


@pytest.mark.usefixtures("project_without_code")
def test_who_waits_for_a_person_does_not_count_as_hanging() -> None:
    """A learner kills an actor that makes no step, and the next one would move the arm while a person is at it."""
    steps = []
    with served(FAKE, answer_within_s=FOR_EVER_S, reset="person") as env:
        pool = LocalPool(env, ONE_AT_A_TIME, on_step=lambda: steps.append(FolderPerson().question()))
        waited = threading.Event()

        def reply() -> None:
            person = FolderPerson()
            wait_until(lambda: person.question() is not None)
            began = len(steps)
            with contextlib.suppress(AssertionError):  # the test says what is wrong, and does not hang
                wait_until(lambda: len(steps) > began + 2, PATIENT_S)
                waited.set()
            person.reply("reset", True)

        answering = threading.Thread(target=reply)
        answering.start()
        try:
            list(pool.run([REQUEST], snapshot(policy())))
        finally:
            answering.join()
            pool.close()
    assert waited.is_set()


@pytest.mark.usefixtures("clone", "forked_processes")
def test_ctrl_c_ends_rlpd_while_its_actor_waits_for_a_person_and_the_actor_holds_the_robot(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_experience, "_STOP_SECONDS", PATIENT_S)  # a busy machine may need more than two
    validated = {
        str(place) for task in envs.tasks(params.env) for place in split_training_states(task, params.states).validation
    }

    def is_actors(asked: Any) -> bool:
        found = re.search(r"at place (\d+) \(train\)", asked["words"])
        assert found is not None
        return found[1] not in validated

    others = multiprocessing.active_children()
    streamed = replace(job("rlpd"), machine=params.machine.model_copy(update={"actors": 1}))
    with served(FAKE, reset="person", answer_within_s=FOR_EVER_S) as env:
        with ctrl_c(is_actors):
            learn(streamed, params.model_copy(update={"env": env}), staleness=0)
        assert_is_left_alone(env)
    assert multiprocessing.active_children() == others
