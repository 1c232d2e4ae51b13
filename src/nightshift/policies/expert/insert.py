"""Put an object under a roof, as into a microwave: in through the open side, with the hand outside.

The palm is narrow across the finger axis. So the finger axis is across the way in, and the fingers hold the object
where it still sticks out, as by the handle of a mug. From in front of the opening it goes straight in, as deep as the
hand stays clear of the roof. What then stands on the sill is pushed further in with closed fingers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nightshift.policies.expert.geometry import Vector, crossings, extent, overlap, select, shape_of, turn_about, within
from nightshift.policies.expert.grasp import (
    CLEARANCE,
    PER_METRE_HIT,
    PER_METRE_STRAIN,
    Grasp,
    grasps_across,
    neighbours,
    packed,
    rounded,
    unpacked,
)
from nightshift.policies.expert.motion import finger_yaw, funnel, move_to, turn_to, up
from nightshift.policies.expert.place import RELEASE_Z, SPOT_DEPTH, Place, Z, bottom_of
from nightshift.policies.expert.robot import (
    CLOSE,
    OPEN,
    PARTS,
    PER_RADIAN_OVER,
    POSITION_SCALE,
    SOLID,
    TIP_BELOW_GRIP,
    hand_boxes,
    strain,
    turned_hand_boxes,
    wrist_strain,
)
from nightshift.policies.expert.shove import FINGER_HALF
from nightshift.types import Array, Body, Boxes, Scene

LIFT, SILL = 0.018, 0.006  # metres of air below an object that goes in, and of which it needs at least
OUTSIDE = 0.03  # metres that an object keeps from the roof before it goes in
EDGE = 0.01  # metres that an object's position comes into the region at least
ACROSS, LATERALS, DEPTHS = 0.8, 13, 6  # spots tried: of the region's half size across the way in, and how many
WAY_POINTS = 4  # of the way in, at which nothing should be hit
PROBE = 0.02  # metres: half the size of what is moved in to find the open side
AROUND = 0.4  # metres from the middle of a region beyond which nothing is in the way
IN_LINE, OFF_LINE = 0.008, 0.025  # metres off the way in up to which an object goes in at full speed, and not at all
AT_FRONT = 0.015  # metres before the front from which on an object goes straight in
UNDER = 0.04  # metres above the way in beyond which an object has to come down first
STEEP = 0.5  # of a region's axis along the vertical from which on it is no way in
THERE = 0.012  # metres before its spot at which an object is released
ON_SILL = 0.01  # metres above the floor, and before the opening, up to which an object stands inside
BEHIND = 0.03  # metres behind an object where the fingers go down to push it
ASTRAY, LOW = 0.015, 0.02  # off the line of push, and above its height, at which the hand goes behind it anew
PUSH_SPEED = 0.5
MOST_TURN = 1.4  # radians: beyond a quarter turn the hand would turn the other way


@dataclass(frozen=True, kw_only=True)
class WayIn:
    """Positions of an object."""

    front: Vector  # [3] outside the opening
    spot: Vector  # [3] inside
    inward: Vector  # [3] a horizontal unit vector


def is_roofed(scene: Scene, name: str, place: Place) -> bool:
    """Whether something is above the middle of a region, other than what lies in it or is brought there."""
    if not place.inside or place.body.boxes is not None:
        return False
    brought = {name, *(goal[1] for goal in scene.goal if goal[0] in ("on", "in"))}
    return bool(_roof(place, neighbours(scene, *brought)).any())


def choose(scene: Scene, name: str, place: Place) -> Grasp | None:
    """The cheapest grasp with the finger axis across the way in; None if the object is too wide everywhere."""
    item, obstacles = scene.bodies[name], neighbours(scene, name)
    inward = _inward(place, obstacles)
    options = grasps_across(shape_of(item), obstacles, float(np.arctan2(inward[0], -inward[1])))
    if not options:
        return None
    spots = _spots(place, item, obstacles, inward)[0][:LATERALS]
    poses = np.array([[*grasp.point, grasp.yaw] for grasp in options])
    around = within(obstacles, place.body.position, AROUND)
    deep = _hits(rounded(poses), packed(around), rounded(spots - item.position))
    costs = np.array([grasp.cost + abs(turn_to(scene, grasp.yaw)) for grasp in options])
    costs += PER_METRE_STRAIN * strain(scene.robot_position, poses[:, :3]) + PER_METRE_HIT * deep
    return options[int(np.argmin(costs))]


def by_the_easier_side(scene: Scene, grasp: Grasp, place: Place) -> Grasp:
    """The fingers may change places: the grasp, or a turn on the way to the one that the wrist reaches also inside."""
    yaws = grasp.yaw + np.array([0.0, np.pi])
    turns = (yaws - finger_yaw(scene) + np.pi) % (2 * np.pi) - np.pi
    down = [turn_about(Z, float(yaw)) @ np.diag([1.0, -1.0, -1.0]) for yaw in yaws]
    over = sum(
        wrist_strain(scene.robot_position, np.tile(point, (2, 1)), np.array(down))
        for point in (grasp.point, place.body.position)
    )
    turn = float(turns[int(np.argmin(np.abs(turns) + PER_RADIAN_OVER * over))])
    return replace(grasp, yaw=finger_yaw(scene) + float(np.clip(turn, -MOST_TURN, MOST_TURN)))


def way_in(scene: Scene, name: str, place: Place) -> WayIn:
    """Of an object that is held as it is now."""
    item, obstacles = scene.bodies[name], neighbours(scene, name)
    inward = _inward(place, obstacles)
    spots, fronts = _spots(place, item, obstacles, inward)
    around = within(obstacles, place.body.position, AROUND)
    hand = select(turned_hand_boxes(scene.gripper_position[None], scene.gripper_rotation[None]), SOLID)
    deep = _deepest(_box_of(item), np.linspace(fronts, spots, WAY_POINTS) - item.position, around)
    deep = np.maximum(deep, _deepest(hand, np.stack([fronts, spots]) - item.position, around))
    away = np.linalg.norm((spots - place.body.position)[:, :2], axis=1)
    best = int(np.argmin(np.maximum(deep + CLEARANCE, 0.0) / SPOT_DEPTH + away))
    return WayIn(front=fronts[best], spot=spots[best], inward=inward)


def is_at_front(item: Body, way: WayIn, rest: float) -> bool:
    return bool((item.position - way.front) @ way.inward > -AT_FRONT and bottom_of(item) < rest + UNDER)


def go_in(scene: Scene, item: Body, way: WayIn, rest: float) -> Array:
    """Straight in, as fast as the object is in line with its spot; let go there."""
    offset = way.spot - item.position
    ahead = float(offset @ way.inward)
    beside = (offset - ahead * way.inward) * np.array([1.0, 1.0, 0.0])
    inside = ahead < THERE
    rise = rest + (0.0 if inside else LIFT) - bottom_of(item)
    off = max(float(np.linalg.norm(beside)), -rise)
    free = float(np.clip((OFF_LINE - off) / (OFF_LINE - IN_LINE), 0.0, 1.0)) if rise < LIFT - SILL else 0.0
    there = inside and off < OFF_LINE and -rise < RELEASE_Z
    aim = scene.gripper_position + free * ahead * way.inward + beside + up(rise)
    return move_to(scene, aim, None, OPEN if there else CLOSE)


def is_on_sill(place: Place, item: Body, obstacles: Boxes) -> bool:
    """Whether an object stands inside, however little."""
    inward = _inward(place, obstacles)
    offset = item.position - place.body.position
    across = np.array([-inward[1], inward[0], 0.0])
    room = np.abs(place.body.rotation.T @ across) @ place.body.half_size
    opening = extent(select(obstacles, _roof(place, obstacles)), inward)[0]
    level = abs(bottom_of(item) - place.rest) < ON_SILL and abs(float(offset @ across)) < room
    return bool(level and item.position @ inward > opening - ON_SILL)


def push_in(scene: Scene, item: Body, place: Place, obstacles: Boxes, clear: float) -> Array:
    """With closed fingers against its near end, coming from the height `clear` of the finger tips."""
    inward = _inward(place, obstacles)
    across = np.array([-inward[1], inward[0], 0.0])
    yaw = float(np.arctan2(across[1], across[0]))
    near = extent(shape_of(item), inward)[0] - float(item.position @ inward) - FINGER_HALF
    face = np.append((item.position + near * inward)[:2], sum(extent(shape_of(item), Z)) / 2)
    from_face = scene.gripper_position - face
    lateral, along, above = float(from_face @ across), float(from_face @ inward), float(from_face[2])
    if abs(lateral) < ASTRAY and above < LOW and along < FINGER_HALF:
        ahead = face + (along + PUSH_SPEED * POSITION_SCALE) * inward
        return move_to(scene, ahead, yaw, CLOSE)
    behind = face - BEHIND * inward
    kept = funnel(behind - scene.gripper_position, clear + TIP_BELOW_GRIP - face[2], turn=turn_to(scene, yaw))
    return move_to(scene, behind + up(kept), yaw, CLOSE)


def _roof(place: Place, obstacles: Boxes) -> NDArray[np.bool_]:
    """Which obstacles [N] are above the middle of a region."""
    enter, leave = crossings(obstacles, place.body.position[None], Z)
    return np.asarray(((leave > enter) & (enter > 0.0))[0])


def _inward(place: Place, obstacles: Boxes) -> Vector:
    """The horizontal axis of the region along which its middle is reached with the fewest collisions."""
    region = place.body
    axes = [sign * axis for axis in region.rotation.T if abs(axis[2]) < STEEP for sign in (1.0, -1.0)]
    if not axes:
        raise ValueError(
            "the expert finds no way in under a roof: the place is tilted, and none of its sides is upright"
        )
    ways = np.array(axes) * np.array([1.0, 1.0, 0.0])
    long = 2 * float(np.linalg.norm(region.half_size))
    probe = Boxes(centres=region.position[None], axes=np.eye(3)[None], half_sizes=np.full((1, 3), PROBE))
    moves = np.linspace(-long * ways, np.zeros_like(ways), 2 * WAY_POINTS)
    deep = _deepest(probe, moves, within(obstacles, region.position, AROUND))
    return np.asarray(ways[int(np.argmin(np.maximum(deep, 0.0)))])


def _spots(place: Place, item: Body, obstacles: Boxes, inward: Vector) -> tuple[Vector, Vector]:
    """Positions of the object [S, 3] inside, from the edge of the region to its middle, and in front of each."""
    region = place.body
    across = np.array([-inward[1], inward[0], 0.0])
    room = np.abs(region.rotation.T @ np.stack([inward, across], axis=1)).T @ region.half_size
    depths, sides = np.linspace(EDGE - room[0], 0.0, DEPTHS), np.linspace(-ACROSS, ACROSS, LATERALS) * room[1]
    middle = _raised(region.position, item, place)
    spots = np.array([middle + depth * inward + side * across for depth in depths for side in sides])
    opening = extent(select(obstacles, _roof(place, obstacles)), inward)[0]
    ahead = extent(shape_of(item), inward)[1] - float(item.position @ inward)
    back = spots @ inward - (opening - OUTSIDE - ahead)
    return spots, spots - np.maximum(back, 0.0)[:, None] * inward


def _raised(point: Vector, item: Body, place: Place) -> Vector:
    """`point`, at the height of the object's position with its underside above the place."""
    return np.append(point[:2], item.position[2] + place.rest + LIFT - bottom_of(item))


def _box_of(item: Body) -> Boxes:
    low, high = np.array([extent(shape_of(item), axis) for axis in np.eye(3)]).T
    return Boxes(centres=(low + high)[None] / 2, axes=np.eye(3)[None], half_sizes=(high - low)[None] / 2)


def _deepest(mover: Boxes, moves: Vector, around: Boxes) -> Vector:
    """How deep a shape is in something at the deepest point of each of its ways: moves [points, S, 3] give [S]."""
    count = len(mover.centres)
    flat = moves.reshape(-1, 3)
    moved = Boxes(
        centres=(flat[:, None] + mover.centres).reshape(-1, 3),
        axes=np.tile(mover.axes, (len(flat), 1, 1)),
        half_sizes=np.tile(mover.half_sizes, (len(flat), 1)),
    )
    deep = overlap(moved, around).max(axis=1, initial=-np.inf).reshape(len(moves), -1, count)
    return np.asarray(deep.max(axis=(0, 2)))


@lru_cache(maxsize=8)
def _hits(packed_poses: bytes, packed_around: bytes, packed_moves: bytes) -> Vector:
    """How deep the hand of each grasp, at a point and a yaw [C, 4], is in something where that is least: of [M, 3]."""
    poses, around = np.frombuffer(packed_poses).reshape(-1, 4), unpacked(packed_around)
    hands = hand_boxes(poses[:, :3], poses[:, 3])
    least = np.full(len(poses), np.inf)
    for move in np.frombuffer(packed_moves).reshape(-1, 3):
        moved = Boxes(centres=hands.centres + move, axes=hands.axes, half_sizes=hands.half_sizes)
        deep = overlap(moved, around).max(axis=1, initial=-np.inf).reshape(-1, PARTS)[:, SOLID].max(axis=1)
        least = np.minimum(least, np.maximum(deep + CLEARANCE, 0.0))
    return least
