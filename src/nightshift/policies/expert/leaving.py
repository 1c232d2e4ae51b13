"""Between two goals: let go of what the last one was about and go back from it, before anything else."""

from __future__ import annotations

from nightshift.policies.expert import skills
from nightshift.policies.expert.geometry import overlap, select, shape_of
from nightshift.policies.expert.goals import Goal, place_of
from nightshift.policies.expert.grasp import HELD_SLACK, is_held, material
from nightshift.policies.expert.hold import release
from nightshift.policies.expert.motion import move_hand
from nightshift.policies.expert.robot import FINGERS, GRIP, OPEN, turned_hand_boxes
from nightshift.types import Array, Boxes, Scene

NEAR = 0.02  # metres between the open fingers and an object, from which on the hand is free of it
ROOM = 0.05  # metres that a turned hand goes back from a handle before it turns again
POINTS_DOWN = -0.9  # of the hand's axis along the vertical: below this it can rise out of everything


def is_closed_on_nothing(scene: Scene, goal: Goal) -> bool:
    """Whether the fingers have closed without the object that they are to bring somewhere, as after a push."""
    if goal[0] not in ("on", "in") or scene.gripper_opening > HELD_SLACK:
        return False
    if skills.is_moved_with_closed_fingers(scene, goal[1], place_of(scene, goal)):
        return False
    return material(scene, shape_of(scene.bodies[goal[1]])) <= 0.0


def open_fingers(scene: Scene) -> Array:
    return move_hand(scene, scene.gripper_position, scene.gripper_rotation, OPEN)


def is_needed(scene: Scene, reached: Goal, goal: Goal) -> bool:
    """Whether the fingers are still at what a reached goal is about, and hold nothing for the present one."""
    if goal[1] == reached[1] or (_is_of_an_object(scene, goal) and is_held(scene, goal[1])):
        return False
    shape = _shape(scene, reached)
    if reached[1] in scene.joints and scene.gripper_rotation[2, 2] < POINTS_DOWN:
        return material(scene, shape) > 0.0
    hand = turned_hand_boxes(scene.gripper_position[None], scene.gripper_rotation[None])
    room = ROOM if reached[1] in scene.joints else NEAR
    return any(bool((overlap(select(hand, part), shape) > -room).any()) for part in (FINGERS, GRIP))


def _is_of_an_object(scene: Scene, goal: Goal) -> bool:
    """And not of a joint, whose region or fixture may be a body too."""
    return goal[1] in scene.bodies and goal[1] not in scene.joints


def leave(scene: Scene, reached: Goal) -> Array:
    if reached[1] in scene.joints:
        return release(scene, _shape(scene, reached))
    return skills.leave(scene, scene.bodies[reached[1]])


def _shape(scene: Scene, reached: Goal) -> Boxes:
    """The object that was put somewhere, or what the joint moves."""
    if reached[1] in scene.joints:
        return scene.joints[reached[1]].link
    return shape_of(scene.bodies[reached[1]])
