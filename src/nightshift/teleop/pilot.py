"""Who has the controls, and what that person's commands make the robot do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nightshift.envs.base import ActionSpace
from nightshift.teleop.messages import Drive, Gripper
from nightshift.types import GRIPPER_CLOSED, GRIPPER_OPEN, Array

DEAD_MAN_SECONDS = 0.6
"""The robot stops if its pilot's page has sent nothing for this long; a page sends its command every 50 ms."""
LEASE_SECONDS = 5.0
"""After this long without a word from the pilot somebody else may have the controls."""
GRIPPER: dict[Gripper, float] = {"open": GRIPPER_OPEN, "closed": GRIPPER_CLOSED}


def action_of(command: Drive | None, space: ActionSpace, gripper: Gripper) -> Array:
    """The action [A] that a command asks for; without one the hand holds still and `gripper` stays as it is."""
    action = np.zeros(space.size, np.float32)
    if command is not None:
        action[:-1] = np.float32(command.speed) * np.array(command.axes, np.float32)
    action[-1] = GRIPPER[command.gripper if command else gripper]
    return space.clip(action)


def moves(command: Drive | None) -> bool:
    """Whether a command moves the hand."""
    return command is not None and any(command.axes)


@dataclass(frozen=True)
class Holder:
    """Who has the controls, by connection."""

    client: int
    who: str


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The pilot at one moment."""

    holder: Holder | None
    """None: the controls are free."""
    command: Drive | None
    """The newest one of the holder."""
    silence: float
    """Seconds since the holder's page last sent a command; infinite where nobody has the controls."""

    def are_held_by(self, client: int) -> bool:
        return self.holder is not None and self.holder.client == client

    @property
    def are_alive(self) -> bool:
        return self.silence <= DEAD_MAN_SECONDS


class Pilot:
    """The lease of the controls and the newest command, shared by the server's thread and the simulator's.

    While `has_control`, the person acts instead of the policy.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._has_changed = False
        """The newest command differs from the one that was last read."""
        self._holder: Holder | None = None
        self._heard = -np.inf
        self._command: Drive | None = None
        self.has_control = False
        """Set by the session: the person has taken over from the policy."""

    @property
    def holder(self) -> Holder | None:
        """None: the controls are free."""
        with self._lock:
            return self._holder

    @property
    def command(self) -> Drive | None:
        """The newest one of the holder."""
        with self._lock:
            return self._command

    @property
    def is_alive(self) -> bool:
        """Whether somebody has the controls whose page is heard of."""
        with self._lock:
            return self._holder is not None and self._clock() - self._heard <= DEAD_MAN_SECONDS

    def read(self) -> Controls:
        """Everything of the same moment: another thread may change any of it between two reads."""
        with self._lock:
            self._has_changed = False
            silence = self._clock() - self._heard if self._holder else np.inf
            return Controls(holder=self._holder, command=self._command, silence=silence)

    def claim(self, client: int, who: str) -> Holder:
        """Give the controls to `client` if they are free or its own. Returns who has them now."""
        with self._lock:
            expired = self._clock() - self._heard > LEASE_SECONDS
            if self._holder is None or self._holder.client == client or expired:
                self._holder, self._command, self._heard = Holder(client, who), None, self._clock()
            return self._holder

    def release(self, client: int) -> bool:
        """Whether `client` had the controls; nobody has them afterwards."""
        with self._lock:
            if self._holder is None or self._holder.client != client:
                return False
            self._holder, self._command = None, None
            return True

    def is_held_by(self, client: int) -> bool:
        with self._lock:
            return self._holder is not None and self._holder.client == client

    def drive(self, client: int, command: Drive) -> bool:
        """Take a command of the pilot; False if `client` is not, or if a later command came before this one."""
        with self._lock:
            if self._holder is None or self._holder.client != client:
                return False
            if self._command is not None and command.seq <= self._command.seq:
                return False
            if not same_motion(self._command, command):
                self._has_changed = True
                self._changed.notify_all()
            self._command, self._heard = command, self._clock()
            return True

    def is_changed_within(self, seconds: float) -> bool:
        """Wait until a command asks for another motion than the one before, so long at most. True once per change."""
        with self._lock:
            found = self._changed.wait_for(lambda: self._has_changed, seconds)
            self._has_changed = False
            return found


def same_motion(before: Drive | None, now: Drive) -> bool:
    return before is not None and (before.axes, before.gripper, before.speed) == (now.axes, now.gripper, now.speed)
