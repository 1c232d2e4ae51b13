"""When control steps are made: at a fixed rate, and sooner for a command that changed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.teleop import messages
from nightshift.teleop.pacing import Pace
from nightshift.teleop.pilot import Pilot
from tests.teleop.parts import ALICE, PERIOD, STILL

MOMENT = 1e-9
"""That sums of times differ by."""


class Person:
    """Changes the command at these times, and waits as the pilot's lease does."""

    def __init__(self, *changes: float) -> None:
        self.now = 0.0
        self.changes = sorted(changes)
        self.executed: list[tuple[float, float]] = []
        """When a command changed, and when the step came that executed it."""

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def is_changed_within(self, seconds: float) -> bool:
        if self.changes and self.changes[0] <= self.now + seconds:
            self.now = max(self.now, self.changes[0])
            return True
        self.now += seconds
        return False

    def step(self) -> float:
        while self.changes and self.changes[0] <= self.now:
            self.executed.append((self.changes.pop(0), self.now))
        return self.now


def steps(person: Person, count: int, late: float = 0.0) -> list[float]:
    """When the steps come, if each takes `late` seconds."""
    pace = Pace(PERIOD, person.is_changed_within, clock=person.clock, sleep=person.sleep)
    made = []
    for _ in range(count):
        pace.wait()
        made.append(person.step())
        person.now += late
    return made


def gaps(times: list[float]) -> list[float]:
    return [later - before for before, later in itertools.pairwise(times)]


def test_without_a_change_every_step_comes_a_period_after_the_last() -> None:
    assert gaps(steps(Person(), 20)) == pytest.approx([PERIOD] * 19)
    assert gaps(steps(Person(), 20, late=0.3 * PERIOD)) == pytest.approx([PERIOD] * 19)


def test_a_step_that_took_long_is_not_made_up_for() -> None:
    assert gaps(steps(Person(), 5, late=3 * PERIOD)) == pytest.approx([3 * PERIOD] * 4)


def test_a_change_in_the_second_half_of_a_period_is_executed_at_once_and_the_next_step_is_a_full_period_later() -> None:
    made = steps(Person(2.7 * PERIOD), 6)
    assert [time / PERIOD for time in made] == pytest.approx([0, 1, 2, 2.7, 3.7, 4.7])


def test_a_change_in_the_first_half_waits_for_the_second() -> None:
    made = steps(Person(2.1 * PERIOD), 5)
    assert [time / PERIOD for time in made] == pytest.approx([0, 1, 2, 2.5, 3.5])


@given(changes=st.lists(st.floats(0, 20 * PERIOD), max_size=30))
def test_no_change_waits_longer_than_half_a_period_and_no_two_steps_are_closer(changes: list[float]) -> None:
    person = Person(*changes)
    made = steps(person, 45)
    assert len(person.executed) == len(changes)
    assert all(at - since <= PERIOD / 2 + MOMENT for since, at in person.executed)
    assert all(PERIOD / 2 - MOMENT <= gap <= PERIOD + MOMENT for gap in gaps(made))


def drive(pilot: Pilot, seq: int, axes: tuple[float, ...] = STILL, speed: float = 1.0) -> None:
    assert pilot.drive(ALICE, messages.Drive(type="drive", seq=seq, axes=axes, gripper="open", speed=speed))


def test_a_repeated_command_is_no_change_and_one_that_was_read_is_none_any_more() -> None:
    pilot = Pilot(lambda: 0.0)
    pilot.claim(ALICE, "Alice")
    drive(pilot, 1)
    assert pilot.is_changed_within(0.0), "the first one"
    drive(pilot, 2)
    assert not pilot.is_changed_within(0.0)
    drive(pilot, 3, speed=0.5)
    assert pilot.is_changed_within(0.0)
    assert not pilot.is_changed_within(0.0), "once per change"
    drive(pilot, 4, axes=(1.0, *STILL[1:]))
    pilot.read()
    assert not pilot.is_changed_within(0.0)
