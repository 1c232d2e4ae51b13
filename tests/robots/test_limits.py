"""Targets keep the limits on the client's side, and what does not keep them is refused on the server's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from nightshift.envs.robot.messages import Limits
from nightshift.envs.robot.poses import Scale, action_of, angle_between, quaternion_of_matrix, target_of
from nightshift.envs.robot.safety import target_problem, wider_than, within

SCALE = Scale(position=0.05, rotation=0.5)
HZ = 20.0
LIMITS = Limits(
    box_low=(-0.2, -0.2, 0.0),
    box_high=(0.2, 0.2, 0.4),
    max_turn=0.6,
    linear_speed=0.25,
    angular_speed=1.5,
    force=30.0,
    torque=5.0,
)
HOME = np.array([0.0, 0.0, 0.0, 1.0])
numbers = st.floats(-1, 1, allow_subnormal=False)
actions = st.lists(numbers, min_size=7, max_size=7).map(np.array)
turns = st.lists(st.floats(-0.3, 0.3, allow_subnormal=False), min_size=3, max_size=3).map(np.array)
wide_turns = st.lists(st.floats(-0.8, 0.8, allow_subnormal=False), min_size=3, max_size=3).map(np.array)
places = st.tuples(st.floats(-0.2, 0.2), st.floats(-0.2, 0.2), st.floats(0, 0.4)).map(np.array)
places_outside = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=3, max_size=3).map(np.array)


def pose_at(place: np.ndarray, turn: np.ndarray) -> np.ndarray:
    return np.concatenate([place, Rotation.from_rotvec(turn).as_quat()])


@given(action=actions, place=places, turn=turns)
def test_the_target_of_an_action_is_the_measured_pose_moved_and_turned_in_world_axes(
    action: np.ndarray, place: np.ndarray, turn: np.ndarray
) -> None:
    pose = pose_at(place, turn)
    target = target_of(pose, action, SCALE)
    expected = Rotation.from_rotvec(0.5 * action[3:6]) * Rotation.from_quat(pose[3:])
    assert np.allclose(target[:3], place + 0.05 * action[:3])
    assert np.allclose(Rotation.from_quat(target[3:]).as_matrix(), expected.as_matrix(), atol=1e-9)
    assert np.allclose(action_of(pose, target, SCALE), action[:6], atol=1e-6)


@given(turn=st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(np.array))
def test_a_rotation_matrix_and_its_quaternion_are_one_orientation(turn: np.ndarray) -> None:
    rotation = Rotation.from_rotvec(turn)
    found = quaternion_of_matrix(rotation.as_matrix())
    assert np.allclose(Rotation.from_quat(found).as_matrix(), rotation.as_matrix(), atol=1e-9)


@given(action=actions, place=st.one_of(places, places_outside), turn=st.one_of(turns, wide_turns))
def test_any_action_becomes_a_target_that_the_server_accepts(
    action: np.ndarray, place: np.ndarray, turn: np.ndarray
) -> None:
    pose = pose_at(place, turn)
    target = within(target_of(pose, action, SCALE), pose, HOME, LIMITS, HZ)
    assert target_problem(target, pose, HOME, LIMITS, HZ) == ""


def test_a_target_within_the_limits_keeps_its_bits() -> None:
    pose = pose_at(np.array([0.0, 0.1, 0.2]), np.array([0.1, 0.0, 0.1]))
    target = target_of(pose, np.array([0.1, -0.1, 0.1, 0.05, 0.0, -0.05, 1.0]), SCALE)
    assert within(target, pose, HOME, LIMITS, HZ).tobytes() == target.tobytes()


def test_every_limit_of_a_target_is_checked() -> None:
    pose = pose_at(np.array([0.19, 0.0, 0.2]), np.zeros(3))
    assert "outside the box" in target_problem(pose + np.eye(7)[0] * 0.012, pose, HOME, LIMITS, HZ)
    assert "m/s" in target_problem(pose - np.eye(7)[0] * 0.02, pose, HOME, LIMITS, HZ)
    assert "rad/s" in target_problem(pose_at(pose[:3], np.array([0, 0, 0.1])), pose, HOME, LIMITS, HZ)
    turned = pose_at(pose[:3], np.array([0, 0, 0.65]))
    assert "from the reset" in target_problem(turned, turned, HOME, LIMITS, HZ)
    assert "length 1" in target_problem(pose * 1.1, pose, HOME, LIMITS, HZ)
    assert angle_between(turned[3:], HOME) > LIMITS.max_turn


def test_a_hand_outside_the_box_may_come_back_to_it_and_goes_no_farther_than_its_speed_allows() -> None:
    pose = pose_at(np.array([0.0, 0.0, -0.05]), np.zeros(3))
    back = pose_at(np.array([0.0, 0.0, -0.04]), np.zeros(3))
    assert target_problem(back, pose, HOME, LIMITS, HZ) == ""
    assert "outside the box" in target_problem(pose, back, HOME, LIMITS, HZ), "and not away from it"
    at_once = pose_at(np.array([0.0, 0.0, 0.0]), np.zeros(3))
    assert "1.000 m/s" in target_problem(at_once, pose, HOME, LIMITS, HZ)
    along = pose_at(np.array([0.01, 0.0, -0.05 + 1e-9]), np.zeros(3))
    assert "outside the box" in target_problem(along, pose, HOME, LIMITS, HZ), "nor along it"
    beside = pose_at(np.array([0.25, 0.2, 0.2]), np.zeros(3))
    out = pose_at(np.array([0.242, 0.205, 0.2]), np.zeros(3))
    assert "outside the box" in target_problem(out, beside, HOME, LIMITS, HZ), "nor out through another face"


def test_turns_at_exactly_the_limit_keep_their_bits() -> None:
    pose = pose_at(np.array([0.0, 0.1, 0.2]), np.array([0.1, 0.0, 0.1]))
    random = np.random.default_rng(0)
    for _ in range(50):
        axis = random.standard_normal(3)
        turn = Rotation.from_rotvec(axis / np.linalg.norm(axis) * LIMITS.angular_speed / HZ)
        target = np.concatenate([pose[:3], (turn * Rotation.from_quat(pose[3:])).as_quat()])
        assert within(target, pose, HOME, LIMITS, HZ).tobytes() == target.tobytes()


@given(place=places_outside, turn=wide_turns, action=actions, tighter=st.floats(0, 0.1))
def test_a_hand_outside_the_clients_limits_comes_back_step_by_step(
    place: np.ndarray, turn: np.ndarray, action: np.ndarray, tighter: float
) -> None:
    """Its box may be smaller than the server's."""
    low, high = np.array(LIMITS.box_low) + tighter, np.array(LIMITS.box_high) - tighter
    own = replace(LIMITS, box_low=tuple(low), box_high=tuple(high))
    pose = pose_at(place, turn)
    for _ in range(200):
        target = within(target_of(pose, 0.2 * action, SCALE), pose, HOME, own, HZ)
        assert target_problem(target, pose, HOME, LIMITS, HZ) == ""
        pose = target
    assert (pose[:3] >= low - 1e-5).all()
    assert (pose[:3] <= high + 1e-5).all()
    assert angle_between(pose[3:], HOME) <= LIMITS.max_turn + 1e-5


def test_a_measured_pose_that_is_not_finite_allows_no_target() -> None:
    pose = pose_at(np.array([0.0, 0.0, 0.2]), np.zeros(3))
    for number in range(7):
        assert "nan" in target_problem(pose, np.where(np.arange(7) == number, np.nan, pose), HOME, LIMITS, HZ)


def test_wider_limits_are_named() -> None:
    assert wider_than(LIMITS, LIMITS) == []
    wide = replace(LIMITS, box_low=(-0.3, -0.2, 0.0), force=31.0)
    assert wider_than(wide, LIMITS) == ["box_low", "force"]
