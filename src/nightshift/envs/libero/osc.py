"""One control step of LIBERO, compiled: robosuite's OSC_POSE control law, the gripper and every substep of physics.

Import it after `prepare`. It calls the mujoco library directly and holds no Python object while it runs, so threads
step simulations in parallel. Per substep robosuite calls `mj_forward`, again from its controller, then `mj_step`, which
starts with a third one. Positions and velocities do not change in between, so `mj_step1` and `mj_step2` once each are
enough. Loops are written out because each array expression costs seconds to compile.

A simulation is a row of addresses (see `Field`): of its MjData, of the arrays in it, and of its controller's goal.
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

JOINTS = 7
NULLSPACE_GAIN = 10.0
SINGULAR = 1e-12
"""A pivot below this share of the largest diagonal element means that the arm is in a singular pose."""

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
    """Columns of a simulation's row."""

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
def array_at(address, shape):  # type: ignore[no-untyped-def]
    """The float64 array at an address, without a copy."""
    return carray(_pointer(address), shape, dtype=np.float64)  # type: ignore[call-arg]


@numba.njit(inline="always")
def counts_at(address, shape):  # type: ignore[no-untyped-def]
    """The int32 array at an address, without a copy."""
    return carray(_pointer(address), shape, dtype=np.int32)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def advance(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    addresses,  # [N, fields] int64
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
    """One control step of every simulation. `mj_step1` must have run on each before, and has run on each after."""
    nq, nv, nu, substeps, site = sizes
    jacobians = np.empty((2, 3, nv))
    mass = np.empty((nv, nv))
    for lane in range(len(addresses)):
        row = addresses[lane]
        data = row[Field.DATA]
        qpos, qvel = array_at(row[Field.QPOS], nq), array_at(row[Field.QVEL], nv)
        ctrl, bias = array_at(row[Field.CTRL], nu), array_at(row[Field.BIAS], nv)
        position = array_at(row[Field.POSITION], 3)
        rotation = array_at(row[Field.ROTATION], (3, 3))
        goal_position = array_at(row[Field.GOAL_POSITION], 3)
        goal_rotation = array_at(row[Field.GOAL_ROTATION], (3, 3))
        fingers = array_at(row[Field.FINGERS], 2)
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
    """Positions and rotations are relative to the hand's pose; a rotation of zero keeps the previous goal."""
    for i in range(3):
        goal_position[i] = position[i] + action[i] * scale[i]
    x, y, z = action[3] * scale[3], action[4] * scale[4], action[5] * scale[5]
    angle = np.sqrt(x * x + y * y + z * z)
    if angle > 0.0:
        x, y, z = x / angle, y / angle, z / angle
        s, c = np.sin(angle), np.cos(angle)
        v = 1.0 - c
        for k in range(3):
            p, q, r = rotation[0, k], rotation[1, k], rotation[2, k]
            goal_rotation[0, k] = (x * x * v + c) * p + (x * y * v - z * s) * q + (x * z * v + y * s) * r
            goal_rotation[1, k] = (x * y * v + z * s) * p + (y * y * v + c) * q + (y * z * v - x * s) * r
            goal_rotation[2, k] = (x * z * v - y * s) * p + (y * z * v + x * s) * q + (z * z * v + c) * r


@numba.njit(cache=True, nogil=True)
def _wrench(jacobians, qvel, position, rotation, goal_position, goal_rotation, gains):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Force and moment [6, 1] of a damped spring between the hand and its goal, per unit of mass."""
    out = np.empty((6, 1))
    for i in range(3):
        i1, i2 = (i + 1) % 3, (i + 2) % 3
        error = speed = turn = 0.0
        for k in range(3):  # half the sum of the cross products of the axes of the two rotations
            error += 0.5 * (rotation[i1, k] * goal_rotation[i2, k] - rotation[i2, k] * goal_rotation[i1, k])
        for k in range(len(qvel)):
            speed += jacobians[0, i, k] * qvel[k]
            turn += jacobians[1, i, k] * qvel[k]
        out[i, 0] = (goal_position[i] - position[i]) * gains[0, i] - speed * gains[1, i]
        out[3 + i, 0] = error * gains[0, 3 + i] - turn * gains[1, 3 + i]
    return out


@numba.njit(cache=True, nogil=True)
def _move_fingers(ctrl, fingers, speed, grip_ctrl, grip_range):  # type: ignore[no-untyped-def]
    """The fingers mirror each other; their targets move at a constant speed until fully open or closed."""
    for finger in range(2):
        direction = -1.0 if finger == 0 else 1.0
        fingers[finger] = min(max(fingers[finger] + direction * speed, -1.0), 1.0)
        low, high = grip_range[finger, 0], grip_range[finger, 1]
        ctrl[grip_ctrl[finger]] = 0.5 * (high + low) + 0.5 * (high - low) * fingers[finger]


@numba.njit(cache=True, nogil=True)
def _torques(jacobians, mass, wrench, rest, qpos, qvel, arm_qpos, arm_qvel):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Operational-space torques: decoupled force and moment, and in their nullspace a PD term towards the rest pose."""
    j, m = _arm_part(jacobians, mass, arm_qvel)
    posture = np.empty((JOINTS, 1))
    for a in range(JOINTS):
        speed = 2.0 * np.sqrt(NULLSPACE_GAIN) * qvel[arm_qvel[a]]
        posture[a, 0] = NULLSPACE_GAIN * (rest[a] - qpos[arm_qpos[a]]) - speed
    pose = _product(m, posture)
    accelerations = _solve(m, _transposed(j))  # M^-1 J^T
    mobility = _product(j, accelerations)  # J M^-1 J^T, the inverse of the operational-space inertia
    leak = _solve(mobility, _product(_transposed(accelerations), pose))  # wrench of the posture torques at the hand
    force = _solve(_block(mobility, 0, 3), _block(wrench, 0, 1))
    moment = _solve(_block(mobility, 3, 3), _block(wrench, 3, 1))
    out = np.empty(JOINTS)
    for a in range(JOINTS):
        out[a] = pose[a, 0]
        for i in range(3):
            out[a] += j[i, a] * (force[i, 0] - leak[i, 0]) + j[3 + i, a] * (moment[i, 0] - leak[3 + i, 0])
    return out


@numba.njit(cache=True, nogil=True)
def _product(left, right):  # type: ignore[no-untyped-def]
    out = np.zeros((left.shape[0], right.shape[1]))
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            for c in range(right.shape[1]):
                out[i, c] += left[i, k] * right[k, c]
    return out


@numba.njit(cache=True, nogil=True)
def _transposed(matrix):  # type: ignore[no-untyped-def]
    out = np.empty((matrix.shape[1], matrix.shape[0]))
    for i in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            out[k, i] = matrix[i, k]
    return out


@numba.njit(cache=True, nogil=True)
def _block(matrix, start, columns):  # type: ignore[no-untyped-def]
    """Rows start to start + 3, and as many columns from `start` on; a vector has one column."""
    out = np.empty((3, columns))
    for i in range(3):
        for k in range(columns):
            out[i, k] = matrix[start + i, k if columns == 1 else start + k]
    return out


@numba.njit(cache=True, nogil=True)
def _arm_part(jacobians, mass, arm_qvel):  # type: ignore[no-untyped-def]
    """Jacobian [6, 7] and mass matrix [7, 7] of the arm's joints."""
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
    """X [n, m] with `matrix` X = `right`, for a symmetric positive definite matrix."""
    low = _cholesky(matrix)
    n, columns = right.shape
    out = np.empty((n, columns))
    for c in range(columns):
        for i in range(n):
            out[i, c] = right[i, c]
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
    """The lower triangle L with L L^T = `matrix`. A singular direction gets an infinite pivot, so solves ignore it."""
    n = len(matrix)
    low = np.zeros((n, n))
    least = 0.0
    for i in range(n):
        least = max(least, SINGULAR * matrix[i, i])
    for i in range(n):
        for k in range(i + 1):
            rest = matrix[i, k]
            for p in range(k):
                rest -= low[i, p] * low[k, p]
            if i > k:
                low[i, k] = rest / low[k, k]
            else:
                low[i, i] = np.sqrt(rest) if rest > least else np.inf
    return low
