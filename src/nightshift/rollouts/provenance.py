"""Where an episode that was played here came from."""

from __future__ import annotations

from collections.abc import Iterable

from nightshift import envs
from nightshift.types import Provenance, RolloutRequest, Task


def provenance(request: RolloutRequest, tasks: Iterable[Task], commit: str) -> Provenance:
    (task,) = (task for task in tasks if task.name == request.task)
    told = [one.instruction for one in request.perturbations if one.instruction]
    return Provenance(
        source="expert" if request.controller == "expert" else "policy",
        suite=task.suite,
        task=task.name,
        language=told[-1] if told else task.language,
        split=request.split,
        init_state=request.init_state,
        seed=request.seed,
        versions=envs.versions(task.suite),
        commit=commit,
        disturbance=request.disturbance,
        origin=", ".join(f"{one.name} {one.strength}" for one in request.perturbations),
    )
