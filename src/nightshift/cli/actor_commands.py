"""The command `nightshift actor`: play on this machine for a learner on another one."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

from nightshift import config, files
from nightshift.cli.commands import enter
from nightshift.errors import ConfigError
from nightshift.project import paths
from nightshift.telemetry.console import console

_LONGEST_HOST = 50
"""An actor's name has at most 64 characters."""


def join(learner: str, name: str) -> None:
    """Take part until learning is over; episodes that are not sent yet stay in the spool."""
    if not config.is_address(learner):
        raise ConfigError(f"{learner!r} is not the address of a learner", "give HOST:PORT, e.g. gpu-box:7777")
    root = enter()
    chosen = name or own_name(root)
    machine = config.load(root / paths.PARAMS).machine
    from nightshift.stages._actor import join_learner  # loads torch

    console.print(f"playing as {chosen} for the learner at {learner}")
    join_learner(config.host_and_port(learner), chosen, root / paths.ACTOR_SPOOLS, machine)
    console.print("learning is over")


def own_name(root: Path) -> str:
    """The name of this machine, which another one may have too, and an id of this folder: the learner takes actors of
    one name for one. The id is kept, since a restarted actor sends what waits in the spool of its name."""
    path = root / paths.ACTOR_ID
    if not path.exists():
        files.write_bytes(path, secrets.token_hex(4).encode())
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:_LONGEST_HOST]
    return f"{host}-{path.read_text()}"
