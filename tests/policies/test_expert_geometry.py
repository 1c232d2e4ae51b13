"""The expert's geometry: lines through boxes, overlaps, reach, and the grasps that follow from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nightshift.policies.expert.geometry import crossings, extent, join, merge, overlap
from nightshift.policies.expert.grasp import Grasp, choose, grasps
from nightshift.policies.expert.place import heights_on_the_way
from nightshift.policies.expert.robot import LONGEST_ARM, MAX_OPENING, strain, within_reach
from nightshift.types import Body, Boxes, Scene

Vector = NDArray[np.float64]
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
NOTHING = Boxes(centres=np.zeros((0, 3)), axes=np.zeros((0, 3, 3)), half_sizes=np.zeros((0, 3)))
seeds = st.integers(0, 2**32 - 1)
few_examples = settings(max_examples=20, deadline=None)
"""Looking for grasps takes tens of milliseconds."""


def turned(angle: float) -> Vector:
    return np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1.0]])


def box(centre: list[float], half_size: list[float], angle: float = 0.0) -> Boxes:
    return Boxes(centres=np.array([centre]), axes=turned(angle)[None], half_sizes=np.array([half_size]))


def bowl(radius: float = 0.05, height: float = 0.05, wall: float = 0.005, count: int = 16) -> Boxes:
    """A ring of upright walls on a thin floor, about the origin, standing on z = 0."""
    angles = np.arange(count) * 2 * np.pi / count
    half = [wall / 2, 1.1 * radius * np.pi / count, height / 2]
    walls = [box([radius * np.cos(a), radius * np.sin(a), height / 2], half, float(a)) for a in angles]
    return join([*walls, box([0, 0, 0.002], [radius * 0.7, radius * 0.7, 0.002])])


def random_boxes(seed: int, count: int) -> Boxes:
    rng = np.random.default_rng(seed)
    axes = np.stack([np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(count)])
    return Boxes(centres=rng.uniform(-1, 1, (count, 3)), axes=axes, half_sizes=rng.uniform(0.05, 0.5, (count, 3)))


def scene_with(**shapes: Boxes) -> Scene:
    bodies = {
        name: Body(position=shape.centres.mean(axis=0), rotation=np.eye(3), half_size=np.ones(3), boxes=shape)
        for name, shape in shapes.items()
    }
    return Scene(
        gripper_position=np.array([0.0, 0.0, 0.3]),
        gripper_rotation=DOWN,
        gripper_opening=0.08,
        bodies=bodies,
        joints={},
        goal=(("up", "item"),),
    )


def chosen(**shapes: Boxes) -> Grasp:
    grasp = choose(scene_with(**shapes), "item")
    assert grasp is not None
    return grasp


def inside(shape: Boxes, points: Vector, index: int) -> NDArray[np.bool_]:
    local = np.abs((points - shape.centres[index]) @ shape.axes[index])
    return np.asarray((local <= shape.half_sizes[index] + 1e-9).all(axis=-1))


@given(seeds)
def test_a_line_is_inside_a_box_between_its_crossings_and_nowhere_else(seed: int) -> None:
    shape, rng = random_boxes(seed, 3), np.random.default_rng(seed + 1)
    origin, direction = rng.uniform(-1, 1, 3), rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    enter, leave = crossings(shape, origin[None], direction)
    steps = np.linspace(-3, 3, 601)
    for index in range(3):
        within = (steps >= enter[0, index]) & (steps <= leave[0, index])
        ends = np.array([enter[0, index], leave[0, index]])
        clear = (np.abs(steps[:, None] - ends) > 1e-6).all(axis=1)  # of rounding
        points = origin + steps[clear, None] * direction
        np.testing.assert_array_equal(inside(shape, points, index), within[clear])


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.001, 0.5)), min_size=1, max_size=20), st.floats(0, 0.2))
def test_merged_intervals_cover_all_and_lie_further_apart_than_the_gap(
    spans: list[tuple[float, float]], gap: float
) -> None:
    enter = np.array([start for start, _ in spans])
    leave = enter + np.array([length for _, length in spans])
    merged = merge(enter, leave, gap)
    assert all(any(a <= start and end <= b for a, b in merged) for start, end in zip(enter, leave, strict=True))
    assert all(after[0] > before[1] + gap for before, after in pairwise(merged))


def test_lines_that_hit_nothing_leave_nothing_to_merge() -> None:
    assert merge(np.array([1.0]), np.array([0.0]), gap=0.1) == []


@given(seeds)
def test_overlap_is_symmetric_and_agrees_with_common_points(seed: int) -> None:
    one, other = random_boxes(seed, 4), random_boxes(seed + 1, 3)
    depth = overlap(one, other)
    np.testing.assert_allclose(depth, overlap(other, one).T, atol=1e-12)
    points = np.random.default_rng(seed).uniform(-1, 1, (300, 3))
    for i in range(4):
        for j in range(3):
            if (inside(one, points, i) & inside(other, points, j)).any():
                assert depth[i, j] >= 0


@given(seeds)
def test_extent_is_that_of_the_corners(seed: int) -> None:
    shape = random_boxes(seed, 3)
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
    corners = np.concatenate(
        [c + (signs * h) @ a.T for c, a, h in zip(shape.centres, shape.axes, shape.half_sizes, strict=True)]
    )
    np.testing.assert_allclose(extent(shape, np.array([0, 0, 1.0])), (corners[:, 2].min(), corners[:, 2].max()))


@few_examples
@given(st.floats(-3, 3), st.floats(0.01, 0.034), st.floats(0.05, 0.1))
def test_a_box_is_grasped_across_its_narrow_side_wherever_it_points(angle: float, narrow: float, wide: float) -> None:
    found = grasps(box([0.1, 0.2, 0.03], [narrow, wide, 0.03], angle), NOTHING, turned(angle))
    best = min(found, key=lambda grasp: grasp.cost)
    assert best.width == pytest.approx(2 * narrow, abs=1e-3)
    assert abs(np.sin(best.yaw - angle)) < 1e-2
    np.testing.assert_allclose(best.point[:2], [0.1, 0.2], atol=1e-3)


@few_examples
@given(seeds)
def test_grasps_move_with_the_object(seed: int) -> None:
    shift = np.random.default_rng(seed).uniform(-0.5, 0.5, 3).round(3)
    here = bowl()
    there = Boxes(centres=here.centres + shift, axes=here.axes, half_sizes=here.half_sizes)
    at_home, moved = grasps(here, NOTHING, np.eye(3)), grasps(there, NOTHING, np.eye(3))
    assert len(at_home) == len(moved)
    for one, other in zip(at_home, moved, strict=True):
        np.testing.assert_allclose(one.point + shift, other.point, atol=1e-3)


def test_a_bowl_wider_than_the_gripper_is_grasped_by_its_wall() -> None:
    grasp = chosen(item=bowl(radius=0.05))
    assert grasp.width < 0.01
    assert np.linalg.norm(grasp.point[:2]) == pytest.approx(0.05, abs=0.005)
    outward = grasp.point[:2] / np.linalg.norm(grasp.point[:2])
    assert abs(outward @ [np.cos(grasp.yaw), np.sin(grasp.yaw)]) > 0.99


def test_what_is_too_wide_everywhere_cannot_be_grasped() -> None:
    assert choose(scene_with(item=box([0, 0, 0.03], [MAX_OPENING, MAX_OPENING, 0.03])), "item") is None


def test_fingers_keep_out_of_a_neighbour_and_do_not_close_on_it() -> None:
    """A wall stands right beside the bowl, where the grasp would otherwise be."""
    alone = chosen(item=bowl())
    outward = alone.point / np.linalg.norm(alone.point[:2])
    angle = float(np.arctan2(outward[1], outward[0]))
    wall = box([*(0.06 * outward[:2]), 0.05], [0.005, 0.1, 0.05], angle)
    assert chosen(item=bowl(), wall=wall).point @ outward < 0.5 * (alone.point @ outward)


def test_a_tall_object_is_held_near_its_top_and_a_flat_one_above_the_table() -> None:
    assert chosen(item=box([0, 0, 0.1], [0.02, 0.02, 0.1])).point[2] == pytest.approx(0.18, abs=0.01)
    assert chosen(item=box([0, 0, 0.008], [0.02, 0.04, 0.008])).point[2] >= 0.008 - 1e-3


@given(seeds)
def test_an_aim_within_reach_is_kept_and_any_other_is_drawn_in(seed: int) -> None:
    foot = np.array([-0.6, 0.0, 0.9])
    aim = foot + np.random.default_rng(seed).uniform([-1.5, -1.5, -0.2], [1.5, 1.5, 0.7])
    reached = within_reach(foot, aim)
    assert reached[2] == aim[2]
    assert np.hypot(*(reached - foot)[:2]) <= np.hypot(*(aim - foot)[:2]) + 1e-9
    if strain(foot, aim[None])[0] == 0.0:
        np.testing.assert_array_equal(reached, aim)
    again = within_reach(foot, reached)
    np.testing.assert_allclose(again, reached, atol=1e-9)


def test_without_a_known_foot_every_aim_is_within_reach() -> None:
    far = np.array([9.0 * LONGEST_ARM, 0.0, 1.0])
    np.testing.assert_array_equal(within_reach(None, far), far)


@few_examples
@given(st.floats(-0.15, 0.15))
def test_of_two_mirrored_grasps_it_is_the_same_however_noise_has_turned_the_hand(turn: float) -> None:
    post = scene_with(item=box([0, 0, 0.05], [0.028, 0.028, 0.05], np.pi / 4))
    ring = scene_with(item=bowl())
    rotation = turned(turn) @ DOWN
    way = np.array([0.1, 0.0, 0.0])
    found = [choose(replace(scene, gripper_rotation=rotation), "item", way) for scene in (post, ring)]
    by_the_post, by_the_ring = found
    assert by_the_post is not None and by_the_ring is not None
    assert by_the_post.yaw % np.pi == pytest.approx(3 / 8 * np.pi), "to the right of the start pose"
    assert by_the_ring.point[1] > 0.04, "at its left rim"


def test_what_stands_on_the_way_is_seen_and_what_stands_beside_it_is_not() -> None:
    mover = box([0, 0, 0.02], [0.02, 0.02, 0.02])
    on_the_way, at_the_end = box([0.2, 0, 0.1], [0.01, 0.1, 0.1]), box([0.4, 0, 0.03], [0.05, 0.05, 0.03])
    beside = box([0.2, 0.5, 0.3], [0.05, 0.05, 0.3])
    way = np.array([0.4, 0.0, 0.0])
    assert heights_on_the_way(join([on_the_way, at_the_end, beside]), mover, way) == pytest.approx((0.2, 0.2, 0.2))
    assert heights_on_the_way(join([at_the_end, beside]), mover, way) == pytest.approx((0.06, -np.inf, -np.inf))
    assert heights_on_the_way(NOTHING, mover, way) == (-np.inf, -np.inf, -np.inf)


def test_what_is_left_behind_counts_only_while_it_is_below_the_mover() -> None:
    mover, way = box([0, 0, 0.1], [0.02, 0.02, 0.02]), np.array([0.03, 0.0, 0.0])
    wall_below, wall_beside = box([-0.03, 0, 0.05], [0.02, 0.1, 0.05]), box([-0.045, 0, 0.05], [0.02, 0.1, 0.05])
    assert heights_on_the_way(wall_below, mover, way) == pytest.approx((0.1, 0.1, -np.inf))
    assert heights_on_the_way(wall_beside, mover, way) == (-np.inf, -np.inf, -np.inf)
