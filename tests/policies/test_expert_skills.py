"""The expert's skills on LIBERO's own scenes: joints, dragging, several goals one after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift import envs
from nightshift.envs.base import Env
from nightshift.envs.libero.suites import AS_LIBERO_DRAWS, LIBERO_10, LIBERO_GOAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import DEFAULT
from nightshift.policies.expert import Expert, aside, goals, hold, insert, joints, shove, skills
from nightshift.policies.expert.geometry import angles, overlap, rotation_vector, shape_of, shifted, turn_about
from nightshift.policies.expert.grasp import neighbours
from nightshift.policies.expert.place import Place, way_out
from nightshift.policies.expert.robot import WRIST_HOME, wrist_strain
from nightshift.types import Body, Boxes, Joint, Scene, Task
from tests.envs.test_suites import needs_assets
from tests.policies.test_expert import solves

TASKS = [task for suite in (LIBERO_GOAL, LIBERO_10) for task in suite.tasks()]


def env_of(name: str) -> Env:
    task = next(task for task in TASKS if name in task.name)
    return envs.suite(task.suite).make_env(task, DEFAULT, AS_LIBERO_DRAWS)


def slide(position: float) -> Joint:
    """A box that slides along x, with a bar in front of it."""
    link = Boxes(
        centres=np.array([[position, 0.0, 1.0], [position + 0.05, 0.0, 1.0]]),
        axes=np.tile(np.eye(3), (2, 1, 1)),
        half_sizes=np.array([[0.01, 0.1, 0.05], [0.008, 0.04, 0.008]]),
    )
    return Joint(
        kind="slide",
        position=position,
        limits=(0.0, 0.16),
        axis=np.array([1.0, 0.0, 0.0]),
        anchor=np.zeros(3),
        link=link,
        holds={"open": (0.14, np.inf), "close": (-np.inf, 0.005)},
    )


def slab(thickness: float, tilt: float = 0.0) -> Body:
    turn = np.array([[1.0, 0.0, 0.0], [0.0, np.cos(tilt), -np.sin(tilt)], [0.0, np.sin(tilt), np.cos(tilt)]])
    half = np.array([0.07, 0.07, thickness / 2])
    shape = Boxes(centres=np.zeros((1, 3)), axes=turn[None], half_sizes=half[None])
    return Body(position=np.zeros(3), rotation=turn, half_size=half, boxes=shape)


@pytest.mark.parametrize("scale", [0.75, 1.0 - 1e-12, 1.0, 1.25])
def test_a_block_of_4_cm_is_pushed_and_a_plate_dragged_at_every_size_of_object_sizes(scale: float) -> None:
    assert not skills._is_flat(slab(0.04 * scale))
    assert skills._is_flat(slab(0.019 * scale))
    assert skills._is_flat(slab(0.019 * scale, tilt=0.08)), "also while it is dragged"
    assert skills._is_flat(slab(0.019 * scale, tilt=0.5)), "also where the fingers press its rim up"
    assert not skills._is_flat(slab(0.019 * scale, tilt=1.5)), "a plate that stands on its rim"


def test_a_packet_that_the_fingers_can_hold_is_not_flat_whichever_way_it_is_turned() -> None:
    half = np.array([0.04, 0.023, 0.01])
    for yaw in (0.0, np.pi / 4):
        turn = turn_about(np.array([0.0, 0.0, 1.0]), yaw)
        shape = Boxes(centres=np.zeros((1, 3)), axes=turn[None], half_sizes=half[None])
        assert not skills._is_flat(Body(position=np.zeros(3), rotation=turn, half_size=half, boxes=shape))


def test_the_block_of_libero_mini_is_pushed_however_its_height_is_rounded() -> None:
    task = next(task for task in LIBERO_MINI.tasks() if task.name == "push_block_to_zone")
    env = LIBERO_MINI.make_env(task)
    env.reset("eval", 0)
    block = env.scene().bodies["block_1"]
    assert block.boxes is not None
    lower = replace(block, boxes=replace(block.boxes, half_sizes=block.boxes.half_sizes - 1e-6))
    assert not skills._is_flat(block) and not skills._is_flat(lower)


@needs_assets
@pytest.mark.parametrize(
    "name",
    ["turn_on_the_stove", "open_the_middle_drawer", "LIVING_ROOM_SCENE6", "in_the_microwave_and_close_it"],
    ids=["a knob is pushed round", "a handle is pulled", "two goals in turn", "a mug is put under a roof"],
)
def test_expert_solves_a_task_of_each_skill(name: str) -> None:
    assert solves(env_of(name), "eval", 0)


@needs_assets
def test_fingers_stay_closed_while_they_drag_a_plate() -> None:
    """If they opened now and then, a clone would learn to stand still half of the time."""
    env = env_of("push_the_plate_to_the_front_of_the_stove")
    env.reset("eval", 0)
    noise = np.random.default_rng(0)
    actions = []
    for _ in range(DEFAULT.max_steps["libero_goal"]):
        actions.append(Expert().act(env.scene()))
        if env.step(np.clip(actions[-1] + 0.15 * noise.standard_normal(7), -1.0, 1.0)).success:
            break
    else:
        pytest.fail("the plate is not there")
    assert all(action[6] == 1.0 for action in actions)
    assert all(np.abs(action[:3]).max() > 0.05 for action in actions)


@needs_assets
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.name))
def test_expert_solves_two_of_three_init_states_of_each_task(task: Task) -> None:
    env = envs.suite(task.suite).make_env(task, DEFAULT, AS_LIBERO_DRAWS)
    assert sum(solves(env, "eval", init_state) for init_state in range(3)) >= 2


@needs_assets
def test_what_is_to_be_closed_comes_last_and_what_something_goes_into_is_opened_first() -> None:
    closing = env_of("bottom_drawer_of_the_cabinet_and_close")
    closing.reset("eval", 0)
    assert [goal[0] for goal in goals.in_order(closing.scene())] == ["open", "in", "close"]
    opening = env_of("open_the_top_drawer_and_put_the_bowl_inside")
    opening.reset("eval", 0)
    drawer = "wooden_cabinet_1_top_region"
    assert [goal[0] for goal in goals.in_order(opening.scene())] == ["aside", "open", "in"]
    needed, _ = goals.current(opening.scene())
    assert needed == ("aside", "akita_black_bowl_1", drawer), "the bowl stands where the drawer will be"


@needs_assets
def test_a_joint_of_the_scene_has_the_positions_where_its_predicates_hold() -> None:
    env = env_of("open_the_middle_drawer")
    env.reset("eval", 0)
    scene = env.scene()
    drawer, knob = scene.joints["wooden_cabinet_1_middle_region"], scene.joints["flat_stove_1"]
    assert drawer.kind == "slide"
    assert drawer.holds["open"] == (-np.inf, -0.14)
    assert knob.kind == "hinge"
    assert set(knob.holds) == {"turnon", "turnoff"}
    assert joints.way_to(drawer, "open") == -1.0
    assert not joints.is_at(drawer, "open")


def test_the_cheapest_hold_of_a_bar_has_the_finger_axis_across_it() -> None:
    found = hold._holds_of(slide(0.0).link)
    around_the_bar = [one for one in found if one.width < 0.03 and abs(one.point[0] - 0.05) < 0.01]
    best = min(around_the_bar, key=lambda one: one.cost)
    assert abs(best.rotation[1, 0]) < 1e-6


def test_holds_move_with_their_link() -> None:
    before, after = (hold._holds_of(slide(position).link) for position in (0.0, 0.1))
    moved = np.array([one.point for one in after]) - np.array([one.point for one in before])
    np.testing.assert_allclose(moved, np.tile([0.1, 0.0, 0.0], (len(before), 1)), atol=1e-9)


def test_a_hand_that_has_drifted_comes_back_to_its_hold_while_it_pulls() -> None:
    drawer = slide(0.05)
    best = min((one for one in hold._holds_of(drawer.link) if one.rotation[2, 2] < -0.9), key=lambda one: one.cost)
    scene = replace(scene_with(drawer), gripper_position=best.point, gripper_opening=best.width)
    held = replace(scene, gripper_rotation=best.rotation)
    assert hold.is_held(held, drawer)
    pulled = joints.bring_to(held, drawer, "open")
    np.testing.assert_allclose(pulled, [1.0, *np.zeros(5), 1.0], atol=1e-6)
    drifted = replace(held, gripper_position=best.point + np.array([0.0, 0.006, 0.004]))
    tilted = replace(drifted, gripper_rotation=turn_about(np.array([1.0, 0.0, 0.0]), 0.1) @ best.rotation)
    action = joints.bring_to(tilted, drawer, "open")
    assert action[0] == 1.0
    assert action[1] < -0.1 and action[2] < -0.1 and action[3] < -0.1


def test_fingers_that_close_around_a_handle_do_not_go_back_from_it() -> None:
    """They would hold its end alone, and slip off when they pull."""
    drawer = slide(0.05)
    grip = min((one for one in hold._holds_of(drawer.link) if one.rotation[2, 2] < -0.9), key=lambda one: one.cost)
    beside = grip.point + 0.012 * grip.rotation[:, 1]
    scene = replace(scene_with(drawer), gripper_position=beside, gripper_rotation=grip.rotation)
    closing = hold.take(replace(scene, gripper_opening=0.05), grip)
    assert closing[6] == 1.0
    np.testing.assert_allclose(closing[:3] @ grip.rotation[:, 2], 0.0, atol=1e-6)
    coming = hold.take(replace(scene, gripper_position=beside + 0.02 * grip.rotation[:, 1]), grip)
    assert coming[6] == -1.0
    assert coming[:3] @ grip.rotation[:, 2] < -0.1


def drawer_above(item: tuple[float, float, float], **others: Boxes) -> Scene:
    """A closed drawer that opens towards +x, 0.2 m above the ground, and a block that is to go into it."""
    block = boxes((item, (0.02, 0.02, 0.03)))
    return replace(scene_with(slide(0.0), block=block, **others), goal=(("in", "block", "drawer"),))


def test_what_stands_where_a_drawer_will_be_goes_aside_by_the_shortest_free_way() -> None:
    below = drawer_above((0.18, 0.09, 0.8))
    drawer = below.joints["drawer"]
    assert aside.is_needed(below, "block", drawer)
    way = aside.way_aside(below, "block", drawer)
    assert way[1] > 0.04 and np.linalg.norm(way) < 0.07, "out at the near side"
    blocked = drawer_above((0.18, 0.09, 0.8), bottle=boxes(((0.18, 0.16, 0.85), (0.02, 0.02, 0.1))))
    around = aside.way_aside(blocked, "block", drawer)
    assert np.linalg.norm(around - way) > 0.02
    moved = shifted(shape_of(blocked.bodies["block"]), around)
    assert (overlap(moved, shape_of(blocked.bodies["bottle"])) < 0.0).all()


@pytest.mark.parametrize("item", [(0.18, 0.3, 0.8), (0.5, 0.0, 0.8), (0.18, 0.0, 1.2)], ids=["beside", "far", "above"])
def test_what_does_not_stand_below_an_open_drawer_stays(item: tuple[float, float, float]) -> None:
    scene = drawer_above(item)
    assert not aside.is_needed(scene, "block", scene.joints["drawer"])


def test_aside_a_grasped_object_is_slid_and_then_let_go() -> None:
    below = drawer_above((0.18, 0.09, 0.8))
    held = replace(below, gripper_position=np.array([0.18, 0.09, 0.81]), gripper_opening=0.04)
    sliding, there = (skills.slide(held, "block", np.array([0.0, y, 0.0])) for y in (0.1, 0.0))
    assert sliding[1] == 1.0 and sliding[6] == 1.0
    assert there[6] == -1.0


def test_a_carried_object_is_lowered_before_it_is_let_go_aside() -> None:
    table = boxes(((0.0, 0.0, 0.7), (1.0, 1.0, 0.08)))
    raised = drawer_above((0.18, 0.5, 1.1), table=table)
    held = replace(raised, gripper_position=np.array([0.18, 0.5, 1.11]), gripper_opening=0.04)
    action = skills.slide(held, "block", np.zeros(3))
    assert action[2] < 0.0 and action[6] == 1.0
    lowered = drawer_above((0.18, 0.5, 0.8), table=table)
    down = replace(lowered, gripper_position=np.array([0.18, 0.5, 0.81]), gripper_opening=0.04)
    assert skills.slide(down, "block", np.zeros(3))[6] == -1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_face_is_pushed_along_the_way_of_its_joint_with_the_fingers_across(sign: float) -> None:
    points, ways, _ = shove._contacts(slide(0.1), sign)
    assert len(points)
    np.testing.assert_allclose(ways, np.tile([sign, 0.0, 0.0], (len(ways), 1)), atol=1e-9)
    for tilt in shove.TILTS:
        rotations = shove.hand_rotations(ways, tilt)
        np.testing.assert_allclose((rotations[:, :, 0] * ways).sum(axis=1), 0.0, atol=1e-9)
        np.testing.assert_allclose(np.linalg.det(rotations), 1.0)
        np.testing.assert_allclose(rotations[:, 2, 2], -np.cos(tilt))


def boxes(*centres_and_halves: tuple[tuple[float, float, float], tuple[float, float, float]]) -> Boxes:
    centres, halves = np.array(centres_and_halves).transpose(1, 0, 2)
    return Boxes(centres=centres, axes=np.tile(np.eye(3), (len(centres), 1, 1)), half_sizes=halves)


def solid(shape: Boxes) -> Body:
    return Body(position=shape.centres[0], rotation=np.eye(3), half_size=shape.half_sizes[0], boxes=shape)


def scene_with(joint: Joint, **shapes: Boxes) -> Scene:
    return Scene(
        gripper_position=np.array([0.3, 0.0, 1.3]),
        gripper_rotation=np.diag([1.0, -1.0, -1.0]),
        gripper_opening=0.08,
        bodies={"cabinet": solid(joint.link), **{name: solid(shape) for name, shape in shapes.items()}},
        joints={"drawer": joint},
        goal=(("close", "drawer"),),
    )


def test_the_hand_leans_back_if_upright_the_arm_would_hit_something_once_the_drawer_is_closed() -> None:
    drawer, shelf = slide(0.15), boxes(((-0.05, 0.0, 1.25), (0.06, 0.15, 0.12)))
    upright, leaning = (shove.choose(scene_with(drawer, **shapes), drawer, -1.0) for shapes in ({}, {"shelf": shelf}))
    assert upright is not None and leaning is not None
    assert upright.rotation[2, 2] == pytest.approx(-1.0)
    assert leaning.rotation[2, 2] > -0.9


def test_a_hand_that_was_tilted_by_what_it_pushes_goes_back_before_it_pushes_on() -> None:
    drawer = slide(0.15)
    scene = scene_with(drawer)
    contact = shove.choose(scene, drawer, -1.0)
    assert contact is not None
    behind = replace(scene, gripper_position=contact.point - shove.FINGER_HALF * contact.way)
    forward = []
    for tilt in (0.0, 0.3, 0.8):
        tilted = turn_about(contact.rotation[:, 0], tilt) @ contact.rotation
        action = shove.push(replace(behind, gripper_rotation=tilted), drawer, contact)
        forward.append(float(action[:3] @ contact.way))
    assert forward[0] == forward[1] > 0.0 > forward[2]


def test_what_lies_in_a_drawer_moves_with_it_and_is_not_in_the_way() -> None:
    drawer = slide(0.15)
    inside, beside = boxes(((0.17, 0.0, 1.0), (0.01, 0.01, 0.01))), boxes(((0.3, 0.0, 1.0), (0.01, 0.01, 0.01)))
    fixed = shove._not_moved(scene_with(drawer, inside=inside, beside=beside), drawer)
    np.testing.assert_array_equal(fixed.centres, beside.centres)


def test_of_the_two_ways_to_turn_the_hand_the_wrist_can_reach_one() -> None:
    """To the left of the arm's foot, a quarter turn to the right would turn the last joint past its end."""
    foot, grips = np.zeros(3), np.tile([0.2, 0.22, 0.0], (2, 1))
    right = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
    over = wrist_strain(foot, grips, np.array([right, right * np.array([-1.0, -1.0, 1.0])]))
    assert over[0] > 0.0
    assert over[1] == 0.0


def test_the_wrist_reaches_an_orientation_by_the_shorter_way_around() -> None:
    """An angle of 3.9 to one side is one of 2.38 to the other."""
    yaw = WRIST_HOME + np.pi / 2 - 3.9
    rotation = turn_about(np.array([0.0, 0.0, 1.0]), yaw) @ np.diag([1.0, -1.0, -1.0])
    assert wrist_strain(np.zeros(3), np.array([[0.5, 0.0, 0.0]]), rotation[None])[0] == 0.0


def test_a_held_item_moves_out_the_short_way_from_under_what_hangs_over_it() -> None:
    item, palm = boxes(((0.0, 0.0, 1.0), (0.05, 0.05, 0.02))), boxes(((0.0, 0.0, 1.1), (0.1, 0.03, 0.04)))
    out = way_out(boxes(((0.02, 0.2, 1.2), (0.3, 0.16, 0.01))), item, palm)
    assert out is not None and out.tolist() == [0.0, -1.0, 0.0]
    assert way_out(boxes(((0.02, 0.3, 1.2), (0.3, 0.16, 0.01))), item, palm) is None
    assert way_out(boxes(((0.0, 0.0, 0.9), (0.3, 0.3, 0.05))), item, palm) is None, "below it"


def test_a_held_item_goes_down_at_its_place_beside_what_hangs_over_a_corner() -> None:
    """A corner of a cabinet beside an open drawer; elsewhere the item is first moved out from under it."""
    corner = boxes(((0.09, 0.07, 1.3), (0.02, 0.015, 0.1)))
    scene = scene_with(slide(0.5), item=boxes(((0.0, 0.0, 1.0), (0.03, 0.06, 0.02))), corner=corner)
    scene = replace(scene, gripper_position=np.array([0.0, 0.0, 1.0]), gripper_opening=0.06)
    item = scene.bodies["item"]
    here = Place(body=item, inside=False, rest=0.9, position=item.position, crowded=True)
    elsewhere = replace(here, position=item.position - np.array([0.1, 0.0, 0.0]))
    down, out = skills._carry(scene, "item", here), skills._carry(scene, "item", elsewhere)
    assert down[2] < 0.0 and down[1] == pytest.approx(0.0, abs=1e-6)
    assert out[1] < 0.0 and out[2] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("angle", [0.0, 0.4, 1.6, 3.0, np.pi])
def test_a_rotation_vector_is_the_axis_times_the_angle(angle: float) -> None:
    axis = np.array([2.0, -1.0, 2.0]) / 3
    rotation = turn_about(axis, angle)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(np.abs(rotation_vector(rotation)), np.abs(angle * axis), atol=1e-6)
    assert float(angles(rotation, np.eye(3))) == pytest.approx(angle, abs=1e-6)
    if angle < np.pi:
        np.testing.assert_allclose(rotation_vector(rotation), angle * axis, atol=1e-6)


OVEN = {
    "floor": ((0.0, 0.1, 0.99), (0.12, 0.1, 0.01)),
    "roof": ((0.0, 0.1, 1.16), (0.12, 0.1, 0.01)),
    "back": ((0.0, 0.21, 1.08), (0.12, 0.01, 0.09)),
    "left": ((-0.13, 0.1, 1.08), (0.01, 0.1, 0.09)),
    "right": ((0.13, 0.1, 1.08), (0.01, 0.1, 0.09)),
}
"""Open towards -y."""


def oven_scene(item: Boxes, walls: tuple[str, ...] = tuple(OVEN)) -> tuple[Scene, Place]:
    region = Body(position=np.array([0.0, 0.1, 1.08]), rotation=np.eye(3), half_size=np.array([0.1, 0.09, 0.08]))
    scene = scene_with(slide(1.0), item=item, oven=boxes(*(OVEN[wall] for wall in walls)))
    return scene, Place.of(region, "in")


def test_a_region_under_a_roof_is_entered_by_its_open_side() -> None:
    pan = boxes(((0.0, -0.4, 0.95), (0.03, 0.03, 0.03)), ((0.0, -0.47, 0.96), (0.008, 0.04, 0.01)))
    scene, place = oven_scene(pan)
    open_above, _ = oven_scene(pan, walls=("floor", "back", "left", "right"))
    obstacles = neighbours(scene, "item")
    assert insert.is_roofed(scene, "item", place)
    assert not insert.is_roofed(open_above, "item", place)
    lying = {**open_above.bodies, "butter": solid(boxes(OVEN["roof"]))}
    goal = (("in", "butter", "oven"), ("in", "item", "oven"))
    assert not insert.is_roofed(replace(open_above, bodies=lying, goal=goal), "item", place), (
        "what was put in is no roof"
    )
    np.testing.assert_allclose(insert._inward(place, obstacles), [0.0, 1.0, 0.0], atol=1e-9)


def test_no_way_leads_into_what_has_no_upright_side() -> None:
    pan = boxes(((0.0, -0.4, 0.95), (0.03, 0.03, 0.03)))
    scene, place = oven_scene(pan)
    tipped = turn_about(np.array([1.0, -1.0, 0.0]) / np.sqrt(2), np.arctan(np.sqrt(2)))  # every axis by at least 35°
    with pytest.raises(ValueError, match="none of its sides is upright"):
        insert.is_on_sill(
            replace(place, body=replace(place.body, rotation=tipped)),
            scene.bodies["item"],
            neighbours(scene, "item"),
        )


def test_what_goes_under_a_roof_is_held_by_what_still_sticks_out() -> None:
    """A pan with its handle towards the hand: the whole of it would fit between the fingers."""
    pan = boxes(((0.0, -0.4, 0.95), (0.03, 0.03, 0.03)), ((0.0, -0.47, 0.96), (0.008, 0.04, 0.01)))
    scene, place = oven_scene(pan)
    grasp = insert.choose(scene, "item", place)
    assert grasp is not None
    assert grasp.point[1] < -0.44
    assert abs(np.sin(grasp.yaw)) < 1e-4, "the finger axis is across the way in"
    held = replace(scene, gripper_position=grasp.point, gripper_opening=grasp.width)
    way = insert.way_in(held, "item", place)
    hand_ends = grasp.point[1] + way.spot[1] - scene.bodies["item"].position[1] + 0.032
    assert hand_ends < 0.0, "the palm stays outside"
    assert way.spot[1] > 0.01
    assert way.front[1] < -0.03


def test_what_stands_on_the_sill_is_pushed_in_by_closed_fingers_behind_it() -> None:
    pan = boxes(((0.0, 0.0, 1.03), (0.03, 0.03, 0.03)), ((0.0, -0.07, 1.03), (0.008, 0.04, 0.01)))
    scene, place = oven_scene(pan)
    behind = replace(scene, gripper_position=np.array([0.0, -0.13, 1.03]), gripper_opening=0.0)
    action = skills.bring(behind, "item", place)
    assert action[1] > 0.0 and action[6] == 1.0
    above = replace(behind, gripper_position=np.array([0.0, 0.0, 1.2]))
    assert skills.bring(above, "item", place)[1] < 0.0
    around = replace(behind, gripper_position=np.array([0.0, -0.09, 1.03]), gripper_opening=0.05)
    assert skills.bring(around, "item", place)[6] == -1.0, "first let go of it"


def test_a_door_is_pushed_at_its_panel_and_not_at_its_narrow_handle() -> None:
    link = boxes(((0.0, 0.13, 1.0), (0.012, 0.13, 0.09)), ((-0.045, 0.24, 1.0), (0.01, 0.01, 0.075)))
    door = Joint(
        kind="hinge",
        position=-1.5,
        limits=(-2.0, 0.0),
        axis=np.array([0.0, 0.0, -1.0]),
        anchor=np.array([0.0, 0.0, 1.0]),
        link=link,
        holds={"open": (-np.inf, -1.3), "close": (-0.005, np.inf)},
    )
    contact = shove.choose(scene_with(door), door, 1.0)
    assert contact is not None
    np.testing.assert_allclose(contact.way, [1.0, 0.0, 0.0], atol=1e-9)
    assert contact.point[0] == pytest.approx(-0.012)


BASKET = (
    ((0.0, 0.0, 0.905), (0.07, 0.07, 0.005)),
    ((0.075, 0.0, 0.97), (0.005, 0.08, 0.07)),
    ((-0.075, 0.0, 0.97), (0.005, 0.08, 0.07)),
    ((0.0, 0.075, 0.97), (0.08, 0.005, 0.07)),
    ((0.0, -0.075, 0.97), (0.08, 0.005, 0.07)),
)


def over_basket(half_size: tuple[float, float, float], beside: float, height: float) -> tuple[Scene, Place]:
    """A packet in the hand."""
    packet = boxes(((beside, 0.0, height), half_size))
    region = Body(position=np.array([0.0, 0.0, 0.98]), rotation=np.eye(3), half_size=np.array([0.06, 0.06, 0.07]))
    scene = scene_with(slide(1.0), item=packet, basket=boxes(*BASKET))
    bodies = {**scene.bodies, "region": region}
    hand = packet.centres[0] + [0.0, 0.0, max(half_size[2] - 0.01, 0.0)]
    scene = replace(scene, bodies=bodies, joints={}, goal=(("in", "item", "region"),))
    return replace(scene, gripper_position=hand, gripper_opening=2 * half_size[0]), Place.of(region, "in")


@pytest.mark.parametrize("beside", [0.02, 0.028, 0.043])
@pytest.mark.parametrize("above", [0.0, 0.02, 0.05])
def test_above_a_basket_a_held_object_moves_to_the_middle_from_every_height(beside: float, above: float) -> None:
    """If it had to rise first, a clone that confuses rising with lowering would stay there."""
    scene, place = over_basket((0.015, 0.062, 0.05), beside, 1.076 + above)
    action = skills.bring(scene, "item", place)
    assert action[0] < -0.3
    assert action[6] == 1.0


@given(st.floats(0.0, 0.05), st.floats(1.0, 1.2), st.floats(0.012, 0.04), st.floats(0.01, 0.05))
def test_a_held_object_never_stops_on_its_way_to_a_basket(
    beside: float, height: float, length: float, half_height: float
) -> None:
    scene, place = over_basket((length, 0.06, half_height), beside, height)
    action = skills.bring(scene, "item", place)
    assert np.abs(action[:3]).max() > 0.1 or action[6] == -1.0


def test_a_held_object_reaches_the_height_where_it_is_let_go_at_speed() -> None:
    table = boxes(((0.0, 0.0, 0.9), (0.5, 0.5, 0.1)))
    packet = boxes(((0.0, 0.0, 1.03), (0.02, 0.02, 0.02)))
    region = Body(position=np.array([0.0, 0.0, 1.0]), rotation=np.eye(3), half_size=np.array([0.05, 0.05, 0.001]))
    scene = scene_with(slide(1.0), item=packet, table=table)
    scene = replace(
        scene, gripper_position=packet.centres[0], gripper_opening=0.04, bodies={**scene.bodies, "region": region}
    )
    action = skills.bring(scene, "item", Place.of(region, "on"))
    assert action[2] < -0.6
    assert action[6] == 1.0


def test_objects_that_share_a_region_stand_in_a_row_along_their_narrow_sides() -> None:
    region = Body(position=np.array([0.5, 0.2, 1.0]), rotation=np.eye(3), half_size=np.array([0.075, 0.075, 0.002]))
    pots = [solid(boxes(((x, 0.0, 1.1), (0.04, 0.07, 0.07)))) for x in (0.0, 0.3)]
    one, other = (Place.of(region, "on", pots, number).position - region.position for number in range(2))
    np.testing.assert_allclose(one, -other, atol=1e-9)
    np.testing.assert_allclose(other, [0.05, 0.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(Place.of(region, "on", pots[:1], 0).position, region.position)
    wide = [solid(boxes(((x, 0.0, 1.1), (0.2, 0.2, 0.07)))) for x in (0.0, 0.5)]
    assert np.abs(Place.of(region, "on", wide, 1).position - region.position).max() < 0.06
