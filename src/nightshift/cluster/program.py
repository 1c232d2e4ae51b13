"""What runs on a node of a cluster or on this machine, and where. Importing it does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESS_VARIABLE = "RAY_ADDRESS"
STARTED_BY = "NIGHTSHIFT_STARTED_BY"
"""Environment variable of a process that was started as a Program: its parent, without which it ends too."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a process runs, and where."""

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    """All variables that it gets; none of the worker's, which are of its Ray."""
    log: Path
    """For its standard output and errors."""


def temporary_folder() -> Path:
    """Where a cluster on this machine keeps logs, sockets and spilled objects."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"))
