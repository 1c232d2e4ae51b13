"""Push what a joint moves, with closed fingers that point down: a drawer or a door that is to be closed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nightshift.policies.expert.geometry import Vector, angles, extent, overlap, within
from nightshift.policies.expert.grasp import CLEARANCE, HAND_REACH, all_boxes
from nightshift.policies.expert.motion import funnel, move_hand, up
from nightshift.policies.expert.robot import (
    CLOSE,
    CLOSED,
    PARTS,
    POSITION_SCALE,
    TIP_BELOW_GRIP,
    strain,
    turned_hand_boxes,
)
from nightshift.types import Array, Joint, Scene

FACING = 0.8  # cosine between the way and a face's inward normal from which on the face can be pushed
FINGER_HALF = 0.011  # metres from the middle of the closed fingers to their flat side
TILTS = (0.0, 0.6)  # radians that the hand leans back: the palm then stays clear of what is above the face
BEHIND = 0.03  # metres behind the face where the fingers go down
LEAST_LEVER = 0.03  # metres from a hinge below which a finger slips off instead of turning it
DEPTH = 0.02  # metres below the link's top that the grip point goes at least
BLOCKED = 0.004  # metres inside something beyond which the hand cannot be there
HOVER = 0.06
LATERAL, LOW = 0.025, 0.02  # off the line of push, and above its height, at which the hand goes behind the face anew
PUSH_SPEED = 0.8
Z = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Contact:
    """Where to push, and how."""

    point: Vector  # [3] on the face
    way: Vector  # [3] a horizontal unit vector
    tilt: float = 0.0  # radians that the hand leans back from pointing down

    @property
    def rotation(self) -> Vector:
        """Of the hand [3, 3], the finger axis across the way."""
        along = np.cross(Z, self.way)
        approach = np.sin(self.tilt) * self.way - np.cos(self.tilt) * Z
        return np.stack([along, np.cross(approach, along), approach], axis=1)


def choose(scene: Scene, joint: Joint, sign: float) -> Contact | None:
    """The free face with the longest lever, with the hand as upright as it goes; None if no face can be pushed."""
    faces = _contacts(joint, sign)
    if not faces:
        return None
    around = within(all_boxes(scene), joint.link.centres.mean(axis=0), 3 * HAND_REACH)
    for tilt in TILTS:
        contacts = [replace(face, tilt=tilt) for face in faces]
        points = np.array([one.point - one.way * (FINGER_HALF + CLEARANCE) for one in contacts])
        hands = turned_hand_boxes(points, np.array([one.rotation for one in contacts]))
        deep = overlap(hands, around).max(axis=1, initial=-np.inf).reshape(-1, PARTS)[:, CLOSED].max(axis=1)
        cost = np.array([-_lever(joint, one.point) for one in contacts]) + strain(scene.robot_position, points)
        cost = np.where(deep > BLOCKED, np.inf, cost)
        if np.isfinite(cost).any():
            return contacts[int(np.argmin(cost))]
    return None


def push(scene: Scene, joint: Joint, contact: Contact) -> Array:
    """Down behind the face, then along the way."""
    way, side = contact.way, np.array([-contact.way[1], contact.way[0], 0.0])
    rotation = _nearer_side(scene, contact.rotation)
    offset = scene.gripper_position - contact.point
    along, lateral = float(offset @ way), float(offset @ side)
    if abs(offset[2]) < LOW and along < 0 and abs(lateral) < LATERAL:
        ahead = scene.gripper_position + way * POSITION_SCALE * PUSH_SPEED - side * lateral
        return move_hand(scene, np.append(ahead[:2], contact.point[2]), rotation, CLOSE)
    behind = contact.point - way * (FINGER_HALF + BEHIND)
    clear = extent(joint.link, Z)[1] + HOVER + TIP_BELOW_GRIP - contact.point[2]
    turn = float(angles(rotation, scene.gripper_rotation))
    kept = funnel(behind - scene.gripper_position, clear, turn=turn)
    return move_hand(scene, behind + up(kept), rotation, CLOSE)


def _nearer_side(scene: Scene, rotation: Vector) -> Vector:
    """The fingers may change places: of both rotations, the nearer one."""
    both = np.array([rotation, rotation * np.array([-1.0, -1.0, 1.0])])
    return np.asarray(both[int(np.argmin(angles(both, scene.gripper_rotation)))])


def _contacts(joint: Joint, sign: float) -> list[Contact]:
    """On every face that looks against its way."""
    found = []
    for centre, axes, half in zip(joint.link.centres, joint.link.axes, joint.link.half_sizes, strict=True):
        for axis in range(3):
            for normal in (axes[:, axis], -axes[:, axis]):
                for point in _points(
                    joint, centre + normal * half[axis], np.delete(axes, axis, 1), np.delete(half, axis)
                ):
                    against = float(normal @ _motion(joint, point)) * sign
                    if against < -FACING and (joint.kind == "slide" or _lever(joint, point) > LEAST_LEVER):
                        way = np.append(-normal[:2], 0.0) / np.linalg.norm(normal[:2])
                        found.append(Contact(point=point, way=way))
    return found


def _points(joint: Joint, face: Vector, sides: Vector, halves: Vector) -> list[Vector]:
    """Points of a face: its middle and near its ends, at its middle height and as low as the fingers reach."""
    level = int(np.argmin(np.abs(sides[2])))
    along, reach = sides[:, level], max(float(halves[level]) - FINGER_HALF, 0.0)
    rise = abs(sides[2, 1 - level]) * halves[1 - level]
    top = extent(joint.link, Z)[1]
    heights = [height for height in (face[2], top - DEPTH) if abs(height - face[2]) <= rise + 1e-9]
    return [np.append((face + step * along)[:2], height) for step in {-reach, 0.0, reach} for height in heights]


def _motion(joint: Joint, point: Vector) -> Vector:
    """The horizontal unit vector along which `point` of the link moves as the joint's position grows."""
    way = joint.axis if joint.kind == "slide" else np.cross(joint.axis, point - joint.anchor)
    flat = np.append(way[:2], 0.0)
    return np.asarray(flat / (np.linalg.norm(flat) + 1e-9))


def _lever(joint: Joint, point: Vector) -> float:
    if joint.kind == "slide":
        return 0.0
    return float(np.linalg.norm(np.cross(joint.axis, point - joint.anchor)))
