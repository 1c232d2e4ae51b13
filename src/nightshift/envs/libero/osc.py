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
    sizes,  # nq, nv, nu, nM, number of substeps, grip site
    rest_joints,  # [7] nullspace target
    arm_mass,  # [7, 7] where MuJoCo's sparse mass matrix has the arm's elements
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
    nq, nv, nu, elements, substeps, site = sizes
    jacobians = np.empty((2, 3, nv))
    scratch = _scratch()
    j, j_transposed, m, wrench, posture, torques = scratch[:6]
    for lane in range(len(addresses)):
        row = addresses[lane]
        data = row[Field.DATA]
        qpos, qvel = array_at(row[Field.QPOS], nq), array_at(row[Field.QVEL], nv)
        ctrl, bias = array_at(row[Field.CTRL], nu), array_at(row[Field.BIAS], nv)
        mass = array_at(row[Field.MASS], elements)
        position = array_at(row[Field.POSITION], 3)
        rotation = array_at(row[Field.ROTATION], (3, 3))
        goal_position = array_at(row[Field.GOAL_POSITION], 3)
        goal_rotation = array_at(row[Field.GOAL_ROTATION], (3, 3))
        fingers = array_at(row[Field.FINGERS], 2)
        _set_goal(actions[lane], action_scale, position, rotation, goal_position, goal_rotation)
        close = np.sign(actions[lane, 6])
        for _ in range(substeps):
            _mj_jac_site(model, data, jacobians[0].ctypes.data, jacobians[1].ctypes.data, site)
            _read_arm(jacobians, mass, arm_mass, arm_qvel, j, j_transposed, m)
            _set_wrench(j, qvel, arm_qvel, position, rotation, goal_position, goal_rotation, gains, wrench)
            _set_posture(rest_joints, qpos, qvel, arm_qpos, arm_qvel, posture)
            _set_torques(scratch)
            for a in range(JOINTS):
                wanted = torques[a, 0] + bias[arm_qvel[a]]
                ctrl[arm_ctrl[a]] = min(max(wanted, torque_limits[0, a]), torque_limits[1, a])
            _move_fingers(ctrl, fingers, close * grip_speed, grip_ctrl, grip_range)
            _mj_step2(model, data)
            _mj_step1(model, data)


@numba.njit(cache=True, nogil=True)
def _scratch():  # type: ignore[no-untyped-def]
    """Matrices of one substep, allocated once: allocating them in every substep costs as much as the arithmetic."""
    return (
        np.empty((6, JOINTS)),  # Jacobian of the hand
        np.empty((JOINTS, 6)),  # its transpose
        np.empty((JOINTS, JOINTS)),  # mass matrix
        np.empty((6, 1)),  # wrench
        np.empty((JOINTS, 1)),  # accelerations towards the rest pose
        np.empty((JOINTS, 1)),  # torques, the result
        np.empty((JOINTS, 1)),  # torques towards the rest pose
        np.empty((JOINTS, 6)),  # accelerations of the joints per wrench
        np.empty((6, 6)),  # mobility
        np.empty((6, 1)),  # accelerations of the hand by the torques towards the rest pose
        np.empty((6, 1)),  # their wrench
        np.empty((3, 1)),  # force
        np.empty((3, 1)),  # moment
        np.empty((JOINTS, JOINTS)),  # of `_solve`
    )


@numba.njit(cache=True, nogil=True)
def _read_arm(jacobians, mass, arm_mass, arm_qvel, j, j_transposed, m):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Jacobian and mass matrix of the arm's joints."""
    for a in range(JOINTS):
        for i in range(6):
            j[i, a] = j_transposed[a, i] = jacobians[i // 3, i % 3, arm_qvel[a]]
        for b in range(JOINTS):
            m[a, b] = mass[arm_mass[a, b]] if arm_mass[a, b] >= 0 else 0.0


@numba.njit(cache=True, nogil=True)
def _set_posture(rest, qpos, qvel, arm_qpos, arm_qvel, out):  # type: ignore[no-untyped-def]
    """A critically damped spring towards the rest pose."""
    for a in range(JOINTS):
        speed = 2.0 * np.sqrt(NULLSPACE_GAIN) * qvel[arm_qvel[a]]
        out[a, 0] = NULLSPACE_GAIN * (rest[a] - qpos[arm_qpos[a]]) - speed


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
def _set_wrench(j, qvel, arm_qvel, position, rotation, goal_position, goal_rotation, gains, out):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Force and moment [6, 1] of a damped spring between the hand and its goal, per unit of mass."""
    for i in range(3):
        i1, i2 = (i + 1) % 3, (i + 2) % 3
        error = speed = turn = 0.0
        for k in range(3):  # half the sum of the cross products of the axes of the two rotations
            error += 0.5 * (rotation[i1, k] * goal_rotation[i2, k] - rotation[i2, k] * goal_rotation[i1, k])
        for a in range(JOINTS):
            speed += j[i, a] * qvel[arm_qvel[a]]
            turn += j[3 + i, a] * qvel[arm_qvel[a]]
        out[i, 0] = (goal_position[i] - position[i]) * gains[0, i] - speed * gains[1, i]
        out[3 + i, 0] = error * gains[0, 3 + i] - turn * gains[1, 3 + i]


@numba.njit(cache=True, nogil=True)
def _move_fingers(ctrl, fingers, speed, grip_ctrl, grip_range):  # type: ignore[no-untyped-def]
    """The fingers mirror each other; their targets move at a constant speed until fully open or closed."""
    for finger in range(2):
        direction = -1.0 if finger == 0 else 1.0
        fingers[finger] = min(max(fingers[finger] + direction * speed, -1.0), 1.0)
        low, high = grip_range[finger, 0], grip_range[finger, 1]
        ctrl[grip_ctrl[finger]] = 0.5 * (high + low) + 0.5 * (high - low) * fingers[finger]


@numba.njit(cache=True, nogil=True)
def _set_torques(scratch):  # type: ignore[no-untyped-def]
    """Operational-space torques: decoupled force and moment, and in their nullspace a PD term towards the rest pose."""
    j, j_transposed, m, wrench, posture, out, pose, accelerations, mobility, drift, leak, force, moment, low = scratch
    _multiply(m, posture, pose)
    _solve(m, 0, j_transposed, low, accelerations)  # M^-1 J^T
    _multiply(j, accelerations, mobility)  # J M^-1 J^T, the inverse of the operational-space inertia
    for i in range(6):
        drift[i, 0] = 0.0
        for a in range(JOINTS):
            drift[i, 0] += accelerations[a, i] * pose[a, 0]
    _solve(mobility, 0, drift, low, leak)  # wrench of the posture torques at the hand
    _solve(mobility, 0, wrench, low, force)
    _solve(mobility, 3, wrench, low, moment)
    for a in range(JOINTS):
        out[a, 0] = pose[a, 0]
        for i in range(3):
            out[a, 0] += j[i, a] * (force[i, 0] - leak[i, 0]) + j[3 + i, a] * (moment[i, 0] - leak[3 + i, 0])


@numba.njit(cache=True, nogil=True)
def _multiply(left, right, out):  # type: ignore[no-untyped-def]
    for i in range(left.shape[0]):
        for c in range(right.shape[1]):
            out[i, c] = 0.0
        for k in range(left.shape[1]):
            for c in range(right.shape[1]):
                out[i, c] += left[i, k] * right[k, c]


@numba.njit(cache=True, nogil=True)
def _solve(matrix, start, right, low, out):  # type: ignore[no-untyped-def]
    """out [n, m] with B out = R, for the symmetric positive definite block B [n, n] of `matrix` from (start, start) on
    and the rows R [n, m] of `right` from `start` on. `low` is overwritten."""
    n, columns = out.shape
    _cholesky(matrix, start, n, low)
    for c in range(columns):
        for i in range(n):
            out[i, c] = right[start + i, c]
            for p in range(i):
                out[i, c] -= low[i, p] * out[p, c]
            out[i, c] /= low[i, i]
        for i in range(n - 1, -1, -1):
            for p in range(i + 1, n):
                out[i, c] -= low[p, i] * out[p, c]
            out[i, c] /= low[i, i]


@numba.njit(cache=True, nogil=True)
def _cholesky(matrix, start, n, low):  # type: ignore[no-untyped-def]
    """The lower triangle L with L L^T = the block. A singular direction gets an infinite pivot, so solves ignore it."""
    least = 0.0
    for i in range(n):
        least = max(least, SINGULAR * matrix[start + i, start + i])
    for i in range(n):
        for k in range(i + 1):
            rest = matrix[start + i, start + k]
            for p in range(k):
                rest -= low[i, p] * low[k, p]
            if i > k:
                low[i, k] = rest / low[k, k]
            else:
                low[i, i] = np.sqrt(rest) if rest > least else np.inf
