"""Grasps of what a joint moves, from any side: the handle of a drawer or a door, the ridge of a knob.

Each box of the link that fits between the fingers is approached from directions all around it. A hold costs more the
deeper the open hand would collide there, and the further it is turned from pointing down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nightshift.policies.expert.geometry import (
    Vector,
    angles,
    crossings,
    extent,
    merge,
    overlap,
    select,
    shifted,
    within,
)
from nightshift.policies.expert.grasp import (
    CLEARANCE,
    CLOSE_XY,
    CLOSE_Z,
    HAND_REACH,
    PER_METRE_HIT,
    PER_METRE_STRAIN,
    PER_METRE_WIDE,
    PER_MISSED_PAD,
    all_boxes,
    fills_fingers,
    material,
    packed,
    pad_grid,
    unpacked,
)
from nightshift.policies.expert.motion import ALIGNED, FUNNEL, move_hand, up
from nightshift.policies.expert.place import Z, heights_on_the_way
from nightshift.policies.expert.robot import (
    CLOSE,
    FINGER_THICKNESS,
    FULLY_OPEN,
    GRASP_MARGIN,
    MAX_OPENING,
    OPEN,
    PAD_HALF_WIDTH,
    PARTS,
    PER_RADIAN_OVER,
    SOLID,
    TIP_BELOW_GRIP,
    tilted_strain,
    turned_hand_boxes,
    wrist_strain,
)
from nightshift.types import Array, Boxes, Joint, Scene

SAME = 1e-6  # metres between the centres of two boxes that are the same one
DIRECTIONS = 32  # approaches tried around each finger axis
MOST_UPWARD = 0.1  # an approach that points further up comes from below
BACK = 0.06  # metres in front of the hold from where the hand approaches in a straight line
ALIGNED_TURN = 0.2  # radians off its orientation at which the hand may close
TURNING_ROOM = 0.12  # metres to stay away per radian that the hand has to turn: the palm is that wide
FREE_TURN = 0.8  # radians off its orientation beyond which the hand turns where it is
PASSING = 0.02  # metres of air below a hand that passes over something
NEAR = 0.03  # metres from the point in front of a hold within which the hand comes down
PER_RADIAN_TILTED = 0.5
BLOCKED, IMPOSSIBLE = 0.006, 100.0  # metres inside something beyond which the hand cannot be there, and the cost of it


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A pose of the open hand around a part of a link."""

    point: Vector  # [3]
    rotation: Vector  # [3, 3]
    width: float
    cost: float


def is_held(scene: Scene, joint: Joint) -> bool:
    return fills_fingers(scene, joint.link) and material(scene, joint.link) > 0.0


def choose(scene: Scene, joint: Joint) -> Hold | None:
    """The cheapest hold from the hand's present pose; None if the link is too wide everywhere."""
    around = within(all_boxes(scene), joint.link.centres.mean(axis=0), 2 * HAND_REACH)
    options = _free_holds(packed(joint.link), packed(without(around, joint.link)))
    if not options:
        return None
    rotations, flipped = _both_ways(options)
    turns, others = (angles(each, scene.gripper_rotation) for each in (rotations, flipped))
    points = np.array([option.point for option in options])
    turns, others = (
        turn + PER_RADIAN_OVER * wrist_strain(scene.robot_position, points, each)
        for turn, each in ((turns, rotations), (others, flipped))
    )
    stretch = tilted_strain(scene.robot_position, points, rotations[:, :, 2])
    costs = np.array([option.cost for option in options]) + PER_METRE_STRAIN * stretch
    best = int(np.argmin(costs + np.minimum(turns, others)))
    return options[best] if turns[best] <= others[best] else replace(options[best], rotation=flipped[best])


def present(scene: Scene, joint: Joint) -> tuple[Vector, Vector]:
    """The point [3] and the rotation [3, 3] of the hold that is nearest to the hand's pose; that pose if none."""
    options = _holds_of(joint.link)
    if not options:
        return scene.gripper_position, scene.gripper_rotation
    rotations = np.concatenate(_both_ways(options))
    points = np.tile([option.point for option in options], (2, 1))
    away = np.linalg.norm(points - scene.gripper_position, axis=1) / TURNING_ROOM
    best = int(np.argmin(away + angles(rotations, scene.gripper_rotation)))
    return points[best], rotations[best]


def _both_ways(options: Sequence[Hold]) -> tuple[Vector, Vector]:
    """Rotations [C, 3, 3] of holds, and those with the fingers in each other's place."""
    rotations = np.array([option.rotation for option in options])
    return rotations, rotations * np.array([-1.0, -1.0, 1.0])


def take(scene: Scene, grip: Hold) -> Array:
    """Turn the hand where there is room, move in front of the hold, along a funnel to it, and close there."""
    approach = grip.rotation[:, 2]
    offset = grip.point - scene.gripper_position
    along = float(offset @ approach)
    lateral = float(np.linalg.norm(offset - along * approach))
    angle = float(angles(grip.rotation, scene.gripper_rotation))
    closing = grip.width < scene.gripper_opening < FULLY_OPEN
    slack = 2.0 if closing else 1.0
    there = lateral < slack * CLOSE_XY and abs(along) < slack * CLOSE_Z / 2 and angle < slack * ALIGNED_TURN
    # Fingers that went back while they close would hold the end of a handle, and slip off.
    kept = 0.0 if there else _kept_back(lateral, angle)
    turned = float(np.clip((FREE_TURN - angle) / FREE_TURN, 0.0, 1.0))
    front = _over_obstacles(scene, grip.point - kept * approach, grip.rotation)
    aim = scene.gripper_position + turned * (front - scene.gripper_position)
    return move_hand(scene, aim, grip.rotation, CLOSE if there else OPEN)


def _kept_back(lateral: float, angle: float) -> float:
    """Metres in front of a hold to keep until the hand is in line with it."""
    return float(np.clip(FUNNEL * (lateral - ALIGNED), 0.0, BACK)) + TURNING_ROOM * max(angle - ALIGNED_TURN, 0.0)


def _over_obstacles(scene: Scene, front: Vector, rotation: Vector) -> Vector:
    """`front`, or a point above it while there is something on the way that the hand would hit."""
    here = scene.gripper_position
    way = front - here
    hand = select(turned_hand_boxes(here[None], rotation[None]), SOLID)
    highest = heights_on_the_way(all_boxes(scene), hand, way).highest
    clear = max(highest + PASSING - extent(shifted(hand, way), Z)[0], 0.0)
    return front + up(float(np.clip(FUNNEL * (np.linalg.norm(way[:2]) - NEAR), 0.0, clear)))


def release(scene: Scene, link: Boxes) -> Array:
    """Open, and back the way the hand came once the fingers are clear of the link."""
    clear = scene.gripper_opening > min(material(scene, link) + GRASP_MARGIN, FULLY_OPEN)
    back = scene.gripper_rotation[:, 2] * (BACK if clear else 0.0)
    return move_hand(scene, scene.gripper_position - back, scene.gripper_rotation, OPEN)


def without(shape: Boxes, part: Boxes) -> Boxes:
    """The boxes of a shape that are not those of a part of it."""
    apart = np.linalg.norm(shape.centres[:, None] - part.centres, axis=2).min(axis=1)
    return select(shape, apart > SAME)


@lru_cache(maxsize=64)
def _free_holds(packed_link: bytes, packed_around: bytes) -> tuple[Hold, ...]:
    """With the costs of their tilt and their collisions, the cheapest ones; cached while nothing moves."""
    link, around = unpacked(packed_link), unpacked(packed_around)
    found = [option for option in _holds_of(link) if option.rotation[2, 2] < MOST_UPWARD]
    if not found:
        return ()
    tilts = np.arccos(np.clip([-option.rotation[2, 2] for option in found], -1.0, 1.0))
    away = [replace(option, point=option.point - BACK * option.rotation[:, 2]) for option in found]
    # Only the link itself may come between the fingers.
    deep = np.maximum(_depth(found, around, PARTS), _depth(away, around, PARTS))
    costs = np.array([option.cost for option in found]) + PER_RADIAN_TILTED * tilts
    costs += PER_METRE_HIT * np.maximum(deep + CLEARANCE, 0.0) + np.where(deep > BLOCKED, IMPOSSIBLE, 0.0)
    return tuple(
        replace(option, cost=float(cost))
        for option, cost in zip(found, costs, strict=True)
        if cost < costs.min() + np.pi
    )


def _holds_of(link: Boxes) -> list[Hold]:
    """Of the link wherever it is: they are the same seen from its first box."""
    frame, origin = link.axes[0], link.centres[0]
    seen = Boxes(
        centres=(link.centres - origin) @ frame,
        axes=np.einsum("ji,njk->nik", frame, link.axes),
        half_sizes=link.half_sizes,
    )
    return [
        replace(one, point=origin + frame @ one.point, rotation=frame @ one.rotation) for one in _holds(packed(seen))
    ]


@lru_cache(maxsize=64)
def _holds(packed_link: bytes) -> tuple[Hold, ...]:
    link = unpacked(packed_link)
    found = [option for index in range(len(link.centres)) for option in _around_box(link, index)]
    return tuple(option for option, deep in zip(found, _depth(found, link, SOLID.stop), strict=True) if deep < 0.0)


def _depth(holds: Sequence[Hold], around: Boxes, parts: int) -> Vector:
    """How deep the first `parts` of hands [C] would be in something."""
    points = np.array([one.point for one in holds]).reshape(-1, 3)
    rotations = np.array([one.rotation for one in holds]).reshape(-1, 3, 3)
    hands = turned_hand_boxes(points, rotations)
    looked_at = select(hands, np.arange(len(hands.centres)) % PARTS < parts)
    deep = overlap(looked_at, around).max(axis=1, initial=-np.inf)
    return np.asarray(deep.reshape(-1, parts).max(axis=1))


def _around_box(link: Boxes, index: int) -> list[Hold]:
    """Of one box of the link, taken for a bar along each of its axes, from all sides of it."""
    axes, half = link.axes[index], link.half_sizes[index]
    found = []
    for bar in range(3):
        one, other = (bar + 1) % 3, (bar + 2) % 3
        for angle in np.arange(DIRECTIONS) * 2 * np.pi / DIRECTIONS:
            approach = np.cos(angle) * axes[:, one] + np.sin(angle) * axes[:, other]
            depth = abs(np.cos(angle)) * half[one] + abs(np.sin(angle)) * half[other]
            point = link.centres[index] - approach * max(depth - TIP_BELOW_GRIP, 0.0)
            reach = max(half[bar] - 2 * PAD_HALF_WIDTH, 0.0)
            for step in {-reach, 0.0, reach}:
                at = point + step * axes[:, bar]
                found += _between_fingers(link, at, np.cross(axes[:, bar], approach), approach)
    return found


def _between_fingers(link: Boxes, point: Vector, along: Vector, approach: Vector) -> list[Hold]:
    """The hold at `point`, centred on what of the link is there between the fingers; none if that is too wide."""
    across = np.cross(approach, along)
    enter, leave = crossings(link, point + pad_grid(across, approach), along)
    for first, last in merge(enter, leave, gap=2 * FINGER_THICKNESS):
        width = last - first
        if first <= 0.0 <= last and width + GRASP_MARGIN <= MAX_OPENING:
            touching = ((leave > enter) & (enter >= first) & (leave <= last)).any(axis=1).mean()
            cost = PER_METRE_WIDE * width + PER_MISSED_PAD * float(1 - touching)
            rotation = np.stack([along, across, approach], axis=1)
            return [Hold(point=point + along * (first + last) / 2, rotation=rotation, width=width, cost=cost)]
    return []
