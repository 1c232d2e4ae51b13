"""The privileged state of a built LIBERO problem, read from MuJoCo's arrays, for the scripted expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.articulation import Articulation, articulations
from nightshift.types import Body, Boxes, Joint, Scene

Vector = NDArray[np.float64]
Pose = Callable[[], tuple[Vector, Vector]]


class World:
    """Names, sizes and poses of everything in one LIBERO problem."""

    def __init__(self, domain: Any, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        self._model = model
        self._data = data
        robot = domain.robots[0]
        self._grip_site: int = robot.eef_site_id
        self._robot_position = np.array(robot.base_pos)
        self._fingers = [int(address) for address in robot._ref_gripper_joint_pos_indexes]
        self._goal = tuple(tuple(predicate) for predicate in domain.parsed_problem["goal_state"])
        self._poses: dict[str, Pose] = {}
        self._half_sizes: dict[str, Vector] = {}
        self._geoms: dict[str, NDArray[np.int64]] = {}
        self._add_objects(domain)
        self._add_sites(domain)
        self._joints = articulations(domain, self._model)
        self._links = {name: _colliding_geoms(self._model, joint.body) for name, joint in self._joints.items()}

    def scene(self) -> Scene:
        grip_position, grip_rotation = self._grip()
        bodies = {}
        for name, pose in self._poses.items():
            position, rotation = pose()
            boxes = self._boxes(self._geoms[name]) if name in self._geoms else None
            half_size = self._half_sizes[name]
            bodies[name] = Body(position=position.copy(), rotation=rotation.copy(), half_size=half_size, boxes=boxes)
        fingers = self._data.qpos[self._fingers]
        return Scene(
            gripper_position=grip_position.copy(),
            gripper_rotation=grip_rotation.copy(),
            gripper_opening=float(abs(fingers).sum()),
            bodies=bodies,
            joints={name: self._joint(joint, self._links[name]) for name, joint in self._joints.items()},
            goal=self._goal,
            robot_position=self._robot_position,
        )

    def _joint(self, joint: Articulation, link: NDArray[np.int64]) -> Joint:
        return Joint(
            kind=joint.kind,
            position=float(self._data.qpos[joint.address]),
            limits=joint.limits,
            axis=self._data.xaxis[joint.index].copy(),
            anchor=self._data.xanchor[joint.index].copy(),
            link=self._boxes(link),
            holds=joint.holds,
        )

    def _grip(self) -> tuple[Vector, Vector]:
        return self._data.site_xpos[self._grip_site], self._data.site_xmat[self._grip_site].reshape(3, 3)

    def _boxes(self, geoms: NDArray[np.int64]) -> Boxes:
        """The box around each geom; most of LIBERO's collision geoms are boxes themselves."""
        axes = self._data.geom_xmat[geoms].reshape(-1, 3, 3)
        centres = self._data.geom_xpos[geoms] + np.einsum("nij,nj->ni", axes, self._model.geom_aabb[geoms, :3])
        return Boxes(centres=centres, axes=axes, half_sizes=self._model.geom_aabb[geoms, 3:])

    def _add_objects(self, domain: Any) -> None:
        at_rest = mujoco.MjData(self._model)  # sizes belong to the model, not to the state of this simulation
        mujoco.mj_kinematics(self._model, at_rest)
        for name, body in domain.obj_body_id.items():
            self._poses[name] = _body_pose(self._data, int(body))
            self._geoms[name] = _colliding_geoms(self._model, int(body))
            self._half_sizes[name] = _half_size(self._model, at_rest, int(body), self._geoms[name])

    def _add_sites(self, domain: Any) -> None:
        """Regions that predicates name, and the handles of objects."""
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
