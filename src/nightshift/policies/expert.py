"""The scripted expert: proportional moves in operational space, a function of the scene alone.

It keeps no memory. Which phase it is in (go above, descend, close, lift, carry, lower, let go) follows from where
the gripper and the objects are, so a memoryless policy can imitate it. What to do follows from the BDDL goal:

    (up A)            grasp A and raise it
    (on A B), (in A B) grasp A, carry it over B, lower it, let go; push A if it is wider than the gripper opens
    (reach A)         move to A, as the fake environment asks
    (open R)          grasp the handle that belongs to region R and pull it away from R

All lengths below are about the robot (its gripper, its controller), none about a task.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.types import ACTION_DIM, Array, Body, Scene

Vector = NDArray[np.float64]

POSITION_SCALE = 0.05  # metres the controller aims ahead at action 1
ROTATION_SCALE = 0.5  # radians
POSITION_GAIN = 1.8
ROTATION_GAIN = 1.5

MAX_OPENING = 0.08  # metres between the open fingers
FULLY_OPEN = 0.072  # an opening beyond this is on its way to, or at, the maximum
GRASP_MARGIN = 0.01  # the open fingers must exceed an object's width by this
FINGER_LENGTH = 0.04  # from the finger tips to the palm: how far the fingers may reach down past an object's top
FINGER_THICKNESS = 0.012  # half, along the palm, measured from between the finger tips
FINGER_RADIUS = 0.03  # metres a finger moves per radian that the hand turns
TIP_BELOW_GRIP = 0.01  # the finger tips reach this far below the grip point
HOVER = 0.06  # metres of air between the finger tips and what they pass over
CARRY = 0.04  # metres of air below a carried object
FUNNEL = 3.0  # metres of height kept per metre of horizontal error
ALIGNED = 0.008  # horizontal error below which the gripper goes all the way down
CLOSE_XY, CLOSE_Z = 0.014, 0.02  # distances from the grasp point at which the fingers begin to close
HELD_WITHIN = 0.03  # an object further from the grasp point than this is not in the hand
HELD_SLACK = 0.004  # opening beyond the object's width at which it counts as gripped
RELEASE_XY, RELEASE_Z = 0.012, 0.008  # distances from its place at which an item is let go
PUSH_SPEED = 0.6  # of the fastest
PUSH_LATERAL = 0.02  # metres off the line through the item at which the gripper goes behind it anew
PUSH_LOW = 0.02  # metres above pushing height below which the gripper counts as down
OPEN, CLOSE = -1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where something is to be put."""

    position: Vector  # [3] its middle
    rest: float  # height the underside comes to rest at
    rim: float  # height to stay above until the item is over the place

    @classmethod
    def of(cls, body: Body, predicate: str) -> _Place:
        top = float(body.position[2] + body.half_size[2])
        bottom = float(body.position[2] - body.half_size[2])
        return cls(position=body.position, rest=bottom if predicate == "in" else top, rim=top)


class Expert:
    """Acts from privileged state.

    Example: action = Expert().act(env.scene())
    """

    def act(self, scene: Scene) -> Array:
        """An action [7] in [-1, 1]."""
        predicate, *names = scene.goal[0]
        if predicate == "reach":
            return _action(scene, scene.bodies[names[0]].position, None, OPEN)
        subject = scene.bodies[names[0]]
        if predicate == "open":
            return _pull(scene, _handle_of(scene, names[0]), subject)
        if predicate == "up":
            return _pick_and_place(scene, subject, None)
        target = _Place.of(scene.bodies[names[1]], predicate)
        if min(subject.half_size[:2]) * 2 + GRASP_MARGIN > MAX_OPENING:
            return _push(scene, subject, target)
        return _pick_and_place(scene, subject, target)


def _pick_and_place(scene: Scene, item: Body, target: _Place | None) -> Array:
    grasp = item.position + _up(max(0.0, item.half_size[2] - FINGER_LENGTH / 2))
    width, yaw = _grasp_choice(scene, item)
    if _is_gripped(scene, grasp, width):
        return _carry(scene, item, target)
    if target is not None and _is_placed(item, target):
        away = scene.gripper_position + _up(HOVER if scene.gripper_opening > width + GRASP_MARGIN else 0.0)
        return _action(scene, away, yaw, OPEN)
    return _reach_and_close(scene, grasp, item.position[2] + item.half_size[2], width, yaw)


def _reach_and_close(scene: Scene, grasp: Vector, top: float, width: float, yaw: float) -> Array:
    """Above the grasp point, down along a funnel, and close while arriving."""
    offset = grasp - scene.gripper_position
    clear = top + HOVER + TIP_BELOW_GRIP - grasp[2]
    aim = grasp + _up(_funnel(offset, clear, turn=_turn(scene, yaw)))
    # Fingers that have begun to close go on closing, even if the object gives way a little.
    closing = width < scene.gripper_opening < FULLY_OPEN
    slack = 2.0 if closing else 1.0
    there = np.linalg.norm(offset[:2]) < slack * CLOSE_XY and abs(offset[2]) < slack * CLOSE_Z
    return _action(scene, aim, yaw, CLOSE if there else OPEN)


def _carry(scene: Scene, item: Body, target: _Place | None) -> Array:
    if target is None:
        return _action(scene, scene.gripper_position + _up(POSITION_SCALE), None, CLOSE)
    bottom = item.position[2] - item.half_size[2]
    offset = target.position - item.position
    needed = target.rest + _funnel(offset, target.rim - target.rest + CARRY, turn=0.0)
    # Sideways only as far as the item is high enough to pass over the target's rim.
    free = float(np.clip(1.0 + (bottom - needed) / (CARRY / 2), 0.0, 1.0))
    move = np.array([offset[0] * free, offset[1] * free, needed - bottom])
    placed = np.linalg.norm(offset[:2]) < RELEASE_XY and bottom - target.rest < RELEASE_Z
    return _action(scene, scene.gripper_position + move, None, OPEN if placed else CLOSE)


def _push(scene: Scene, item: Body, target: _Place) -> Array:
    """With open fingers across the way, from behind: two contacts keep the item straight."""
    way = (target.position - item.position)[:2]
    way = way / (np.linalg.norm(way) + 1e-9)
    side = np.array([-way[1], way[0]])
    yaw = _nearest_yaw(scene, float(np.arctan2(side[1], side[0])), step=np.pi)
    reach = float(np.abs(item.rotation[:2, :2].T @ way) @ item.half_size[:2])
    height = item.position[2] - item.half_size[2] / 2
    behind = np.append(item.position[:2] - way * (reach + 3 * FINGER_THICKNESS), height)
    from_item = scene.gripper_position[:2] - item.position[:2]
    lateral, along = float(from_item @ side), float(from_item @ way)
    low = scene.gripper_position[2] < height + PUSH_LOW
    if low and along < -FINGER_THICKNESS and abs(lateral) < PUSH_LATERAL:  # a corner may stick in between the fingers
        ahead = scene.gripper_position[:2] + way * POSITION_SCALE * PUSH_SPEED - side * lateral
        return _action(scene, np.append(ahead, height), yaw, OPEN)
    offset = behind - scene.gripper_position
    aim = behind + _up(_funnel(offset, 2 * item.half_size[2] + HOVER, turn=_turn(scene, yaw)))
    return _action(scene, aim, yaw, OPEN)


def _pull(scene: Scene, handle: Body, region: Body) -> Array:
    grasp = handle.position
    width, yaw = _grasp_choice(scene, handle)
    if _is_gripped(scene, grasp, width):
        way = (handle.position - region.position)[:2]
        way = way / (np.linalg.norm(way) + 1e-9)
        aim = np.append(scene.gripper_position[:2] + way * POSITION_SCALE, grasp[2])
        return _action(scene, aim, yaw, CLOSE)
    return _reach_and_close(scene, grasp, grasp[2] + handle.half_size[2], width, yaw)


def _handle_of(scene: Scene, region: str) -> Body:
    """The handle that shares the longest beginning of its name with the region."""
    handles = [name for name in scene.bodies if name.endswith("handle")]
    if not handles:
        raise ValueError(f"the expert cannot open {region}: the scene has no handle, only {sorted(scene.bodies)}")
    return scene.bodies[max(handles, key=lambda name: _common_prefix(name, region))]


def _common_prefix(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _grasp_choice(scene: Scene, item: Body) -> tuple[float, float]:
    """Width between the fingers and the yaw of the finger axis: the graspable side that needs the smallest turn."""
    options = []
    for axis in (0, 1):
        width = 2 * float(item.half_size[axis])
        if width + GRASP_MARGIN <= MAX_OPENING:
            direction = item.rotation[:2, axis]
            yaw = _nearest_yaw(scene, float(np.arctan2(direction[1], direction[0])), step=np.pi)
            options.append((abs(_turn(scene, yaw)), width, yaw))
    _, width, yaw = min(options)
    return width, yaw


def _finger_yaw(scene: Scene) -> float:
    return float(np.arctan2(scene.gripper_rotation[1, 0], scene.gripper_rotation[0, 0]))


def _turn(scene: Scene, yaw: float) -> float:
    return float((yaw - _finger_yaw(scene) + np.pi) % (2 * np.pi) - np.pi)


def _nearest_yaw(scene: Scene, yaw: float, step: float) -> float:
    """The finger axis has no front: of `yaw` and its opposite, the one nearer to the present one."""
    now = _finger_yaw(scene)
    return now + (yaw - now + step / 2) % step - step / 2


def _is_gripped(scene: Scene, grasp: Vector, width: float) -> bool:
    near = np.linalg.norm(grasp - scene.gripper_position) < HELD_WITHIN
    return bool(near and scene.gripper_opening < width + HELD_SLACK)


def _is_placed(item: Body, target: _Place) -> bool:
    offset = target.position - item.position
    bottom = item.position[2] - item.half_size[2]
    return bool(np.linalg.norm(offset[:2]) < 2 * RELEASE_XY and bottom - target.rest < RELEASE_Z)


def _up(height: float) -> Vector:
    return np.array([0.0, 0.0, height])


def _funnel(offset: Vector, clear: float, turn: float) -> float:
    """Height to keep: none when aligned, more with horizontal distance and angle to turn, at most `clear`."""
    error = float(np.linalg.norm(offset[:2])) + FINGER_RADIUS * abs(turn)
    return float(np.clip(FUNNEL * (error - ALIGNED), 0.0, clear))


def _action(scene: Scene, aim: Vector, yaw: float | None, gripper: float) -> Array:
    move = np.clip(POSITION_GAIN * (aim - scene.gripper_position) / POSITION_SCALE, -1.0, 1.0)
    turn = ROTATION_GAIN * _level_and_turn(scene, yaw) / ROTATION_SCALE
    out = np.concatenate([move, np.clip(turn, -1.0, 1.0), [gripper]])
    assert out.shape == (ACTION_DIM,)
    return out.astype(np.float32)


def _level_and_turn(scene: Scene, yaw: float | None) -> Vector:
    """Rotation vector that points the hand straight down and its finger axis along `yaw` (None: as it is)."""
    down = np.cross(scene.gripper_rotation[:, 2], [0.0, 0.0, -1.0])
    return np.array([down[0], down[1], 0.0 if yaw is None else _turn(scene, yaw)])
