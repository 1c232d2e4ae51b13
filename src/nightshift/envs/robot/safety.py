"""Limits of a robot. The client keeps them before it sends, and the server refuses what does not keep them."""

from __future__ import annotations

import numpy as np

from nightshift.envs.robot.messages import Limits, RobotState
from nightshift.envs.robot.poses import Vector, angle_between, turned_at_most

TOLERANCE = 1e-6
"""Of a target at a limit: the client computes it in floating point."""
_UNIT = 1e-3
"""How far the length of a quaternion may be from 1."""


def within(target: Vector, pose: Vector, home: Vector, limits: Limits, hz: float) -> Vector:
    """The target nearest to `target` that keeps the limits; `home` is the orientation after the reset.

    HIL-SERL clips to its safety box, too: a policy that pushes against the border slides along it.
    """
    step = target[:3] - pose[:3]
    reach = limits.linear_speed / hz
    length = float(np.linalg.norm(step))
    near = target[:3] if length <= reach else pose[:3] + step * (reach / length)
    position = np.clip(near, limits.box_low, limits.box_high)
    turned = turned_at_most(pose[3:], target[3:], limits.angular_speed / hz)
    return np.concatenate([position, turned_at_most(home, turned, limits.max_turn)])


def target_problem(target: Vector, pose: Vector, home: Vector, limits: Limits, hz: float) -> str:
    """Why a target may not be executed, in words; empty if it may."""
    if abs(np.linalg.norm(target[3:]) - 1) > _UNIT:
        return "the quaternion of the target is not of length 1"
    low, high = np.array(limits.box_low) - TOLERANCE, np.array(limits.box_high) + TOLERANCE
    if (target[:3] < low).any() or (target[:3] > high).any():
        return f"the target {_shown(target[:3])} is outside the box {list(limits.box_low)} to {list(limits.box_high)}"
    start = np.clip(pose[:3], limits.box_low, limits.box_high)  # the way back into the box is free, and no more
    speed = float(np.linalg.norm(target[:3] - start)) * hz
    if not speed <= limits.linear_speed + TOLERANCE * hz:  # nor may it be NaN
        return f"the target asks for {speed:.3f} m/s, and {limits.linear_speed:g} is the limit"
    turning = angle_between(target[3:], pose[3:]) * hz
    if not turning <= limits.angular_speed + TOLERANCE * hz:
        return f"the target asks for {turning:.3f} rad/s, and {limits.angular_speed:g} is the limit"
    turn = angle_between(target[3:], home)
    if not turn <= limits.max_turn + TOLERANCE:
        return f"the target is turned by {turn:.3f} rad from the reset, and {limits.max_turn:g} is the limit"
    return ""


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
