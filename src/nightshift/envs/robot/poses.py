"""Poses of the hand (x, y, z and a quaternion x, y, z, w), and the targets that normalised actions stand for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Scale(NamedTuple):
    """What an action of 1 stands for in one control period, along or about one axis."""

    position: float
    """Metres."""
    rotation: float
    """Radians."""


def target_of(pose: Vector, action: Vector, scale: Scale) -> Vector:
    """The target [7] of an action (Δposition 3, Δrotation 3 as axis-angle in world axes), from the measured pose."""
    turn = quaternion_of(action[3:6] * scale.rotation)
    return np.concatenate([pose[:3] + action[:3] * scale.position, multiply(turn, pose[3:])])


def action_of(pose: Vector, target: Vector, scale: Scale) -> Vector:
    """The six numbers of the action whose target this is."""
    turn = axis_angle_of(multiply(target[3:], conjugate(pose[3:])))
    return np.concatenate([(target[:3] - pose[:3]) / scale.position, turn / scale.rotation])


def angle_between(first: Vector, second: Vector) -> float:
    """Between two orientations, 0 to pi."""
    return float(np.linalg.norm(axis_angle_of(multiply(first, conjugate(second)))))


def turned_at_most(start: Vector, end: Vector, angle: float) -> Vector:
    """`end`, or the orientation on the way to it that is `angle` away from `start`."""
    turn = axis_angle_of(multiply(end, conjugate(start)))
    size = float(np.linalg.norm(turn))
    return end if size <= angle else multiply(quaternion_of(turn * (angle / size)), start)


def quaternion_of(axis_angle: Vector) -> Vector:
    angle = float(np.linalg.norm(axis_angle))
    if angle == 0.0:
        return np.array([0.0, 0.0, 0.0, 1.0])
    return np.append(axis_angle / angle * np.sin(angle / 2), np.cos(angle / 2))


def axis_angle_of(quaternion: Vector) -> Vector:
    """The shorter way: an angle from 0 to pi."""
    signed = quaternion if quaternion[3] >= 0 else -quaternion
    sine = float(np.linalg.norm(signed[:3]))
    if sine == 0.0:
        return np.zeros(3)
    return np.asarray(signed[:3] / sine * (2 * np.arctan2(sine, signed[3])))


def quaternion_of_matrix(rotation: NDArray[np.float64]) -> Vector:
    """Of a rotation matrix [3, 3], with w >= 0."""
    r = rotation
    squares = np.array([1 + r[0, 0] - r[1, 1] - r[2, 2], 1 - r[0, 0] + r[1, 1] - r[2, 2]])
    squares = np.append(squares, [1 - r[0, 0] - r[1, 1] + r[2, 2], 1 + r[0, 0] + r[1, 1] + r[2, 2]])
    table = np.array(
        [
            [squares[0], r[0, 1] + r[1, 0], r[0, 2] + r[2, 0], r[2, 1] - r[1, 2]],
            [r[0, 1] + r[1, 0], squares[1], r[1, 2] + r[2, 1], r[0, 2] - r[2, 0]],
            [r[0, 2] + r[2, 0], r[1, 2] + r[2, 1], squares[2], r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], squares[3]],
        ]
    )
    row = table[int(np.argmax(squares))]  # the largest, so that nothing is divided by almost zero
    unit = row / np.linalg.norm(row)
    return np.asarray(unit if unit[3] >= 0 else -unit)


def multiply(left: Vector, right: Vector) -> Vector:
    """First `right`, then `left`."""
    vector = left[3] * right[:3] + right[3] * left[:3] + np.cross(left[:3], right[:3])
    return np.append(vector, left[3] * right[3] - left[:3] @ right[:3])


def conjugate(quaternion: Vector) -> Vector:
    return np.asarray(quaternion * np.array([-1.0, -1.0, -1.0, 1.0]))
