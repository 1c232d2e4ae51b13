"""A page with nothing but the questions that a run asks the person beside the robot."""

from __future__ import annotations

import time
from typing import Any

from nightshift.access import Access
from nightshift.envs.robot.people import FolderPerson
from nightshift.teleop import messages
from nightshift.teleop.hub import Hub
from nightshift.teleop.pilot import Pilot
from nightshift.teleop.server import Server, Station, listen


class Board:
    """Moves nothing: what is run moves the robot."""

    axes = 0

    def __init__(self, pilot: Pilot) -> None:
        self._pilot = pilot

    def welcome(self) -> dict[str, Any]:
        return {
            "type": "welcome",
            "mode": "ask",
            "suite": "robot",
            "tasks": [],
            "views": [],
            "control_hz": 1,
            "axes": self.axes,
            "policy": "",
            "lost": "",
        }

    def episodes(self) -> dict[str, Any]:
        return {"type": "episodes", "episodes": []}

    def state(self) -> dict[str, Any]:
        holder = self._pilot.holder
        return {"type": "state", "phase": "waiting", "step": 0, "task": "", "pilot": holder.who if holder else ""}

    def submit(self, client: int, order: messages.Order) -> None:
        """There is nothing to order."""


def open_board(access: Access, address: tuple[str, int]) -> Server:
    """It listens, and serves when it is told to; ConfigError if it cannot listen."""
    pilot = Pilot(time.monotonic)
    station = Station(watched=Board(pilot), pilot=pilot, hub=Hub(), access=access, person=FolderPerson())
    return Server(station, listen(*address))
