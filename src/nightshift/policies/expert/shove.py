"""Push what a joint moves, with closed fingers that point down: a drawer or a door that is to be closed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.policies.expert.geometry import NOTHING, Vector, angles, extent, join, overlap, within
from nightshift.policies.expert.grasp import CLEARANCE, HAND_REACH, all_boxes
from nightshift.policies.expert.hold import without
from nightshift.policies.expert.motion import funnel, move_hand, up
from nightshift.policies.expert.robot import (
    CLOSE,
    CLOSED,
    FOREARM_RADIUS,
    PARTS,
    PER_RADIAN_OVER,
    POSITION_SCALE,
    TIP_BELOW_GRIP,
    WRIST_ABOVE_GRIP,
    strain,
    turned_hand_boxes,
    wrist_strain,
)
from nightshift.types import Array, Boxes, Joint, Scene

FACING = 0.8  # cosine between the way and a face's inward normal from which on the face can be pushed
FINGER_HALF = 0.011  # metres from the middle of the closed fingers to their flat side
TILTS = (0.0, 0.6)  # radians that the hand leans back: the palm then stays clear of what is above the face
BEHIND = 0.03  # metres behind the face where the fingers go down
WIDE = 0.1  # metres of a door's face from which on the fingers stay on it while it turns
LEAST_LEVER = 0.03  # metres from a hinge below which a finger slips off instead of turning it
DEPTH = 0.02  # metres below the link's top that the grip point goes at least
BLOCKED = 0.004  # metres inside something beyond which the hand cannot be there
ROUND_OFF = 1e-9
HOVER = 0.06
LATERAL, LOW = 0.025, 0.02  # off the line of push, and above its height, at which the hand goes behind the face anew
TILTED = 0.5  # radians off its rotation at which a hand that pushes goes behind the face anew
PUSH_SPEED = 0.8
OFF_MIDDLE = 0.1  # metres of strain of the arm per metre that a push passes the middle of a drawer
Z = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Contact:
    """Where to push, and how."""

    point: Vector  # [3] on the face
    way: Vector  # [3] a horizontal unit vector
    rotation: Vector  # [3, 3] of the hand, the finger axis across the way


def choose(scene: Scene, joint: Joint, sign: float) -> Contact | None:
    """The free face with the longest lever, with the hand as upright as it goes; None if no face can be pushed."""
    faces, ways, wide = _contacts(joint, sign)
    if not len(faces):
        return None
    around = within(all_boxes(scene), joint.link.centres.mean(axis=0), 3 * HAND_REACH)
    fixed = within(_not_moved(scene, joint), joint.link.centres.mean(axis=0), 3 * HAND_REACH)
    points = faces - ways * (FINGER_HALF + CLEARANCE)
    for tilt in TILTS:
        rotations = hand_rotations(ways, tilt)
        deep = _depth(points, rotations, around)
        if joint.kind == "slide":
            ends = points + ways * _remaining(joint, sign)
            deep = np.maximum(deep, np.maximum(_depth(ends, rotations, fixed), _forearm_depth(ends, rotations, fixed)))
        cost = (
            strain(scene.robot_position, points) - _levers(joint, faces) + OFF_MIDDLE * _off_middle(joint, faces, ways)
        )
        cost = np.where(deep > BLOCKED, np.inf, cost)
        if joint.kind == "hinge" and np.isfinite(cost[wide]).any():
            cost = np.where(wide, cost, np.inf)
        if np.isfinite(cost).any():
            best = int(np.argmin(cost))
            return Contact(point=faces[best], way=ways[best], rotation=rotations[best])
    return None


def _not_moved(scene: Scene, joint: Joint) -> Boxes:
    """What the joint does not take along: neither its link nor the objects in it."""
    low, high = np.array([extent(joint.link, axis) for axis in np.eye(3)]).T
    shapes = []
    for body in scene.bodies.values():
        if body.boxes is None:
            continue
        rest = without(body.boxes, joint.link)
        is_in_it = len(rest.centres) == len(body.boxes.centres) and bool(
            ((low < body.position) & (body.position < high)).all()
        )
        shapes += [] if is_in_it else [rest]
    return join([NOTHING, *shapes])


def _remaining(joint: Joint, sign: float) -> float:
    """How far the joint can still move."""
    return float(joint.limits[1] - joint.position if sign > 0 else joint.position - joint.limits[0])


def _depth(points: Vector, rotations: Vector, around: Boxes) -> Vector:
    """How deep closed hands [C] would be in something."""
    deep = overlap(turned_hand_boxes(points, rotations), around).max(axis=1, initial=-np.inf)
    return np.asarray(deep.reshape(-1, PARTS)[:, CLOSED].max(axis=1))


def _forearm_depth(points: Vector, rotations: Vector, around: Boxes) -> Vector:
    """How deep the ends of the forearm behind hands [C] would be in something."""
    forearms = Boxes(
        centres=points - WRIST_ABOVE_GRIP * rotations[:, :, 2],
        axes=rotations,
        half_sizes=np.full((len(points), 3), FOREARM_RADIUS),
    )
    return np.asarray(overlap(forearms, around).max(axis=1, initial=-np.inf))


def _off_middle(joint: Joint, points: Vector, ways: Vector) -> Vector:
    """How far [C] the line of push passes the middle of what slides, which would jam it."""
    if joint.kind == "hinge":
        return np.zeros(len(points))
    offset = points - joint.link.centres.mean(axis=0)
    return np.asarray(np.abs(offset[:, 0] * ways[:, 1] - offset[:, 1] * ways[:, 0]))


def hand_rotations(ways: Vector, tilt: float) -> Vector:
    """Of hands [C, 3, 3] that lean back from pointing down by `tilt`, the finger axis across their ways [C, 3]."""
    x, y, zero = ways[:, 0], ways[:, 1], np.zeros(len(ways))
    along = np.stack([-y, x, zero], axis=1)
    approach = np.sin(tilt) * ways - np.cos(tilt) * Z
    third = np.stack([x * np.cos(tilt), y * np.cos(tilt), zero + np.sin(tilt)], axis=1)
    return np.stack([along, third, approach], axis=2)


def push(scene: Scene, joint: Joint, contact: Contact) -> Array:
    """Down behind the face, then along the way."""
    way, side = contact.way, np.array([-contact.way[1], contact.way[0], 0.0])
    rotation = _nearer_side(scene, contact)
    offset = scene.gripper_position - contact.point
    along, lateral = float(offset @ way), float(offset @ side)
    turn = float(angles(rotation, scene.gripper_rotation))
    if abs(offset[2]) < LOW and along < 0 and abs(lateral) < LATERAL and turn < TILTED:
        ahead = scene.gripper_position + way * POSITION_SCALE * PUSH_SPEED - side * lateral
        return move_hand(scene, np.append(ahead[:2], contact.point[2]), rotation, CLOSE)
    behind = contact.point - way * (FINGER_HALF + BEHIND)
    clear = extent(joint.link, Z)[1] + HOVER + TIP_BELOW_GRIP - contact.point[2]
    kept = funnel(behind - scene.gripper_position, clear, turn=turn)
    return move_hand(scene, behind + up(kept), rotation, CLOSE)


def _nearer_side(scene: Scene, contact: Contact) -> Vector:
    """The fingers may change places: of both rotations, the nearer one that the wrist can turn to."""
    both = np.array([contact.rotation, contact.rotation * np.array([-1.0, -1.0, 1.0])])
    over = wrist_strain(scene.robot_position, np.tile(contact.point, (2, 1)), both)
    return np.asarray(both[int(np.argmin(angles(both, scene.gripper_rotation) + PER_RADIAN_OVER * over))])


def _contacts(joint: Joint, sign: float) -> tuple[Vector, Vector, NDArray[np.bool_]]:
    """Points [C, 3] on every face that looks against its way, the ways [C, 3] to push there, and which [C] are wide."""
    points, ways, wide = [], [], []
    for axis in range(3):
        for side in (1.0, -1.0):
            normals = side * joint.link.axes[:, :, axis]
            at, box = _points(joint.link, axis, normals)
            against = (normals[box] * _motions(joint, at)).sum(axis=1) * sign < -FACING
            if joint.kind == "hinge":
                against &= _levers(joint, at) > LEAST_LEVER
            flat = normals[box][against, :2]
            points.append(at[against])
            wide.append(2 * _level_halves(joint.link, axis)[box][against] > WIDE)
            ways.append(
                np.append(-flat / np.linalg.norm(flat, axis=1, keepdims=True), np.zeros((len(flat), 1)), axis=1)
            )
    return np.concatenate(points), np.concatenate(ways), np.concatenate(wide)


def _level_halves(link: Boxes, axis: int) -> Vector:
    """Half the width [N] of a face of each box, along the side of it that lies flattest."""
    others = [other for other in range(3) if other != axis]
    level = np.argmin(np.abs(link.axes[:, 2, others]), axis=1)
    return np.asarray(link.half_sizes[:, others][np.arange(len(level)), level])


def _points(link: Boxes, axis: int, normals: Vector) -> tuple[Vector, NDArray[np.int64]]:
    """Points [C, 3] of a face of each box, and their boxes [C].

    The middle of the face and near its ends, at its middle height and as low as the fingers reach.
    """
    boxes, others = np.arange(len(link.centres)), [other for other in range(3) if other != axis]
    faces = link.centres + normals * link.half_sizes[:, axis, None]
    sides, halves = link.axes[:, :, others], link.half_sizes[:, others]
    level = np.argmin(np.abs(sides[:, 2]), axis=1)
    reach = np.maximum(halves[boxes, level] - FINGER_HALF, 0.0)[:, None] * sides[boxes, :, level]
    rise = np.abs(sides[boxes, 2, 1 - level]) * halves[boxes, 1 - level]
    low = extent(link, Z)[1] - DEPTH
    points, kept = [], []
    for step in (-1.0, 0.0, 1.0):
        at = faces + step * reach
        lower = np.concatenate([at[:, :2], np.full((len(at), 1), low)], axis=1)
        within_face = np.abs(low - faces[:, 2]) <= rise + ROUND_OFF
        points += [np.append(at[:, :2], faces[:, 2:], axis=1), lower[within_face]]
        kept += [boxes, boxes[within_face]]
    return np.concatenate(points), np.concatenate(kept)


def _motions(joint: Joint, points: Vector) -> Vector:
    """The horizontal unit vectors [C, 3] along which points of the link move as the joint's position grows."""
    ways = np.tile(joint.axis, (len(points), 1)) if joint.kind == "slide" else _moments(joint, points)
    flat = ways * np.array([1.0, 1.0, 0.0])
    return np.asarray(flat / (np.linalg.norm(flat, axis=1, keepdims=True) + 1e-9))


def _levers(joint: Joint, points: Vector) -> Vector:
    """The distances [C] of points from the line that a hinge turns about."""
    return np.zeros(len(points)) if joint.kind == "slide" else np.linalg.norm(_moments(joint, points), axis=1)


def _moments(joint: Joint, points: Vector) -> Vector:
    return np.asarray(np.cross(joint.axis, points - joint.anchor))
