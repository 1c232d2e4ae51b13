"""Limits of a robot. The client keeps them before it sends, and the server refuses what does not keep them."""

from __future__ import annotations

import numpy as np

from nightshift.envs.robot.messages import Limits, RobotState
from nightshift.envs.robot.poses import Vector, angle_between, turned_at_most

TOLERANCE = 1e-6
"""Of a target at a limit: the client computes it in floating point."""
_SLACK = TOLERANCE / 2
"""Beyond a limit of speed that the client leaves as it is: rounding moves no target."""
_BACK = 0.01
"""Of the distance to the box, or of the longest step: by so much it shrinks on the way back. No more is asked, because
a client whose box is smaller goes back to that."""
_UNIT = 1e-3
"""How far the length of a quaternion may be from 1."""


def within(target: Vector, pose: Vector, home: Vector, limits: Limits, hz: float) -> Vector:
    """The target nearest to `target` that keeps the limits; `home` is the orientation after the reset.

    HIL-SERL clips to its safety box, too: a policy that pushes against the border slides along it. A hand that is
    outside the box, or turned too far, comes back no faster than its limits of speed.
    """
    reach, turn = limits.linear_speed / hz, limits.angular_speed / hz
    inside = np.clip(_moved_at_most(pose[:3], target[:3], reach), limits.box_low, limits.box_high)
    upright = turned_at_most(home, turned_at_most(pose[3:], target[3:], turn + _SLACK), limits.max_turn)
    return np.concatenate([_moved_at_most(pose[:3], inside, reach), turned_at_most(pose[3:], upright, turn + _SLACK)])


def target_problem(target: Vector, pose: Vector, home: Vector, limits: Limits, hz: float) -> str:
    """Why a target may not be executed, in words; empty if it may. The way back inside the limits is free."""
    if abs(np.linalg.norm(target[3:]) - 1) > _UNIT:
        return "the quaternion of the target is not of length 1"
    if not _is_inside_or_on_the_way_back(target, pose, limits, limits.linear_speed / hz):
        return f"the target {_shown(target[:3])} is outside the box {list(limits.box_low)} to {list(limits.box_high)}"
    speed = float(np.linalg.norm(target[:3] - pose[:3])) * hz
    if not speed <= limits.linear_speed + TOLERANCE * hz:  # nor may it be NaN
        return f"the target asks for {speed:.3f} m/s, and {limits.linear_speed:g} is the limit"
    turning = angle_between(target[3:], pose[3:]) * hz
    if not turning <= limits.angular_speed + TOLERANCE * hz:
        return f"the target asks for {turning:.3f} rad/s, and {limits.angular_speed:g} is the limit"
    turn = angle_between(target[3:], home)
    if not (turn <= limits.max_turn + TOLERANCE or turn < angle_between(pose[3:], home)):
        return f"the target is turned by {turn:.3f} rad from the reset, and {limits.max_turn:g} is the limit"
    return ""


def _moved_at_most(start: Vector, goal: Vector, reach: float) -> Vector:
    step = goal - start
    length = float(np.linalg.norm(step))
    return goal if length <= reach + _SLACK else start + step * (reach / length)


def _is_inside_or_on_the_way_back(target: Vector, pose: Vector, limits: Limits, reach: float) -> bool:
    """On the way back no axis goes further out, and the distance shrinks: a hand outside does not travel there."""
    after, before = _outside(target, limits), _outside(pose, limits)
    if (after <= TOLERANCE).all():
        return True
    distance = float(np.linalg.norm(before))
    shrinks = bool(np.linalg.norm(after) <= distance - _BACK * min(distance, reach))
    return shrinks and bool((after <= np.maximum(before, TOLERANCE)).all())


def _outside(pose: Vector, limits: Limits) -> Vector:
    """Metres to the box along each axis [3]; 0 inside it."""
    return np.abs(pose[:3] - np.clip(pose[:3], limits.box_low, limits.box_high))


def state_problem(state: RobotState, limits: Limits) -> str:
    """Which limit a measured state exceeds, in words; empty if none."""
    measured = {
        "linear_speed": (np.linalg.norm(state.vel[:3]), "m/s"),
        "angular_speed": (np.linalg.norm(state.vel[3:]), "rad/s"),
        "force": (np.linalg.norm(state.force), "N"),
        "torque": (np.linalg.norm(state.torque), "Nm"),
    }
    for name, (value, unit) in measured.items():
        limit = getattr(limits, name)
        if not value <= limit:  # nor may it be NaN
            return f"{name} is {value:.3f} {unit}, and {limit:g} is the limit"
    return ""


def wider_than(ours: Limits, theirs: Limits) -> list[str]:
    """Names of our limits that allow more than theirs."""
    wider = []
    if any(mine < other for mine, other in zip(ours.box_low, theirs.box_low, strict=True)):
        wider.append("box_low")
    if any(mine > other for mine, other in zip(ours.box_high, theirs.box_high, strict=True)):
        wider.append("box_high")
    names = ("max_turn", "linear_speed", "angular_speed", "force", "torque")
    return wider + [name for name in names if getattr(ours, name) > getattr(theirs, name)]


def _shown(values: Vector) -> list[float]:
    return [round(float(value), 4) for value in values]
