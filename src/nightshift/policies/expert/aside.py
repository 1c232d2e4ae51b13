"""Before a drawer is opened: what is to go into it and stands where it will be is first slid out of its way.

Below an open drawer the hand does not reach an object from above.
"""

from __future__ import annotations

import numpy as np

from nightshift.policies.expert import joints
from nightshift.policies.expert.geometry import Vector, extent, overlap, shape_of, shifted
from nightshift.policies.expert.grasp import choose, neighbours
from nightshift.policies.expert.hold import without
from nightshift.policies.expert.place import ANY_HEIGHT, RELEASE_XY, SPOT_DEPTH, WAY_MARGIN, Z
from nightshift.types import Boxes, Joint, Scene

DIRECTIONS = 16
DISTANCES = np.arange(0.02, 0.21, 0.02)  # metres
HAND_ROOM = 0.02  # metres beside an object that the hand needs free above it


def is_needed(scene: Scene, name: str, joint: Joint) -> bool:
    """Whether an object that can be grasped stands below where the drawer will be, and there is a better place."""
    if joint.kind != "slide" or not _is_under(scene, name, joint):
        return False
    way = way_aside(scene, name, joint)
    return bool(np.linalg.norm(way) > RELEASE_XY) and choose(scene, name, way) is not None


def way_aside(scene: Scene, name: str, joint: Joint) -> Vector:
    """The shortest horizontal way [3] to where the object stands free of the open drawer and hits the least there."""
    item = shape_of(scene.bodies[name])
    angles = np.arange(DIRECTIONS) * 2 * np.pi / DIRECTIONS
    rays = np.stack([np.cos(angles), np.sin(angles), np.zeros(DIRECTIONS)], axis=1)
    ways = np.concatenate([np.zeros((1, 3)), (DISTANCES[:, None, None] * rays).reshape(-1, 3)])
    deep = _deepest(item, ways, _column(_opened(joint)), HAND_ROOM)
    others = _others(scene, name, joint)
    for share in (0.5, 1.0):
        deep = np.maximum(deep, _deepest(item, share * ways, others, WAY_MARGIN))
    costs = np.maximum(deep, 0.0) / SPOT_DEPTH + np.linalg.norm(ways, axis=1)
    return np.asarray(ways[int(np.argmin(costs))])


def _is_under(scene: Scene, name: str, joint: Joint) -> bool:
    item, opened = shape_of(scene.bodies[name]), _opened(joint)
    is_lower = extent(item, Z)[0] < extent(opened, Z)[1]
    return is_lower and float(_deepest(item, np.zeros((1, 3)), _column(opened), 0.0)[0]) > 0.0


def _opened(joint: Joint) -> Boxes:
    end = joint.limits[1] if joints.way_to(joint, "open") > 0 else joint.limits[0]
    return shifted(joint.link, (end - joint.position) * joint.axis)


def _column(shape: Boxes) -> Boxes:
    """The box around a shape, of any height."""
    low, high = np.array([extent(shape, axis) for axis in np.eye(3)]).T
    half = np.append((high - low)[:2] / 2, ANY_HEIGHT)
    return Boxes(centres=(low + high)[None] / 2, axes=np.eye(3)[None], half_sizes=half[None])


def _others(scene: Scene, name: str, joint: Joint) -> Boxes:
    return without(neighbours(scene, name), joint.link)


def _deepest(item: Boxes, ways: Vector, around: Boxes, margin: float) -> Vector:
    """How deep the box around an item, wider by `margin`, is in something after each of `ways` [C, 3]."""
    low, high = np.array([extent(item, axis) for axis in np.eye(3)]).T
    half = (high - low) / 2 + np.array([margin, margin, 0.0])
    moved = Boxes(
        centres=(low + high) / 2 + ways,
        axes=np.tile(np.eye(3), (len(ways), 1, 1)),
        half_sizes=np.tile(half, (len(ways), 1)),
    )
    return np.asarray(overlap(moved, around).max(axis=1, initial=-np.inf))
