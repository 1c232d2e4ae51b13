"""Choosing where the learner runs. A machine without Ray learns in the stage's own process."""

from __future__ import annotations

from nightshift.learners.base import Learners, LearnerSpec
from nightshift.learners.local import LocalLearner
from nightshift.project import packages


def open_learners(spec: LearnerSpec, ranks: int) -> Learners:
    if ranks == 1:
        return LocalLearner(spec)
    packages.require("ray", f"machine.ranks is {ranks}", "set machine.ranks: 1 in params.yaml")
    from nightshift.learners.ranks import RayLearners

    return RayLearners(spec, ranks)
