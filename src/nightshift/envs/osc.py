"""One control step of LIBERO, compiled: robosuite's OSC_POSE control law, the gripper and every substep of physics.

Import it after `prepare`. It calls the mujoco library directly and holds no Python object while it runs, so threads
step simulators side by side. Per substep robosuite calls `mj_forward`, again from its controller, then `mj_step`, which
starts with a third one. Positions and velocities do not change in between, so one `mj_step1` and one `mj_step2` do.

A simulator is a row of addresses (see `Field`): of its MjData, of the arrays in it, and of the goal it moves to.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import mujoco
import numba
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from robosuite.utils.control_utils import orientation_error
from robosuite.utils.transform_utils import quat2mat

JOINTS = 7
NULLSPACE_GAIN = 10.0
SINGULAR = 1e-12
"""A pivot smaller than this share of the largest diagonal element means that the arm is stretched out."""

for library in Path(mujoco.__file__).parent.glob("libmujoco.so*"):
    llvmlite.binding.load_library_permanently(str(library))

_step = types.void(types.intp, types.intp)
_mj_step1: Any = types.ExternalFunction("mj_step1", _step)
_mj_step2: Any = types.ExternalFunction("mj_step2", _step)
_mj_jac_site: Any = types.ExternalFunction(
    "mj_jacSite", types.void(types.intp, types.intp, types.intp, types.intp, types.int32)
)
_mj_full_mass: Any = types.ExternalFunction("mj_fullM", types.void(types.intp, types.intp, types.intp))


class Field(IntEnum):
    """Columns of a simulator's row."""

    DATA = 0
    QPOS = 1
    QVEL = 2
    CTRL = 3
    MASS = 4
    BIAS = 5
    POSITION = 6  # [3] of the grip site
    ROTATION = 7  # [3, 3] of the grip site
    GOAL_POSITION = 8  # [3] written here
    GOAL_ROTATION = 9  # [3, 3] written here
    FINGERS = 10  # [2] targets in [-1, 1], written here


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")
def _array(address, shape):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), shape, dtype=np.float64)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def advance(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    rows,  # [N, fields] addresses, int64
    actions,  # [N, 7] clipped to [-1, 1]
    model,  # address
    sizes,  # nq, nv, nu, number of substeps, grip site
    rest_joints,  # [7] nullspace target
    arm_qpos,  # addresses of the arm's joints
    arm_qvel,
    arm_ctrl,
    torque_limits,  # [2, 7]
    grip_ctrl,
    grip_range,  # [2, 2]
    gains,  # [2, 6] kp, kd
    action_scale,  # [6]
    grip_speed,
):
    """Move every simulator on by one control step. `mj_step1` has run on each before, and has again after."""
    nq, nv, nu, substeps, site = sizes
    jacobians = np.empty((2, 3, nv))
    mass = np.empty((nv, nv))
    for lane in range(len(rows)):
        row = rows[lane]
        data = row[Field.DATA]
        qpos, qvel = _array(row[Field.QPOS], nq), _array(row[Field.QVEL], nv)
        ctrl, bias = _array(row[Field.CTRL], nu), _array(row[Field.BIAS], nv)
        position = _array(row[Field.POSITION], 3)
        rotation = _array(row[Field.ROTATION], (3, 3))
        goal_position = _array(row[Field.GOAL_POSITION], 3)
        goal_rotation = _array(row[Field.GOAL_ROTATION], (3, 3))
        fingers = _array(row[Field.FINGERS], 2)
        _set_goal(actions[lane], action_scale, position, rotation, goal_position, goal_rotation)
        close = np.sign(actions[lane, 6])
        for _ in range(substeps):
            _mj_jac_site(model, data, jacobians[0].ctypes.data, jacobians[1].ctypes.data, site)
            _mj_full_mass(model, mass.ctypes.data, row[Field.MASS])
            wrench = _wrench(jacobians, qvel, position, rotation, goal_position, goal_rotation, gains)
            torques = _torques(jacobians, mass, wrench, rest_joints, qpos, qvel, arm_qpos, arm_qvel)
            for a in range(JOINTS):
                wanted = torques[a] + bias[arm_qvel[a]]
                ctrl[arm_ctrl[a]] = min(max(wanted, torque_limits[0, a]), torque_limits[1, a])
            _move_fingers(ctrl, fingers, close * grip_speed, grip_ctrl, grip_range)
            _mj_step2(model, data)
            _mj_step1(model, data)


@numba.njit(cache=True, nogil=True)
def _set_goal(action, scale, position, rotation, goal_position, goal_rotation):  # type: ignore[no-untyped-def]
    """Positions are relative to where the hand is; so are rotations, but no rotation at all keeps the old goal."""
    for i in range(3):
        goal_position[i] = position[i] + action[i] * scale[i]
    turn = action[3:6] * scale[3:6]
    angle = np.sqrt(np.sum(turn**2))
    if angle > 0.0:
        quaternion = np.empty(4)
        quaternion[:3] = turn / angle * np.sin(angle / 2.0)
        quaternion[3] = np.cos(angle / 2.0)
        goal_rotation[:] = np.dot(quat2mat(quaternion), rotation)


@numba.njit(cache=True, nogil=True)
def _wrench(jacobians, qvel, position, rotation, goal_position, goal_rotation, gains):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Force and moment [6] of a damped spring between the hand and its goal, per unit of mass."""
    error = orientation_error(goal_rotation, rotation)
    out = np.empty(6)
    for i in range(3):
        speed = turn = 0.0
        for k in range(len(qvel)):
            speed += jacobians[0, i, k] * qvel[k]
            turn += jacobians[1, i, k] * qvel[k]
        out[i] = (goal_position[i] - position[i]) * gains[0, i] - speed * gains[1, i]
        out[3 + i] = error[i] * gains[0, 3 + i] - turn * gains[1, 3 + i]
    return out


@numba.njit(cache=True, nogil=True)
def _move_fingers(ctrl, fingers, speed, grip_ctrl, grip_range):  # type: ignore[no-untyped-def]
    """The fingers mirror each other; their targets move at one speed until they are fully open or closed."""
    for finger in range(2):
        direction = -1.0 if finger == 0 else 1.0
        fingers[finger] = min(max(fingers[finger] + direction * speed, -1.0), 1.0)
        low, high = grip_range[finger, 0], grip_range[finger, 1]
        ctrl[grip_ctrl[finger]] = 0.5 * (high + low) + 0.5 * (high - low) * fingers[finger]


@numba.njit(cache=True, nogil=True)
def _torques(jacobians, mass, wrench, rest, qpos, qvel, arm_qpos, arm_qvel):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Operational-space torques: decoupled force and moment, and in their nullspace a pull towards the rest pose."""
    j, m = _of_the_arm(jacobians, mass, arm_qvel)
    pull = NULLSPACE_GAIN * (rest - qpos[arm_qpos]) - 2.0 * np.sqrt(NULLSPACE_GAIN) * qvel[arm_qvel]
    pose = np.dot(m, pull)
    accelerations = _solve(m, j.T.copy())  # M^-1 J^T
    mobility = np.dot(j, accelerations)  # J M^-1 J^T, the inverse of the mass felt at the hand
    force = _solve(mobility[:3, :3].copy(), wrench[:3].copy().reshape(3, 1))
    moment = _solve(mobility[3:, 3:].copy(), wrench[3:].copy().reshape(3, 1))
    felt = _solve(mobility, np.dot(pose, accelerations).reshape(6, 1))  # what the pull would do to the hand
    return pose + np.dot(np.concatenate((force, moment)).ravel() - felt.ravel(), j)


@numba.njit(cache=True, nogil=True)
def _of_the_arm(jacobians, mass, arm_qvel):  # type: ignore[no-untyped-def]
    """Jacobian [6, 7] and mass matrix [7, 7] of the arm's joints alone."""
    j, m = np.empty((6, JOINTS)), np.empty((JOINTS, JOINTS))
    for a in range(JOINTS):
        for i in range(3):
            j[i, a] = jacobians[0, i, arm_qvel[a]]
            j[3 + i, a] = jacobians[1, i, arm_qvel[a]]
        for b in range(JOINTS):
            m[a, b] = mass[arm_qvel[a], arm_qvel[b]]
    return j, m


@numba.njit(cache=True, nogil=True)
def _solve(matrix, right):  # type: ignore[no-untyped-def]
    """X [n, m] with `matrix` X = `right`, for a symmetric positive definite matrix; the shortest if it is singular."""
    low, regular = _cholesky(matrix)
    if not regular:
        return np.dot(np.linalg.pinv(matrix), right)
    n, columns = right.shape
    out = right.copy()
    for c in range(columns):
        for i in range(n):
            for p in range(i):
                out[i, c] -= low[i, p] * out[p, c]
            out[i, c] /= low[i, i]
        for i in range(n - 1, -1, -1):
            for p in range(i + 1, n):
                out[i, c] -= low[p, i] * out[p, c]
            out[i, c] /= low[i, i]
    return out


@numba.njit(cache=True, nogil=True)
def _cholesky(matrix):  # type: ignore[no-untyped-def]
    """The lower triangle whose square is `matrix`, and whether there is one."""
    n = len(matrix)
    low = np.zeros((n, n))
    least = SINGULAR * np.max(np.diag(matrix))
    for i in range(n):
        for k in range(i + 1):
            rest = matrix[i, k]
            for p in range(k):
                rest -= low[i, p] * low[k, p]
            if i > k:
                low[i, k] = rest / low[k, k]
            elif rest > least:
                low[i, i] = np.sqrt(rest)
            else:
                return low, False
    return low, True
