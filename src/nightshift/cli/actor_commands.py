"""The command `nightshift actor`: play on this machine for a learner on another one."""

from __future__ import annotations

import re
import socket

from nightshift import config
from nightshift.cli.commands import enter
from nightshift.errors import ConfigError
from nightshift.project import paths
from nightshift.telemetry.console import console


def join(learner: str, name: str) -> None:
    """Take part until learning is over; episodes that are not sent yet stay in the spool."""
    if not config.is_address(learner):
        raise ConfigError(f"{learner!r} is not the address of a learner", "give HOST:PORT, e.g. gpu-box:7777")
    root = enter()
    chosen = name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
    machine = config.load(root / paths.PARAMS).machine
    from nightshift.stages._actor import join_learner  # loads torch

    console.print(f"playing as {chosen} for the learner at {learner}")
    join_learner(config.host_and_port(learner), chosen, root / paths.ACTOR_SPOOLS, machine)
    console.print("learning is over")
