"""What there is to see in a built LIBERO problem, read from MuJoCo's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.protocols import axis_angle
from nightshift.types import Array, Body, Boxes, Scene

Vector = NDArray[np.float64]
Pose = Callable[[], tuple[Vector, Vector]]

OBJECTS_SEEN = 2
FEATURES_PER_OBJECT = 12  # position 3, first two columns of the rotation 6, position relative to the gripper 3
OBJECTS_DIM = OBJECTS_SEEN * FEATURES_PER_OBJECT + 1  # and one articulation joint

FACING_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
"""The gripper's rotation at rest. Observed rotations are relative to it, far from where axis-angle jumps."""


class World:
    """Names, sizes and poses of everything in one LIBERO problem."""

    def __init__(self, domain: Any, data: mujoco.MjData) -> None:
        self._model: mujoco.MjModel = domain.sim.model._model
        self._data = data
        robot = domain.robots[0]
        self._grip_site: int = robot.eef_site_id
        self._robot_position = np.array(robot.base_pos)
        self._hand: int = self._model.body(robot.robot_model.eef_name).id
        self._fingers = [int(address) for address in robot._ref_gripper_joint_pos_indexes]
        self._goal = tuple(tuple(predicate) for predicate in domain.parsed_problem["goal_state"])
        self._poses: dict[str, Pose] = {}
        self._half_sizes: dict[str, Vector] = {}
        self._geoms: dict[str, NDArray[np.int64]] = {}
        self._add_objects(domain)
        self._add_sites(domain)
        self._joints = _articulations(domain, self._model)
        seen = [name for name in domain.obj_of_interest if name in self._poses][:OBJECTS_SEEN]
        self._seen = [self._poses[name] for name in seen]
        self._seen_joint = next((self._joints[name] for name in seen if name in self._joints), None)

    def proprio(self) -> Array:
        """Position [3], rotation as axis-angle relative to facing down [3], finger joints [2]."""
        position, rotation = self._grip()
        turned = _axis_angle(rotation @ FACING_DOWN.T)
        return np.concatenate([position, turned, self._data.qpos[self._fingers]]).astype(np.float32)

    def state(self) -> Array:
        """As published policies take it: position [3], the hand's rotation as axis-angle [3], finger joints [2]."""
        position, turned = self._data.site_xpos[self._grip_site], axis_angle(self._data.xquat[self._hand])
        return np.concatenate([position, turned, self._data.qpos[self._fingers]]).astype(np.float32)

    def objects(self) -> Array:
        """The task's objects of interest, zero padded to OBJECTS_DIM."""
        out = np.zeros(OBJECTS_DIM, dtype=np.float32)
        grip = self._data.site_xpos[self._grip_site]
        for index, pose in enumerate(self._seen):
            position, rotation = pose()
            start = index * FEATURES_PER_OBJECT
            out[start : start + 3] = position
            out[start + 3 : start + 9] = rotation[:, :2].T.ravel()
            out[start + 9 : start + 12] = position - grip
        if self._seen_joint is not None:
            out[-1] = self._data.qpos[self._seen_joint]
        return out

    def scene(self) -> Scene:
        position, rotation = self._grip()
        bodies = {}
        for name, pose in self._poses.items():
            where, turned = pose()
            boxes = self._boxes(self._geoms[name]) if name in self._geoms else None
            half_size = self._half_sizes[name]
            bodies[name] = Body(position=where.copy(), rotation=turned.copy(), half_size=half_size, boxes=boxes)
        fingers = self._data.qpos[self._fingers]
        return Scene(
            gripper_position=position.copy(),
            gripper_rotation=rotation.copy(),
            gripper_opening=float(abs(fingers).sum()),
            bodies=bodies,
            joints={name: float(self._data.qpos[address]) for name, address in self._joints.items()},
            goal=self._goal,
            robot_position=self._robot_position,
        )

    def _grip(self) -> tuple[Vector, Vector]:
        return self._data.site_xpos[self._grip_site], self._data.site_xmat[self._grip_site].reshape(3, 3)

    def _boxes(self, geoms: NDArray[np.int64]) -> Boxes:
        """The box around each geom; most of LIBERO's collision geoms are boxes themselves."""
        axes = self._data.geom_xmat[geoms].reshape(-1, 3, 3)
        centres = self._data.geom_xpos[geoms] + np.einsum("nij,nj->ni", axes, self._model.geom_aabb[geoms, :3])
        return Boxes(centres=centres, axes=axes, half_sizes=self._model.geom_aabb[geoms, 3:])

    def _add_objects(self, domain: Any) -> None:
        at_rest = mujoco.MjData(self._model)  # sizes are of the model, whatever is going on in our simulation
        mujoco.mj_kinematics(self._model, at_rest)
        for name, body in domain.obj_body_id.items():
            self._poses[name] = _body_pose(self._data, int(body))
            self._geoms[name] = _colliding_geoms(self._model, int(body))
            self._half_sizes[name] = _half_size(self._model, at_rest, int(body), self._geoms[name])

    def _add_sites(self, domain: Any) -> None:
        """Regions that predicates speak of, and every site an object calls its handle."""
        model = self._model
        names = {model.site(index).name for index in range(model.nsite)}
        handles = {name for name in names if name.endswith("_handle")}
        for name in sorted((set(domain.object_sites_dict) | handles | set(domain.obj_of_interest)) & names):
            site = model.site(name).id
            self._poses.setdefault(name, _site_pose(self._data, site))
            self._half_sizes.setdefault(name, model.site_size[site].copy())


def _body_pose(data: mujoco.MjData, body: int) -> Pose:
    return lambda: (data.xpos[body], data.xmat[body].reshape(3, 3))


def _site_pose(data: mujoco.MjData, site: int) -> Pose:
    return lambda: (data.site_xpos[site], data.site_xmat[site].reshape(3, 3))


def _colliding_geoms(model: mujoco.MjModel, root: int) -> NDArray[np.int64]:
    """Of a body and its children."""
    collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    geoms = [geom for geom in np.flatnonzero(collides) if _is_within(model, int(model.geom_bodyid[geom]), root)]
    return np.array(geoms, dtype=np.int64)


def _half_size(model: mujoco.MjModel, data: mujoco.MjData, root: int, geoms: NDArray[np.int64]) -> Vector:
    """Half the box around `geoms` in the frame of the body `root`, about its origin."""
    rotation = data.xmat[root].reshape(3, 3)
    extent = np.zeros(3)
    for geom in geoms:
        local = rotation.T @ data.geom_xmat[geom].reshape(3, 3)
        centre = rotation.T @ (data.geom_xpos[geom] - data.xpos[root]) + local @ model.geom_aabb[geom, :3]
        extent = np.maximum(extent, np.abs(centre) + np.abs(local) @ model.geom_aabb[geom, 3:])
    return extent


def _is_within(model: mujoco.MjModel, body: int, root: int) -> bool:
    while body not in (root, 0):
        body = int(model.body_parentid[body])
    return body == root


def _articulations(domain: Any, model: mujoco.MjModel) -> dict[str, int]:
    """qpos address of the first slide or hinge joint of each object, fixture and region, by BDDL name."""
    addresses = {}
    for group in (domain.objects_dict, domain.fixtures_dict, domain.object_sites_dict):
        for name, entity in group.items():
            joints = [model.joint(joint) for joint in entity.joints or ()]
            moving = [joint for joint in joints if joint.type[0] != mujoco.mjtJoint.mjJNT_FREE]
            if moving:
                addresses[name] = int(moving[0].qposadr[0])
    return addresses


def _axis_angle(rotation: Vector) -> Vector:
    """The rotation vector of a matrix; exact and smooth below half a turn."""
    skew = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    sine = np.linalg.norm(skew) / 2.0
    angle = np.arctan2(sine, (np.trace(rotation) - 1.0) / 2.0)
    return skew * (angle / (2.0 * sine)) if sine > 0.0 else skew / 2.0
