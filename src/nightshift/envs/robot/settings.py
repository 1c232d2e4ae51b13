"""`env.robot` of params.yaml in the types of the protocol."""

from __future__ import annotations

from nightshift import config
from nightshift.envs.robot.messages import Limits
from nightshift.envs.robot.poses import Scale


def limits_in(settings: config.Robot) -> Limits:
    return Limits(**settings.limits.model_dump())


def scale_in(settings: config.Robot) -> Scale:
    return Scale(**settings.scale.model_dump())
