"""What a stage is given besides its params: a folder for checkpoints, a tracker, simulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift import config
from nightshift.adapters.tracking import Tracker

if TYPE_CHECKING:
    from nightshift.rollouts.base import Pool


@dataclass(frozen=True, kw_only=True)
class Job:
    """Nothing in here may change what a stage computes; that is what the params are for."""

    stage: str
    fingerprint: str
    """Of the stage's params, versions, inputs and code; checkpoints of another fingerprint are not resumed."""
    state: Path
    """`.state/<stage>/<fingerprint>`: checkpoints in progress."""
    tracker: Tracker
    pool: Callable[[config.Env], Pool]
    """Simulators for these tasks; shared by the stages of one process."""
    machine: config.Machine
    """How to run: ranks, microbatches, checkpoint periods."""
    commit: str
    """The code commit, for provenance; ends in "+" when the tree has uncommitted changes."""
    forced: bool = False
    """By --force-stage: what was played before does not count."""
