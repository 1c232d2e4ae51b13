"""Drag a low, wide thing over the table: closed fingers press on its inside and take it along by its rim."""

from __future__ import annotations

import numpy as np

from nightshift.policies.expert.geometry import Vector, overlap, within
from nightshift.policies.expert.grasp import CLEARANCE, HAND_REACH, PER_METRE_HIT, YAWS, neighbours
from nightshift.policies.expert.motion import funnel, move_to, turn_to, up
from nightshift.policies.expert.place import surface_of
from nightshift.policies.expert.robot import CLOSE, CLOSED, PARTS, POSITION_SCALE, TIP_BELOW_GRIP, hand_boxes
from nightshift.types import Array, Scene

PRESS = 0.011  # metres that the hand aims below the surface
TOUCHING = 0.012  # metres above the surface at which the finger tips count as on it
MIDDLE = 0.09  # metres from the middle beyond which the hand rises and goes there anew
SPEED = 1.0  # of the fastest


def drag(scene: Scene, name: str, to: Vector, clear: float) -> Array:
    """Towards `to` [3], coming from the height `clear` of the finger tips."""
    item = scene.bodies[name]
    surface = surface_of(item) + TIP_BELOW_GRIP
    middle = np.append(item.position[:2], surface)
    yaw = _free_yaw(scene, name, middle)
    offset = middle - scene.gripper_position
    if np.linalg.norm(offset[:2]) < MIDDLE and -offset[2] < TOUCHING:
        way = (to - item.position)[:2]
        step = way / max(float(np.linalg.norm(way)) / (POSITION_SCALE * SPEED), 1.0)
        return move_to(scene, np.append(scene.gripper_position[:2] + step, surface - PRESS), yaw, CLOSE)
    kept = funnel(offset, clear + TIP_BELOW_GRIP - surface, turn=turn_to(scene, yaw))
    return move_to(scene, middle + up(kept), yaw, CLOSE)


def _free_yaw(scene: Scene, name: str, point: Vector) -> float:
    """The finger axis at which the hand collides least with the neighbours, and then the nearest one."""
    yaws = np.arange(YAWS) * np.pi / YAWS
    hands = hand_boxes(np.tile(point, (YAWS, 1)), yaws)
    others = within(neighbours(scene, name), point, 2 * HAND_REACH)
    deep = overlap(hands, others).max(axis=1, initial=-np.inf).reshape(YAWS, PARTS)[:, CLOSED].max(axis=1)
    turns = np.array([abs(turn_to(scene, float(yaw))) for yaw in yaws])
    return float(yaws[int(np.argmin(PER_METRE_HIT * np.maximum(deep + CLEARANCE, 0.0) + turns))])
