"""The expert's skills: reach, pick up, bring, push, pull. Each maps a scene to one action."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nightshift.policies.expert import insert
from nightshift.policies.expert.drag import drag
from nightshift.policies.expert.geometry import Vector, extent, select, shape_of
from nightshift.policies.expert.grasp import (
    CLOSE_XY,
    CLOSE_Z,
    HELD_SLACK,
    Grasp,
    choose,
    is_held,
    is_raised,
    material,
    neighbours,
)
from nightshift.policies.expert.motion import finger_yaw, funnel, move_to, turn_to, up
from nightshift.policies.expert.place import (
    RELEASE_XY,
    Place,
    bottom_of,
    heights_on_the_way,
    reachable,
    support_under,
    top_of,
    way_out,
)
from nightshift.policies.expert.robot import (
    CLOSE,
    FINGER_THICKNESS,
    FINGERS,
    FULLY_OPEN,
    GRASP_MARGIN,
    MAX_OPENING,
    OPEN,
    PALM,
    PALM_ABOVE_GRIP,
    POSITION_SCALE,
    TIP_BELOW_GRIP,
    hand_boxes,
)
from nightshift.types import Array, Body, Boxes, Scene

HOVER = 0.06  # metres of air between the finger tips and what they pass over
CARRY = 0.04  # metres of air below a carried object
PASSING_AIR = 0.01  # metres above what is in its way from which on a carried object moves at full speed
SINK = 0.01  # metres below its rest that a carried object is moved towards: it would slow down before it is let go
SLIDING = 0.008  # metres that the hand aims below where it is while it slides an object over the table
AT_PLACE = 0.03  # metres beside its place within which a carried object goes down
ABOVE = 0.03  # metres above a grasp to where fingers rise that have closed without what they should hold
PALM_AIR = 0.01  # metres of air between the palm and what it comes to stand above
HANDLE_WITHIN = 0.03  # a handle further from the grip point than this is not in the hand
HANDLE_SLACK = 0.004  # opening beyond a handle's width at which it counts as gripped
FLAT = 0.027  # metres of thickness: LIBERO's plates have 0.019, and a block that is pushed has 0.04
LYING = 0.7  # cosine of the tilt up to which it lies flat
SAME_LEVEL = 0.015  # metres between two heights from one to the other of which something can be dragged
PUSH_SPEED = 0.6  # of the fastest
PUSH_LATERAL = 0.02  # metres off the line through the item at which the gripper goes behind it anew
PUSH_LOW = 0.02  # metres above pushing height below which the gripper counts as down


def reach(scene: Scene, name: str) -> Array:
    return move_to(scene, scene.bodies[name].position, None, OPEN)


def pick_up(scene: Scene, name: str) -> Array:
    if is_held(scene, name):
        return move_to(scene, scene.gripper_position + up(POSITION_SCALE), None, CLOSE)
    grasp = choose(scene, name)
    if grasp is None:
        raise ValueError(f"the expert cannot pick up {name}: nowhere is it narrower than the gripper opens")
    return _reach_and_close(scene, name, grasp)


def bring(scene: Scene, name: str, place: Place) -> Array:
    """Grasp, carry, lower, release and move away; or push an object that is too wide to grasp."""
    item = scene.bodies[name]
    if _is_dragged(item, place):
        return drag(scene, name, place.position, _clear_above(scene, name, item.position))
    if insert.is_roofed(scene, name, place):
        return _bring_in(scene, name, place)
    if is_held(scene, name):
        return _carry(scene, name, reachable(place, item, scene.robot_position))
    if is_placed(scene, name, place):
        return leave(scene, item)
    grasp = choose(scene, name, place.position - item.position, crowded=place.crowded)
    return _push(scene, item, place) if grasp is None else _reach_and_close(scene, name, grasp)


def _bring_in(scene: Scene, name: str, place: Place) -> Array:
    """As `bring`, under a roof: to the front of the opening, in, let go, and push."""
    item, obstacles = scene.bodies[name], neighbours(scene, name)
    if is_held(scene, name):
        way = insert.way_in(scene, name, place)
        if insert.is_at_front(item, way, place.rest):
            return insert.go_in(scene, item, way, place.rest)
        return _carry(scene, name, replace(place, position=way.front, rest=place.rest + insert.LIFT), outside=True)
    on_sill = insert.is_on_sill(place, item, obstacles)
    if is_placed(scene, name, place) or (on_sill and material(scene, shape_of(item)) > 0.0):
        return leave(scene, item)
    if on_sill:
        return insert.push_in(scene, item, place, obstacles, _clear_above(scene, name, item.position))
    grasp = insert.choose(scene, name, place)
    if grasp is None:
        raise ValueError(f"the expert cannot put {name} under a roof: across the way in it is too wide for the gripper")
    return _reach_and_close(scene, name, insert.by_the_easier_side(scene, grasp, place))


def slide(scene: Scene, name: str, way: Vector) -> Array:
    """Grasp, move along `way` [3] over what the object stands on, let go there; lowered first if it was carried."""
    if is_held(scene, name):
        there = np.linalg.norm(way[:2]) < RELEASE_XY and not is_raised(scene, name)
        return move_to(scene, scene.gripper_position + way - up(SLIDING), None, OPEN if there else CLOSE)
    grasp = choose(scene, name, way)
    if grasp is None:
        raise ValueError(f"the expert cannot slide {name}: nowhere is it narrower than the gripper opens")
    return _reach_and_close(scene, name, grasp)


def pull(scene: Scene, region: str) -> Array:
    """Take the region's handle and pull it away from the region."""
    handle = _handle_of(scene, region)
    grasp = _handle_grasp(scene, handle)
    near = np.linalg.norm(grasp.point - scene.gripper_position) < HANDLE_WITHIN
    if near and scene.gripper_opening < grasp.width + HANDLE_SLACK:
        way = _direction(handle.position - scene.bodies[region].position)
        aim = np.append(scene.gripper_position[:2] + way * POSITION_SCALE, grasp.point[2])
        return move_to(scene, aim, grasp.yaw, CLOSE)
    return _descend_and_close(scene, grasp, top_of(handle) + HOVER)


def _reach_and_close(scene: Scene, name: str, grasp: Grasp) -> Array:
    return _descend_and_close(scene, grasp, _clear_above(scene, name, grasp.point))


def _clear_above(scene: Scene, name: str, point: Vector) -> float:
    """The height of the finger tips at which the hand passes over everything on its way to a point of an object."""
    way = point - scene.gripper_position
    obstacles = neighbours(scene, name)
    fingers = heights_on_the_way(obstacles, _hand(scene, FINGERS), way).highest
    palm = heights_on_the_way(obstacles, _hand(scene, PALM), way).highest
    return max(top_of(scene.bodies[name]) + HOVER, fingers + HOVER, palm + HOVER - PALM_ABOVE_GRIP)


def _descend_and_close(scene: Scene, grasp: Grasp, clear: float) -> Array:
    """The finger tips at `clear` until above the grasp point, down along a funnel, and close while arriving."""
    offset = grasp.point - scene.gripper_position
    kept = funnel(offset, clear + TIP_BELOW_GRIP - grasp.point[2], turn=turn_to(scene, grasp.yaw))
    # Fingers that have begun to close keep closing, even if the object moves a little.
    closing = grasp.width < scene.gripper_opening < FULLY_OPEN
    slack = 2.0 if closing else 1.0
    there = np.linalg.norm(offset[:2]) < slack * CLOSE_XY and abs(offset[2]) < slack * CLOSE_Z
    if scene.gripper_opening < grasp.width - HELD_SLACK:  # closed on top of it or beside it
        return move_to(scene, grasp.point + up(max(kept, ABOVE)), grasp.yaw, OPEN)
    return move_to(scene, grasp.point + up(kept), grasp.yaw, CLOSE if there else OPEN)


def _carry(scene: Scene, name: str, place: Place, *, outside: bool = False) -> Array:
    """`outside`: the place is in front of an opening, and what is beside it does not keep the palm up."""
    item, obstacles = scene.bodies[name], neighbours(scene, name)
    bottom = bottom_of(item)
    offset = place.position - item.position
    palm = _hand(scene, PALM)
    if place.crowded and np.linalg.norm(offset[:2]) > AT_PLACE:  # there it goes down beside what hangs over the palm
        out = way_out(obstacles, shape_of(item), palm)
        if out is not None:
            return move_to(scene, scene.gripper_position + out * POSITION_SCALE, None, CLOSE)
    palm_above_bottom = scene.gripper_position[2] + PALM_ABOVE_GRIP - bottom
    below, below_palm = (heights_on_the_way(obstacles, mover, offset) for mover in (shape_of(item), palm))
    rest = _rest(scene, name, place)
    if not outside:
        rest = max(rest, _palm_end(obstacles, palm, offset) + PALM_AIR - palm_above_bottom)
    aim = rest if outside else rest - SINK
    needed = aim + funnel(offset, max(below.highest, rest) - aim + CARRY, turn=0.0)
    needed = max(needed, below.passed + CARRY / 2, below_palm.passed - palm_above_bottom + CARRY / 2)
    # Sideways only as far as it is above what is in its way; at its place, what it ends above is not.
    at_place = np.linalg.norm(offset[:2]) < AT_PLACE
    blocking, palm_blocking = (one.ahead if at_place else one.highest for one in (below, below_palm))
    clear = min(max(blocking, palm_blocking - palm_above_bottom) + PASSING_AIR, needed)
    free = float(np.clip(1.0 + (bottom - clear) / (CARRY / 2), 0.0, 1.0))
    move = np.array([offset[0] * free, offset[1] * free, needed - bottom])
    return move_to(scene, scene.gripper_position + move, None, OPEN if place.is_below(item, rest) else CLOSE)


def _palm_end(obstacles: Boxes, palm: Boxes, offset: Vector) -> float:
    moved = Boxes(centres=palm.centres + offset, axes=palm.axes, half_sizes=palm.half_sizes)
    return heights_on_the_way(obstacles, moved, np.zeros(3)).highest


def is_placed(scene: Scene, name: str, place: Place) -> bool:
    return place.holds(scene.bodies[name], _rest(scene, name, place))


def _rest(scene: Scene, name: str, place: Place) -> float:
    """The height at which an object comes to rest at its place."""
    if not place.is_surface:
        return place.rest
    item = scene.bodies[name]
    return max(place.rest, support_under(neighbours(scene, name), shape_of(item), place.position - item.position))


def leave(scene: Scene, item: Body) -> Array:
    """Open, and up once the fingers are clear of the item."""
    clear = scene.gripper_opening > min(material(scene, shape_of(item)) + GRASP_MARGIN, FULLY_OPEN)
    return move_to(scene, scene.gripper_position + up(HOVER if clear else 0.0), None, OPEN)


def _hand(scene: Scene, part: slice) -> Boxes:
    return select(hand_boxes(scene.gripper_position[None], np.array([finger_yaw(scene)])), part)


def is_moved_with_closed_fingers(scene: Scene, name: str, place: Place) -> bool:
    """Dragged to its place, or pushed further in where it stands on the sill under a roof."""
    item = scene.bodies[name]
    if insert.is_roofed(scene, name, place):
        return insert.is_on_sill(place, item, neighbours(scene, name))
    return _is_dragged(item, place)


def _is_dragged(item: Body, place: Place) -> bool:
    """Over what it stands on, in place of being carried."""
    return _is_flat(item) and place.is_surface and abs(place.rest - bottom_of(item)) < SAME_LEVEL


def _is_flat(item: Body) -> bool:
    """Whether it lies flat and only its rim can be grasped: it slips. It may be tilted while it is dragged."""
    lengths = _lengths(item, item.rotation.T)
    thin = int(np.argmin(lengths))
    lies = abs(item.rotation[2, thin]) > LYING
    return bool(lies and lengths[thin] < FLAT and np.delete(lengths, thin).min() > MAX_OPENING)


def _lengths(item: Body, axes: Vector) -> Vector:
    """Of an item along each of `axes` [3, 3]."""
    low, high = np.array([extent(shape_of(item), axis) for axis in axes]).T
    return np.asarray(high - low)


def _push(scene: Scene, item: Body, place: Place) -> Array:
    """With open fingers across the way, from behind: two contacts keep the item straight."""
    way = _direction(place.position - item.position)
    side = np.array([-way[1], way[0]])
    yaw = float(np.arctan2(side[1], side[0]))
    reach = float(np.abs(item.rotation[:2, :2].T @ way) @ item.half_size[:2])
    height = item.position[2] - item.half_size[2] / 2
    behind = np.append(item.position[:2] - way * (reach + 3 * FINGER_THICKNESS), height)
    from_item = scene.gripper_position[:2] - item.position[:2]
    lateral, along = float(from_item @ side), float(from_item @ way)
    low = scene.gripper_position[2] < height + PUSH_LOW
    if low and along < -FINGER_THICKNESS and abs(lateral) < PUSH_LATERAL:  # a corner may stick in between the fingers
        ahead = scene.gripper_position[:2] + way * POSITION_SCALE * PUSH_SPEED - side * lateral
        return move_to(scene, np.append(ahead, height), yaw, OPEN)
    offset = behind - scene.gripper_position
    aim = behind + up(funnel(offset, 2 * item.half_size[2] + HOVER, turn=turn_to(scene, yaw)))
    return move_to(scene, aim, yaw, OPEN)


def handles(scene: Scene) -> list[str]:
    """Names of the handles that the scene marks."""
    return [name for name in scene.bodies if name.endswith("handle")]


def _handle_of(scene: Scene, region: str) -> Body:
    """The handle that shares the longest beginning of its name with the region."""
    return scene.bodies[max(handles(scene), key=lambda name: _common_prefix(name, region))]


def _common_prefix(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _handle_grasp(scene: Scene, handle: Body) -> Grasp:
    """Around the middle of the handle, across the graspable side that needs the smallest turn."""
    options = []
    for axis in (0, 1):
        width = 2 * float(handle.half_size[axis])
        if width + GRASP_MARGIN <= MAX_OPENING:
            yaw = float(np.arctan2(handle.rotation[1, axis], handle.rotation[0, axis]))
            options.append(Grasp(point=handle.position, yaw=yaw, width=width, cost=abs(turn_to(scene, yaw))))
    return min(options, key=lambda grasp: grasp.cost)


def _direction(offset: Vector) -> Vector:
    """The unit vector [2] of an offset's horizontal part."""
    flat: Vector = offset[:2]
    return flat / (np.linalg.norm(flat) + 1e-9)
