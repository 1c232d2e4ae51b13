"""A person in a browser: the teleop page around the policy that `rlpd` trains.

    waiting ─ begin ─▶ running ◀─ stop, resume ─▶ paused
       ▲                  │
       └────── end ───────┘

The pilot takes over and hands back. While the pilot has taken over and the page is not heard of for DEAD_MAN_SECONDS,
or is closed, nobody acts: the episode is paused and makes no step, so that nothing is recorded that nobody did. It goes
on when a pilot says so; on a simulator also with the policy after RETURN_SECONDS in which no pilot was heard of, or
after machine.page_patience_s in which the pilot pressed nothing.

A stop between two episodes holds before the scene is put back. A robot is stopped at once, also during its reset, and
refuses the next command. An episode that broke off while it was paused or a person drove is followed by another when a
pilot resumes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from nightshift import config, envs
from nightshift.access import Access, page_url
from nightshift.closing import Closing
from nightshift.envs.robot.client import halt
from nightshift.envs.robot.people import FolderPerson
from nightshift.errors import RolloutError
from nightshift.interventions.base import Moment, PageSettings
from nightshift.project import ports
from nightshift.telemetry.console import console
from nightshift.teleop import messages
from nightshift.teleop.hub import Hub
from nightshift.teleop.messages import Drive
from nightshift.teleop.mirror import SCENE, Frame, to_jpeg
from nightshift.teleop.pacing import Pace
from nightshift.teleop.pilot import DEAD_MAN_SECONDS, Controls, Pilot, action_of, moves, same_motion
from nightshift.teleop.server import Server, Station, listen
from nightshift.types import Array, Task

_log = logging.getLogger(__name__)

RETURN_SECONDS = 60.0
"""A policy that trains unattended in a simulator does not wait for ever for somebody who closed the page."""
_STOP_AGAIN_SECONDS = 0.1
_NOT_CONFIRMED = "The robot has not confirmed the stop: its watchdog has to hold it"
_GONE = "the pilot's page is gone: stopped"
_Phase = Literal["waiting", "running", "paused"]
_REFUSED = "the episodes are rlpd's: take over, hand back, stop and resume are all there is here"


class BrowserIntervention(Closing):
    """While no page is open, nothing is drawn and the policy plays as fast as it can."""

    def __init__(
        self,
        env: config.Env,
        page: PageSettings,
        token: str | None,
        *,
        is_let_go: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_let_go`: nobody wants the episode any more, so that a pause ends."""
        self._suite = envs.selected(env)
        self._clock = clock
        self._is_let_go = is_let_go
        self._pilot, self._hub = Pilot(clock), Hub()
        self._pace = Pace(1 / self._suite.control_hz, self._pilot.is_changed_within, clock=clock, sleep=sleep)
        self._orders: deque[tuple[int, messages.Order]] = deque()
        self._phase: _Phase = "waiting"
        self._task = ""
        self._step = self._intervened = 0
        self._driver = -1
        """The connection that drives; another page of the same person has to say Resume."""
        self._heard = self._touched = 0.0
        """When the pilot of a paused episode was last heard of, and last pressed something."""
        self._pressed: Drive | None = None
        """The newest command of a paused episode."""
        self._robot_url = env.robot.url if env.robot else None
        self._goes_on_alone = self._robot_url is None
        """Whether a pause ends without a pilot, in time."""
        self._patience_s = (page.patience_s or math.inf) if self._goes_on_alone else math.inf
        self._gripper: messages.Gripper = "open"
        self._executed_seq = -1
        person = FolderPerson() if env.robot else None
        station = Station(watched=self, pilot=self._pilot, hub=self._hub, access=Access(token), person=person)
        self._server = Server(station, listen(*page.address, "change machine.page in params.yaml"))
        self._lock = ports.hold(self.port)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._server.serve, name="intervention-page", daemon=True)
        self._thread.start()
        self._attendance = threading.Thread(target=self._watch_robot, name="intervention-attendance", daemon=True)
        if self._robot_url is not None:
            self._attendance.start()
        console.print(f"{page_url(page.address[0], self.port)}  watch the policy and take over", soft_wrap=True)

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        self._is_closed.set()
        self._server.stop()
        self._thread.join()
        if self._robot_url is not None:
            self._attendance.join()
        if self._lock is not None:
            self._lock.release()

    # What is played, by the thread that plays it

    def before_reset(self) -> None:
        broke_off = self._phase == "paused" or self._pilot.has_control
        self._pilot.has_control = False
        if broke_off:
            self._pause("the episode broke off: the next one begins when you resume")
        elif self._is_stop_ordered():
            self._pause("stopped: the next episode begins when you resume")
        if self._phase == "paused":
            self._controls_when_running()
        self._phase, self._pilot.has_control = "waiting", False

    def begin(self, task: Task) -> None:
        phase: _Phase = "running"
        while self._orders:
            _, order = self._orders.popleft()
            phase = "paused" if isinstance(order, messages.Pause) else phase
        self._pilot.has_control = False
        self._enter(phase)
        self._task, self._step, self._intervened = task.name, 0, 0

    def override(self, moment: Moment) -> Array | None:
        self._step = moment.step
        controls = self._wait_for_step(moment)
        self._executed_seq = controls.command.seq if controls.command else self._executed_seq
        action = self._action(controls) if self._pilot.has_control else None
        self._gripper = "closed" if (moment.policy_action if action is None else action)[-1] > 0 else "open"
        self._intervened += action is not None
        self._hub.tell(self.state())
        return action

    def end(self) -> None:
        self._phase, self._pilot.has_control = "waiting", False
        self._hub.tell(self.state())

    def _wait_for_step(self, moment: Moment) -> Controls:
        """The pilot as of the step that is made now."""
        if self._hub.count:
            self._show(moment)
            self._pace.wait()
        return self._controls_when_running()

    def _controls_when_running(self) -> Controls:
        """RolloutError if the run ends during a pause."""
        while True:
            while self._orders:
                self._carry_out(*self._orders.popleft())
            controls = self._pilot.read()
            self._watch_over(controls)
            if self._phase == "running":
                return controls
            if self._is_let_go():
                raise RolloutError("the run ended while the episode was stopped")
            self._hub.tell(self.state())
            self._pace.wait()

    def _is_stop_ordered(self) -> bool:
        return any(isinstance(order, messages.Pause) for _, order in list(self._orders))  # the server's thread adds

    def _show(self, moment: Moment) -> None:
        asked = self._clock()
        image = moment.picture()
        if image is not None:
            self._hub.show(Frame(view=SCENE, step=moment.step, time=asked, jpeg=to_jpeg(image)))

    def _action(self, controls: Controls) -> Array:
        return action_of(controls.command, self._suite.action_space, self._gripper).astype(np.float32)

    def _watch_over(self, controls: Controls) -> None:
        """Stop if whoever has taken over is gone; go on with the policy if nobody comes back."""
        if self._phase == "running":
            if self._pilot.has_control and not controls.are_held_by(self._driver):
                self._pause(_GONE)
            elif self._pilot.has_control and not controls.are_alive:
                self._pause(f"no word from the pilot for {DEAD_MAN_SECONDS} s: stopped")
        elif self._goes_on_alone and (why := self._end_of_pause(controls)):
            self._pilot.has_control, self._phase = False, "running"
            self._say(f"{why}: the policy goes on")
            _log.warning("%s: the policy goes on", why)

    def _end_of_pause(self, controls: Controls) -> str:
        """Why a pause ends by itself; empty: it does not yet."""
        now, before, self._pressed = self._clock(), self._pressed, controls.command
        if controls.are_alive:
            self._heard = now
        if moves(controls.command) or (before and controls.command and not same_motion(before, controls.command)):
            self._touched = now
        if now - self._heard > RETURN_SECONDS:
            return f"nobody came back for {RETURN_SECONDS:g} s"
        if now - self._touched > self._patience_s:
            return f"stopped, and no key for {self._patience_s:g} s"
        return ""

    def _pause(self, why: str) -> None:
        self._enter("paused")
        self._say(why if self._stop_robot(why) else f"{why}. {_NOT_CONFIRMED}", is_problem=True)

    def _stop_robot(self, why: str) -> bool:
        """Whether its server has confirmed it, or there is no robot."""
        return self._robot_url is None or halt(self._robot_url, why)

    def _stop_robot_until_paused(self) -> None:
        """A stop may be lost on its way, and a reset that begins after it clears it."""
        why = "the pilot pressed Stop"
        is_stopped = self._stop_robot(why)
        if not is_stopped:
            self._say(_NOT_CONFIRMED, is_problem=True)
        while (not is_stopped or self._is_stop_ordered()) and not self._is_closed.wait(_STOP_AGAIN_SECONDS):
            is_stopped = self._stop_robot(why)

    def _watch_robot(self) -> None:
        """The thread that plays may wait for the robot's server, and would find late that nobody drives any more. The
        stop is sent again until that thread has paused: it may be lost on its way."""
        while not self._is_closed.wait(_STOP_AGAIN_SECONDS):
            if self._phase == "running" and self._pilot.has_control and not self._is_driven():
                self._stop_robot(_GONE)

    def _is_driven(self) -> bool:
        return self._pilot.is_held_by(self._driver) and self._pilot.is_alive

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._pressed = phase, None
        self._heard = self._touched = self._clock()

    def _carry_out(self, client: int, order: messages.Order) -> None:
        if not self._pilot.is_held_by(client) and not isinstance(order, messages.Pause):
            return  # the controls have gone to somebody else meanwhile; a stop still counts
        self._touched = self._clock()
        match order:
            case messages.TakeOver() | messages.HandBack():
                self._driver = client  # first: another thread stops the robot of whoever drives and is gone
                self._pilot.has_control = isinstance(order, messages.TakeOver)
            case messages.Pause():
                self._enter("paused")
                self._say(f"stopped. {self._rule}")
            case messages.Resume():
                self._driver, self._phase = client, "running"
            case _:
                self._say(_REFUSED, is_problem=True)

    @property
    def _rule(self) -> str:
        """When a stop ends, for people."""
        if not self._goes_on_alone:
            return "A stop lasts until somebody resumes."
        without_input = f", and after {self._patience_s:g} s without a key of the pilot"
        return (
            f"This is a simulator: the policy goes on after {RETURN_SECONDS:g} s without a pilot"
            f"{without_input if self._patience_s < math.inf else ''}."
        )

    def _say(self, text: str, *, is_problem: bool = False) -> None:
        self._hub.tell({"type": "notice", "text": text, "problem": is_problem})

    # What the pages see, by the server's thread

    @property
    def axes(self) -> int:
        return self._suite.action_space.size - 1

    def submit(self, client: int, order: messages.Order) -> None:
        self._orders.append((client, order))
        if self._robot_url is not None and isinstance(order, messages.Pause):  # the player may wait for the robot
            threading.Thread(target=self._stop_robot_until_paused, name="intervention-stop", daemon=True).start()

    def welcome(self) -> dict[str, Any]:
        return {
            "type": "welcome",
            "mode": "train",
            "suite": self._suite.name,
            "tasks": [],
            "views": [SCENE],
            "control_hz": self._suite.control_hz,
            "axes": self.axes,
            "policy": "the one that rlpd trains",
            "rule": self._rule,
            "lost": "",
        }

    def episodes(self) -> dict[str, Any]:
        return {"type": "episodes", "episodes": []}

    def state(self) -> dict[str, Any]:
        holder = self._pilot.holder
        return {
            "type": "state",
            "phase": self._phase,
            "task": self._task,
            "step": self._step,
            "interventions": self._intervened,
            "pilot": holder.who if holder else "",
            "in_control": "person" if self._pilot.has_control else "policy",
            "gripper": self._gripper,
            "seq": self._executed_seq,
            "time": self._clock(),
        }
