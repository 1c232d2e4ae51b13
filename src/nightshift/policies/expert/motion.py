"""From an aim to an action: proportional moves of a hand that points down."""

from __future__ import annotations

import numpy as np

from nightshift.policies.expert.geometry import Vector, rotation_vector
from nightshift.policies.expert.robot import (
    FINGER_RADIUS,
    POSITION_GAIN,
    POSITION_SCALE,
    ROTATION_GAIN,
    ROTATION_SCALE,
    within_reach,
)
from nightshift.types import Array, Scene

FUNNEL = 3.0  # metres of height kept per metre of horizontal error
ALIGNED = 0.008  # horizontal error below which the gripper goes all the way down


def move_to(scene: Scene, aim: Vector, yaw: float | None, gripper: float) -> Array:
    """An action [7] towards `aim`, the finger axis along `yaw` (None: as it is)."""
    aim = within_reach(scene.robot_position, aim)
    move = np.clip(POSITION_GAIN * (aim - scene.gripper_position) / POSITION_SCALE, -1.0, 1.0)
    turn = ROTATION_GAIN * _level_and_turn(scene, yaw) / ROTATION_SCALE
    return np.concatenate([move, np.clip(turn, -1.0, 1.0), [gripper]]).astype(np.float32)


def move_hand(scene: Scene, aim: Vector, rotation: Vector, gripper: float) -> Array:
    """An action [7] towards a pose of the hand in any orientation [3, 3]."""
    move = POSITION_GAIN * (aim - scene.gripper_position) / POSITION_SCALE
    turn = ROTATION_GAIN * rotation_vector(rotation @ scene.gripper_rotation.T) / ROTATION_SCALE
    return np.concatenate([np.clip(move, -1.0, 1.0), np.clip(turn, -1.0, 1.0), [gripper]]).astype(np.float32)


def finger_yaw(scene: Scene) -> float:
    return float(np.arctan2(scene.gripper_rotation[1, 0], scene.gripper_rotation[0, 0]))


def turn_to(scene: Scene, yaw: float) -> float:
    """The angle to turn from the present pose."""
    return turn_between(finger_yaw(scene), yaw)


def turn_between(start: float, yaw: float) -> float:
    """The angle to turn. The finger axis has no front: to `yaw` or its opposite, the nearer one."""
    return float((yaw - start + np.pi / 2) % np.pi - np.pi / 2)


def funnel(offset: Vector, clear: float, turn: float) -> float:
    """Height to keep: none when aligned, more with horizontal distance and angle to turn, at most `clear`."""
    error = float(np.linalg.norm(offset[:2])) + FINGER_RADIUS * abs(turn)
    return float(np.clip(FUNNEL * (error - ALIGNED), 0.0, clear))


def up(height: float) -> Vector:
    return np.array([0.0, 0.0, height])


def _level_and_turn(scene: Scene, yaw: float | None) -> Vector:
    """Rotation vector that points the hand straight down and its finger axis along `yaw`."""
    down = np.cross(scene.gripper_rotation[:, 2], [0.0, 0.0, -1.0])
    return np.array([down[0], down[1], 0.0 if yaw is None else turn_to(scene, yaw)])
