"""Choosing where the learner runs. A machine without Ray learns in the stage's own process."""

from __future__ import annotations

from nightshift.learners.base import Learners, LearnerSpec, Work_contra
from nightshift.learners.local import LocalLearner
from nightshift.project import packages


def open_learners(spec: LearnerSpec[Work_contra], ranks: int) -> Learners[Work_contra]:
    if ranks == 1 and spec.strategy != "fsdp":
        return LocalLearner(spec)
    packages.require(
        "ray",
        f"machine.ranks is {ranks} and machine.strategy {spec.strategy}",
        "set machine.ranks: 1 and machine.strategy: data_parallel in params.yaml",
    )
    from nightshift.learners.ranks import RayLearners

    return RayLearners(spec, ranks)
