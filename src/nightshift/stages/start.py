"""Take the champion from the registry as the start of training; skipped where `start` is scratch."""

from __future__ import annotations

from nightshift import config
from nightshift.errors import RegistryError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import _champion


def run(job: Job, *, start: config.Start, register: config.Register) -> None:
    champion = _champion.find(register.model)
    if champion is None:
        raise RegistryError(
            f"start in {paths.PARAMS} is {start}, and {register.model} has none here",
            "start: scratch; the first version that passes the gate becomes champion",
        )
    _champion.leave(paths.START, champion)
