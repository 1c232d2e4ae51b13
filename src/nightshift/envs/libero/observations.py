"""Observations of LIBERO simulations, written into arrays by one compiled call. Import it after `prepare`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import mujoco
import numba
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.articulation import articulations
from nightshift.envs.libero.osc import array_at
from nightshift.envs.libero.problem import FEATURES_PER_OBJECT, GRIPPER_FEATURES, OBJECTS_OF_INTEREST, STATE_SIZES
from nightshift.types import Array

NO_JOINT = -1


class Field(IntEnum):
    """Columns of a simulation's row: addresses of arrays in its MjData."""

    QPOS = 0
    SITE_POSITIONS = 1
    SITE_ROTATIONS = 2
    BODY_POSITIONS = 3
    BODY_ROTATIONS = 4
    BODY_QUATERNIONS = 5
    WARNINGS = 6  # MuJoCo's numbers of warnings since the last reset


class Observer:
    """Reads the observations of one built LIBERO problem.

    proprio [8]   grip point, rotation as axis-angle relative to facing down, finger joints
    state [8]     as published policies take it: the hand's rotation as robosuite's axis-angle
    objects [25]  poses of the task's objects of interest, zero padded
    egocentric [13]  height, rotation and fingers of the gripper, and the offsets of these objects from it in world
                  axes: invariant to the position on the table, so that a clone needs fewer demos
    """

    def __init__(self, domain: Any) -> None:
        model: mujoco.MjModel = domain.sim.model._model
        robot = domain.robots[0]
        self._sizes = np.array([model.nq, model.nsite, model.nbody])
        hand = model.body(robot.robot_model.eef_name).id
        self._hand = np.array([robot.eef_site_id, hand, *robot._ref_gripper_joint_pos_indexes])
        names = [name for name in domain.obj_of_interest if _locate(domain, model, name)][:OBJECTS_OF_INTEREST]
        self._objects = np.array([_locate(domain, model, name) for name in names], dtype=np.int64).reshape(-1, 2)
        joints = articulations(domain, model)
        self._joint = next((joints[name].address for name in names if name in joints), NO_JOINT)

    def addresses(self, data: mujoco.MjData) -> NDArray[np.int64]:
        """Of the arrays of one simulation, by `Field`."""
        warnings = data.warning.number
        arrays = (data.qpos, data.site_xpos, data.site_xmat, data.xpos, data.xmat, data.xquat, warnings)
        return np.array([array.ctypes.data for array in arrays])

    def write(self, addresses: NDArray[np.int64], lanes: NDArray[np.int64], out: dict[str, Array]) -> None:
        """The observations of the simulations at `addresses` [N, fields], into the rows `lanes` [N] of `out`."""
        arrays = (out[name] for name in STATE_SIZES)
        _write(addresses, lanes, self._sizes, self._hand, self._objects, self._joint, *arrays)


def _locate(domain: Any, model: mujoco.MjModel, name: str) -> tuple[int, int] | None:
    """1 for a site or 0 for a body, and its id; None if `name` is neither."""
    if name in domain.obj_body_id:
        return 0, int(domain.obj_body_id[name])
    site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
    return (1, site) if site >= 0 else None


@numba.njit(cache=True, nogil=True)
def _write(addresses, lanes, sizes, hand, interest, joint, proprio, state, objects, egocentric):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    nq, sites, bodies = sizes
    for index in range(len(addresses)):
        row, lane = addresses[index], lanes[index]
        qpos = array_at(row[Field.QPOS], nq)
        site_positions = array_at(row[Field.SITE_POSITIONS], (sites, 3))
        site_rotations = array_at(row[Field.SITE_ROTATIONS], (sites, 9))
        body_positions = array_at(row[Field.BODY_POSITIONS], (bodies, 3))
        body_rotations = array_at(row[Field.BODY_ROTATIONS], (bodies, 9))
        quaternions = array_at(row[Field.BODY_QUATERNIONS], (bodies, 4))
        grip = site_positions[hand[0]]
        _write_hand(proprio[lane], state[lane], grip, site_rotations[hand[0]], quaternions[hand[1]])
        for finger in range(2):
            proprio[lane, 6 + finger] = state[lane, 6 + finger] = qpos[hand[2 + finger]]
        for k in range(len(interest)):
            is_site, number = interest[k]
            position = site_positions[number] if is_site else body_positions[number]
            rotation = site_rotations[number] if is_site else body_rotations[number]
            _write_object(objects[lane, k * FEATURES_PER_OBJECT :], position, rotation, grip)
            for i in range(3):
                egocentric[lane, GRIPPER_FEATURES + 3 * k + i] = position[i] - grip[i]
        egocentric[lane, :GRIPPER_FEATURES] = proprio[lane, 2:]
        if joint != NO_JOINT:
            objects[lane, -1] = egocentric[lane, -1] = qpos[joint]


@numba.njit(cache=True, nogil=True)
def _write_hand(proprio, state, grip, r, quaternion):  # type: ignore[no-untyped-def]
    """`r` [9] is the grip's rotation. Relative to facing down, axis-angle is continuous except half a turn away."""
    skew = (r[6] + r[5], -r[2] - r[7], r[4] - r[0])  # of r times the rotation of a hand that faces down
    sine = np.sqrt(skew[0] ** 2 + skew[1] ** 2 + skew[2] ** 2) / 2.0
    scale = np.arctan2(sine, (r[1] + r[3] - r[8] - 1.0) / 2.0) / (2.0 * sine) if sine > 0.0 else 0.5
    w = min(max(quaternion[0], -1.0), 1.0)
    rest = np.sqrt(1.0 - w * w)
    stretch = 2.0 * np.arccos(w) / rest if rest > 0.0 else 0.0  # robosuite's branch: angles from 0 to 2 pi
    for i in range(3):
        proprio[i] = state[i] = grip[i]
        proprio[3 + i] = skew[i] * scale
        state[3 + i] = quaternion[1 + i] * stretch


@numba.njit(cache=True, nogil=True)
def _write_object(out, position, rotation, grip):  # type: ignore[no-untyped-def]
    for i in range(3):
        out[i] = position[i]
        out[3 + i] = rotation[3 * i]
        out[6 + i] = rotation[3 * i + 1]
        out[9 + i] = position[i] - grip[i]
