"""Take the champion from the registry as the start of training; skipped where `start` is scratch."""

from __future__ import annotations

from nightshift import config
from nightshift.pipeline.job import Job
from nightshift.policies.start import no_champion
from nightshift.project import paths
from nightshift.stages import _champion


def run(job: Job, *, start: config.Start, register_model: str) -> None:
    champion = _champion.find(register_model)
    if champion is None:
        raise no_champion(register_model)
    _champion.leave(paths.START, champion)
