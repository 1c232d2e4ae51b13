"""Drawers, doors and knobs: bring a joint to where a predicate holds, by pushing or by grasping what it moves."""

from __future__ import annotations

import numpy as np

from nightshift.policies.expert import hold, shove
from nightshift.policies.expert.geometry import Vector, turn_about
from nightshift.policies.expert.motion import move_hand
from nightshift.policies.expert.robot import CLOSE, POSITION_SCALE
from nightshift.types import Array, Joint, Scene

MAX_TURN = 0.4  # radians that the hand aims ahead while it turns something


def is_at(joint: Joint, predicate: str) -> bool:
    low, high = joint.holds[predicate]
    return low < joint.position < high


def is_halfway(joint: Joint, predicate: str) -> bool:
    """Whether the joint is nearer to that end of its range where `predicate` holds."""
    low, high = joint.holds[predicate]
    middle = sum(joint.limits) / 2
    return (joint.position > middle) == (max(low, joint.limits[0]) + min(high, joint.limits[1]) > 2 * middle)


def bring_to(scene: Scene, joint: Joint, predicate: str) -> Array:
    """Move the joint towards where `predicate` holds: pushed where a face is free to push at, else held and moved."""
    sign = way_to(joint, predicate)
    if hold.is_held(scene, joint):
        return _move_with(scene, joint, sign)
    contact = shove.choose(scene, joint, sign)
    if contact is not None:
        return shove.push(scene, joint, contact)
    grip = hold.choose(scene, joint)
    if grip is None:
        raise ValueError("the expert cannot move this joint: there is no face to push and nothing narrow to hold")
    return hold.take(scene, grip)


def way_to(joint: Joint, predicate: str) -> float:
    """1 or -1: the way from the joint's position to the middle of where `predicate` holds."""
    low, high = joint.holds[predicate]
    middle = (max(low, joint.limits[0]) + min(high, joint.limits[1])) / 2
    return 1.0 if middle > joint.position else -1.0


def _move_with(scene: Scene, joint: Joint, sign: float) -> Array:
    """The hand moves as the link does, and stays where it holds it: a hand that drifts slips off."""
    point, rotation = hold.present(scene, joint)
    if joint.kind == "slide":
        return move_hand(scene, point + sign * POSITION_SCALE * joint.axis, rotation, CLOSE)
    turn = turn_about(joint.axis, sign * min(MAX_TURN, POSITION_SCALE / (lever(joint, point) + 1e-9)))
    return move_hand(scene, joint.anchor + turn @ (point - joint.anchor), turn @ rotation, CLOSE)


def lever(joint: Joint, point: Vector) -> float:
    """The distance of a point from the line that a hinge turns about."""
    return float(np.linalg.norm(np.cross(joint.axis, point - joint.anchor)))
