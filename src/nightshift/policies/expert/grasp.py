"""Grasps of an object: lines through its collision shape, and the collisions of the open hand there.

For yaws of the finger axis all around, and some heights below the top, the lines that the finger pads would close
along intersect the object's boxes. A connected stretch that fits between the fingers is a grasp: a whole box or bottle,
or one wall of a bowl (the other finger then goes inside). A grasp costs more the deeper the open hand would collide
there with the object itself or its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nightshift.policies.expert.geometry import (
    NOTHING,
    Vector,
    crossings,
    extent,
    join,
    merge,
    overlap,
    select,
    shape_of,
    within,
)
from nightshift.policies.expert.motion import turn_between, turn_to
from nightshift.policies.expert.place import bottom_of, support_under
from nightshift.policies.expert.robot import (
    FINGER_THICKNESS,
    FINGERS_HOME,
    GRASP_MARGIN,
    MAX_OPENING,
    PAD_HALF_HEIGHT,
    PAD_HALF_WIDTH,
    PALM_ABOVE_GRIP,
    PARTS,
    SOLID,
    TIP_BELOW_GRIP,
    hand_boxes,
    strain,
)
from nightshift.types import Boxes, Scene

YAWS = 16  # finger axes tried, over half a turn
DEPTHS = (0.008, 0.014, 0.02, 0.026)  # metres below the object's top
BEST_DEPTH = 0.02
BESIDE = 0.004  # metres between two lines beside the middle of an object
HAND_REACH = 0.16  # metres from the grip point beyond which the hand touches nothing
DESCENT = (0.05, 0.1, 0.15)  # metres above a grasp where the hand comes by
CLEARANCE = 0.004  # metres the hand should keep from what it passes
ROUNDING = 4  # decimals of a metre: shapes that differ less get the same grasps
CLOSE_XY, CLOSE_Z = 0.014, 0.02  # distances from the grasp point at which the fingers begin to close
HELD_SLACK = 0.003  # opening beyond what is between the fingers at which it counts as gripped
RAISED = 0.02  # metres of air below an object that does not stand any more
FALLEN = 0.1  # metres below the arm's foot: what is there has fallen off the table
WIDER = 0.01  # metres that something is wider than the opening from which on the fingers cannot be around it
PAD_LINES = 5  # along each side of a pad

# Costs of a grasp, in equivalent radians of turning the hand.
PER_METRE_HIT = 400.0
PER_MISSED_PAD = 2.0
PER_METRE_WIDE = 8.0
PER_METRE_HIGH = 20.0
PER_METRE_STRAIN = 30.0
PER_RADIAN_FROM_PRESENT = 0.5
PER_RADIAN_LEFT = 0.5
PER_METRE_RIGHT = 1.0

Z = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Grasp:
    """A pose of the grip point and the finger axis."""

    point: Vector  # [3]
    yaw: float
    width: float  # of what is between the fingers
    cost: float  # of what the hand touches and where; `choose` adds that of reaching it


def choose(scene: Scene, name: str, way: Vector | None = None, *, crowded: bool = False) -> Grasp | None:
    """The cheapest grasp for an object that is then moved by `way` [3], or lifted where it is.

    `crowded`: the hand may also collide on its way down, and where the object comes to be. None if the object is too
    wide everywhere.
    """
    others = neighbours(scene, name)
    options = grasps(shape_of(scene.bodies[name]), others, scene.bodies[name].rotation)
    if not options:
        return None
    points = np.array([grasp.point for grasp in options])
    stretch = strain(scene.robot_position, points)
    if way is not None:
        stretch = stretch + strain(scene.robot_position, points + way)
    turns = [abs(turn_to(scene, grasp.yaw)) if way is None else _cost_of_pose(scene, grasp) for grasp in options]
    costs = [grasp.cost for grasp in options] + np.array(turns) + PER_METRE_STRAIN * stretch
    if crowded and way is not None:
        moves = np.array([way, *(rise * Z for rise in DESCENT)])
        poses = np.array([[*grasp.point, grasp.yaw] for grasp in options])
        costs = costs + _on_the_way(rounded(poses), packed(others), rounded(moves))
    return options[int(np.argmin(costs))]


def _cost_of_pose(scene: Scene, grasp: Grasp) -> float:
    """Of turning the hand to a grasp, from the start pose above all, and of not being the preferred mirror image.

    Noise turns the hand on its way. If its present pose decided alone, one scene would have demos of several grasps,
    and a clone learns their mean.
    """
    turn = turn_between(FINGERS_HOME, grasp.yaw)
    mirrored = PER_RADIAN_LEFT * max(turn, 0.0) - PER_METRE_RIGHT * float(grasp.point[1])
    return abs(turn) + PER_RADIAN_FROM_PRESENT * abs(turn_to(scene, grasp.yaw)) + mirrored


@lru_cache(maxsize=8)
def _on_the_way(packed_poses: bytes, packed_others: bytes, packed_moves: bytes) -> Vector:
    """The cost of each grasp, at a point and a yaw [C, 4], for collisions of the hand where it is moved by [M, 3]."""
    poses, others = np.frombuffer(packed_poses).reshape(-1, 4), unpacked(packed_others)
    points, yaws = poses[:, :3], poses[:, 3]
    deep = np.full(len(points), -np.inf)
    for move in np.frombuffer(packed_moves).reshape(-1, 3):
        hands = hand_boxes(points + move, yaws)
        solid = select(hands, np.arange(len(hands.centres)) % PARTS < SOLID.stop)
        around = within(others, points.mean(axis=0) + move, 2 * HAND_REACH)
        found = overlap(solid, around).max(axis=1, initial=-np.inf).reshape(len(points), -1).max(axis=1)
        deep = np.maximum(deep, found)
    return np.asarray(PER_METRE_HIT * np.maximum(deep + CLEARANCE, 0.0))


def grasps(item: Boxes, others: Boxes, rotation: Vector) -> tuple[Grasp, ...]:
    """Every grasp of the object, cached for a rounded scene, since resting objects still move by fractions of a mm."""
    middle = item.centres.mean(axis=0)
    others = within(others, middle, HAND_REACH + float(np.linalg.norm(item.centres - middle, axis=1).max()))
    return _kept_grasps(packed(item), packed(others), round(_level_yaw(rotation), ROUNDING))


def grasps_across(item: Boxes, others: Boxes, yaw: float) -> tuple[Grasp, ...]:
    """Every grasp with the finger axis at `yaw`, also beside the middle of the object."""
    middle = item.centres.mean(axis=0)
    others = within(others, middle, HAND_REACH + float(np.linalg.norm(item.centres - middle, axis=1).max()))
    return _kept_grasps_across(packed(item), packed(others), round(yaw, ROUNDING))


def is_held(scene: Scene, name: str) -> bool:
    """Whether the fingers hold an object: it fills the gap between them, or is in the air with a part of it there.

    What is held by a thin part tilts, and does not fill the gap any more. Closed fingers fill the gap of nothing.
    """
    shape = shape_of(scene.bodies[name])
    between = not _is_open(scene) and material(scene, shape) > 0.0
    return between and (fills_fingers(scene, shape) or is_raised(scene, name))


def is_raised(scene: Scene, name: str) -> bool:
    """Whether there is air between an object and what it would come to stand on; False where nothing is known of it."""
    item = shape_of(scene.bodies[name])
    bottom = extent(item, Z)[0]
    below = support_under(neighbours(scene, name), item, np.zeros(3), highest=bottom + RAISED)
    support = max(below, _table(scene, name))
    return support > -np.inf and bottom - support > RAISED


def _table(scene: Scene, name: str) -> float:
    """The height at which the lowest of the other objects stands; -inf if there are none.

    Fixtures that have joints may reach below the table. The arm's foot stands about as high as it does.
    """
    floor = -np.inf if scene.robot_position is None else scene.robot_position[2] - FALLEN
    others = {other: body for other, body in scene.bodies.items() if other != name and other not in scene.joints}
    bottoms = [bottom_of(body) for body in others.values() if body.boxes is not None]
    return min((bottom for bottom in bottoms if bottom > floor), default=-np.inf)


def _is_open(scene: Scene) -> bool:
    return scene.gripper_opening > MAX_OPENING - GRASP_MARGIN + HELD_SLACK


def fills_fingers(scene: Scene, shape: Boxes) -> bool:
    """Whether a shape fills the gap between the finger pads, and these are neither simply open nor on top of it."""
    filled = not _is_open(scene) and material(scene, shape) > scene.gripper_opening - HELD_SLACK
    return filled and not _stands_on(scene, shape)


def _stands_on(scene: Scene, shape: Boxes) -> bool:
    """Whether the finger tips press on a shape: it is only below the grip point, and wider than they are apart."""
    reach = scene.gripper_opening / 2 + HELD_SLACK
    enter, leave = _through_pads(scene, shape)
    hit = (leave > enter) & (leave > -reach) & (enter < reach)
    is_below = np.tile(np.arange(PAD_LINES) > PAD_LINES // 2, PAD_LINES)
    if not hit.any() or hit[~is_below].any():
        return False
    return float(leave[hit].max() - enter[hit].min()) > scene.gripper_opening + WIDER


def material(scene: Scene, shape: Boxes) -> float:
    """Of a shape between the finger pads, from its first to its last point along lines; 0 if it is not there."""
    reach = scene.gripper_opening / 2 + HELD_SLACK
    enter, leave = _through_pads(scene, shape)
    enter, leave = np.maximum(enter, -reach), np.minimum(leave, reach)
    hit = leave > enter
    return float(leave[hit].max() - enter[hit].min()) if hit.any() else 0.0


def _through_pads(scene: Scene, shape: Boxes) -> tuple[Vector, Vector]:
    """Where lines from pad to pad enter and leave each box [PAD_LINES², N]; of every PAD_LINES the last is lowest."""
    along, across, down = scene.gripper_rotation.T
    return crossings(shape, scene.gripper_position + pad_grid(across, down, lines=PAD_LINES), along)


def all_boxes(scene: Scene) -> Boxes:
    return neighbours(scene)


def neighbours(scene: Scene, *names: str) -> Boxes:
    """The collision shapes of everything but `names`."""
    shapes = [body.boxes for other, body in scene.bodies.items() if other not in names and body.boxes is not None]
    return join([NOTHING, *shapes])


def _level_yaw(rotation: Vector) -> float:
    """The direction of the object's axis that lies flattest."""
    flattest = rotation[:, int(np.argmin(np.abs(rotation[2])))]
    return float(np.arctan2(flattest[1], flattest[0]))


def packed(shape: Boxes) -> bytes:
    flat = np.concatenate([shape.centres, shape.axes.reshape(-1, 9), shape.half_sizes], axis=1)
    return rounded(flat)


def rounded(values: Vector) -> bytes:
    return np.asarray(values.round(ROUNDING) + 0.0).tobytes()


def unpacked(packed: bytes) -> Boxes:
    flat = np.frombuffer(packed).reshape(-1, 15)
    return Boxes(centres=flat[:, :3], axes=flat[:, 3:12].reshape(-1, 3, 3), half_sizes=flat[:, 12:])


@lru_cache(maxsize=64)
def _kept_grasps(packed_item: bytes, packed_others: bytes, yaw: float) -> tuple[Grasp, ...]:
    item, others = unpacked(packed_item), unpacked(packed_others)
    return _with_hits(
        [grasp for step in range(YAWS) for grasp in _along(item, yaw + step * np.pi / YAWS)], item, others
    )


@lru_cache(maxsize=8)
def _kept_grasps_across(packed_item: bytes, packed_others: bytes, yaw: float) -> tuple[Grasp, ...]:
    item, others = unpacked(packed_item), unpacked(packed_others)
    low, high = extent(item, np.array([-np.sin(yaw), np.cos(yaw), 0.0]))
    steps = np.linspace(low - high, high - low, 2 * int((high - low) / (2 * BESIDE)) + 1) / 2
    return _with_hits([grasp for beside in steps for grasp in _along(item, yaw, float(beside))], item, others)


def _with_hits(found: list[Grasp], item: Boxes, others: Boxes) -> tuple[Grasp, ...]:
    """With the cost of the hand's collisions."""
    if not found:
        return ()
    hands = hand_boxes(np.array([grasp.point for grasp in found]), np.array([grasp.yaw for grasp in found]))
    # Only the object itself may come between the fingers.
    deep = np.maximum(_deepest(hands, item)[:, SOLID].max(axis=1), _deepest(hands, others).max(axis=1))
    hits = PER_METRE_HIT * np.maximum(deep + CLEARANCE, 0.0)
    return tuple(
        Grasp(point=grasp.point, yaw=grasp.yaw, width=grasp.width, cost=grasp.cost + float(hit))
        for grasp, hit in zip(found, hits, strict=True)
    )


def _deepest(hands: Boxes, shape: Boxes) -> Vector:
    """How deep each part of each hand is in `shape` [C, PARTS]."""
    return np.asarray(overlap(hands, shape).max(axis=1, initial=-np.inf).reshape(-1, PARTS))


def _along(item: Boxes, yaw: float, beside: float = 0.0) -> list[Grasp]:
    """Grasps with the finger axis at `yaw`, through the middle of the object or `beside` it."""
    along, across = np.array([np.cos(yaw), np.sin(yaw), 0.0]), np.array([-np.sin(yaw), np.cos(yaw), 0.0])
    middle = across * sum(extent(item, across)) / 2 + across * beside
    pads = pad_grid(across, Z)
    found = []
    for height in _heights(*extent(item, Z)):
        enter, leave = crossings(item, middle + height * Z + pads, along)
        for first, last in merge(enter, leave, gap=2 * FINGER_THICKNESS):
            if last - first + GRASP_MARGIN > MAX_OPENING:
                continue
            touching = ((leave > enter) & (enter >= first) & (leave <= last)).any(axis=1).mean()
            high = abs(height - _best_height(*extent(item, Z)))
            cost = PER_MISSED_PAD * (1 - touching) + PER_METRE_WIDE * (last - first) + PER_METRE_HIGH * high
            point = middle + along * (first + last) / 2 + height * Z
            found.append(Grasp(point=point, yaw=yaw, width=last - first, cost=float(cost)))
    return found


def _heights(bottom: float, top: float) -> list[float]:
    """Of the grip point: not so low that the finger tips pass the object's underside."""
    lowest = min(bottom + TIP_BELOW_GRIP, top)
    heights = {max(top - depth, lowest) for depth in DEPTHS if depth < PALM_ABOVE_GRIP}
    return sorted(heights | {_best_height(bottom, top)})


def _best_height(bottom: float, top: float) -> float:
    return max((bottom + top) / 2, top - BEST_DEPTH)


def pad_grid(across: Vector, up: Vector, lines: int = 3) -> Vector:
    """Points over a finger pad [lines², 3], about its middle."""
    steps = np.linspace(-1.0, 1.0, lines)
    return np.array([a * PAD_HALF_WIDTH * across + b * PAD_HALF_HEIGHT * up for a in steps for b in steps])
