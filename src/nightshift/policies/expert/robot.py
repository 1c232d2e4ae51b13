"""Constants of the robot: its controller, its gripper, and the collision boxes of its hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nightshift.types import GRIPPER_CLOSED, GRIPPER_OPEN, Boxes

Vector = NDArray[np.float64]

POSITION_SCALE = 0.05  # metres the controller aims ahead at action 1
ROTATION_SCALE = 0.5  # radians
POSITION_GAIN = 1.8
ROTATION_GAIN = 1.5

MAX_OPENING = 0.08  # metres between the open fingers
FULLY_OPEN = 0.072  # an opening beyond this counts as open
GRASP_MARGIN = 0.01  # the open fingers must exceed an object's width by this
FINGER_LENGTH = 0.04  # from the finger tips to the palm: how far the fingers may reach down past an object's top
FINGER_THICKNESS = 0.012  # half, along the palm, measured from between the finger tips
FINGER_RADIUS = 0.03  # metres a finger moves per radian that the hand turns
TIP_BELOW_GRIP = 0.01  # the finger tips reach this far below the grip point
PALM_ABOVE_GRIP = FINGER_LENGTH - TIP_BELOW_GRIP
PAD_HALF_WIDTH, PAD_HALF_HEIGHT = 0.007, 0.006  # what of a finger's pad should touch
OPEN, CLOSE = GRIPPER_OPEN, GRIPPER_CLOSED

SHOULDER_ABOVE_FOOT = 0.333  # metres
WRIST_ABOVE_GRIP, WRIST_BEHIND_GRIP = 0.204, 0.088  # of a hand that points down; behind: nearer to the foot
FOREARM_RADIUS = 0.07  # metres, at the wrist
EASY_ARM = 0.64  # metres from the shoulder to the wrist up to which the arm moves well
LONGEST_ARM = 0.68  # at 0.719 the elbow is straight; near that the arm gets stuck

FINGERS_HOME = np.pi / 2  # yaw of the finger axis in the start pose of the arm
WRIST_HOME = np.pi / 4  # radians of the last joint with the finger axis across the way from the foot to the hand
PER_RADIAN_OVER = 10.0  # radians of turning the hand per radian that the wrist would turn beyond easy
WRIST_EASY = 2.4  # radians of it up to which the hand can still turn; the joint ends at 2.9

# Boxes of the open hand about the grip point: centre, half size. Axes: along the finger axis, across it, up.
_HAND = np.array(
    [
        [[-0.051, 0.0, 0.01], [0.01, 0.011, 0.02]],
        [[0.051, 0.0, 0.01], [0.01, 0.011, 0.02]],
        [[0.0, 0.0, 0.075], [0.102, 0.032, 0.042]],
        [[0.0, 0.0, 0.16], [0.05, 0.05, 0.045]],
        [[0.0, 0.0, 0.01], [0.041, 0.011, 0.02]],
    ]
)
FINGERS, PALM, SOLID, GRIP, PARTS = slice(0, 2), slice(2, 3), slice(0, 4), slice(4, 5), 5
"""Of the boxes of one hand: fingers, palm, wrist, and last the air between the fingers."""
CLOSED = slice(2, 5)
"""Closed fingers are where the air was."""


def strain(foot: Vector | None, grips: Vector) -> Vector:
    """How far beyond easy the arm stretches to put the hand, pointing down, at `grips` [C, 3]: [C] metres."""
    if foot is None:
        return np.zeros(len(grips))
    level, height = _wrist(foot, grips)
    return np.asarray(np.maximum(np.hypot(level, height) - EASY_ARM, 0.0))


def tilted_strain(foot: Vector | None, grips: Vector, approaches: Vector) -> Vector:
    """As `strain`, for hands that point along `approaches` [C, 3]; the wrist's offset is the way that helps most."""
    if foot is None:
        return np.zeros(len(grips))
    from_shoulder = grips - foot - np.array([0.0, 0.0, SHOULDER_ABOVE_FOOT]) - WRIST_ABOVE_GRIP * approaches
    along = (from_shoulder * approaches).sum(axis=1)
    beside = np.linalg.norm(from_shoulder - along[:, None] * approaches, axis=1) - WRIST_BEHIND_GRIP
    return np.asarray(np.maximum(np.hypot(along, beside) - EASY_ARM, 0.0))


def wrist_strain(foot: Vector | None, grips: Vector, rotations: Vector) -> Vector:
    """How far beyond easy the last joint turns to put hands at `grips` [C, 3] with `rotations` [C, 3, 3]: [C] radians.

    Estimated as if the hand were swung to point down from there.
    """
    if foot is None:
        return np.zeros(len(grips))
    along, approach = rotations[:, :, 0], rotations[:, :, 2]
    swung = along + approach * (along[:, 2] / np.maximum(1.0 - approach[:, 2], 1e-9))[:, None]
    yaw = np.arctan2(swung[:, 1], swung[:, 0]) - np.arctan2(grips[:, 1] - foot[1], grips[:, 0] - foot[0])
    turned = (WRIST_HOME + np.pi / 2 - yaw + np.pi) % (2 * np.pi) - np.pi
    return np.asarray(np.maximum(np.abs(turned) - WRIST_EASY, 0.0))


def within_reach(foot: Vector | None, grip: Vector) -> Vector:
    """`grip`, or the point [3] at its height and in its direction that the arm still reaches."""
    if foot is None:
        return grip
    level, height = _wrist(foot, grip)
    allowed = float(np.sqrt(max(LONGEST_ARM**2 - float(height) ** 2, 0.0)))
    if level <= allowed:
        return grip
    shorter = (allowed + WRIST_BEHIND_GRIP) / (float(level) + WRIST_BEHIND_GRIP)
    return np.append(foot[:2] + (grip - foot)[:2] * shorter, grip[2])


def _wrist(foot: Vector, grips: Vector) -> tuple[Vector, Vector]:
    """How far from the shoulder the wrist is, along the ground and upwards, with the hand pointing down at `grips`."""
    offset = grips - foot
    level = np.linalg.norm(offset[..., :2], axis=-1) - WRIST_BEHIND_GRIP
    return np.asarray(level), np.asarray(offset[..., 2] + WRIST_ABOVE_GRIP - SHOULDER_ABOVE_FOOT)


def hand_boxes(grips: Vector, yaws: Vector) -> Boxes:
    """Open hands that point down, at `grips` [C, 3]: PARTS C boxes."""
    cosine, sine, zero = np.cos(yaws), np.sin(yaws), np.zeros_like(yaws)
    columns = [[cosine, sine, zero], [-sine, cosine, zero], [zero, zero, zero + 1.0]]
    return _hands(grips, np.array(columns).transpose(2, 1, 0))


def turned_hand_boxes(grips: Vector, rotations: Vector) -> Boxes:
    """Open hands at `grips` [C, 3] with `rotations` [C, 3, 3]: PARTS C boxes."""
    return _hands(grips, rotations * np.array([1.0, -1.0, -1.0]))


def _hands(grips: Vector, axes: Vector) -> Boxes:
    centres = grips[:, None] + np.einsum("cij,pj->cpi", axes, _HAND[:, 0])
    return Boxes(
        centres=centres.reshape(-1, 3),
        axes=np.repeat(axes, PARTS, axis=0),
        half_sizes=np.tile(_HAND[:, 1], (len(grips), 1)),
    )
