"""robosuite's OSC_POSE control law and gripper for one substep, compiled. Import it after `prepare`.

The formulas are robosuite's own compiled functions; what is gone is the Python between them.
"""

from __future__ import annotations

import numba
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error


@numba.njit(cache=True, nogil=True)
def control(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    ctrl,  # [nu] written
    grip,  # [2] finger targets in [-1, 1], written
    close,  # sign of the gripper action
    goal_position,  # [3]
    goal_rotation,  # [3, 3]
    rest_joints,  # [7] nullspace target
    position,  # [3] of the grip site
    rotation,  # [9] of the grip site
    jacobian_position,  # [3, nv]
    jacobian_rotation,  # [3, nv]
    mass,  # [nv, nv]
    qpos,
    qvel,
    bias,  # [nv] gravity and Coriolis forces
    arm_qpos,  # addresses of the arm's joints
    arm_qvel,
    arm_ctrl,
    torque_limits,  # [2, 7]
    grip_ctrl,
    grip_range,  # [2, 2]
    gains,  # [2, 6] kp, kd
    grip_speed,
):
    """Torques of the arm and targets of the fingers into `ctrl`."""
    joints = len(arm_qvel)
    j_full = np.empty((6, joints))
    m = np.empty((joints, joints))
    joint_pos, joint_vel = np.empty(joints), np.empty(joints)
    for a in range(joints):
        joint_pos[a], joint_vel[a] = qpos[arm_qpos[a]], qvel[arm_qvel[a]]
        for row in range(3):
            j_full[row, a] = jacobian_position[row, arm_qvel[a]]
            j_full[3 + row, a] = jacobian_rotation[row, arm_qvel[a]]
        for b in range(joints):
            m[a, b] = mass[arm_qvel[a], arm_qvel[b]]
    j_pos, j_ori = j_full[:3], j_full[3:]
    error = orientation_error(goal_rotation, rotation.reshape(3, 3))
    force = (goal_position - position) * gains[0, :3] - np.dot(jacobian_position, qvel) * gains[1, :3]
    torque = error * gains[0, 3:] - np.dot(jacobian_rotation, qvel) * gains[1, 3:]
    _, lambda_pos, lambda_ori, nullspace = opspace_matrices(m, j_full, j_pos, j_ori)
    wrench = np.concatenate((np.dot(lambda_pos, force), np.dot(lambda_ori, torque)))
    torques = np.dot(j_full.T, wrench) + nullspace_torques(m, nullspace, rest_joints, joint_pos, joint_vel)
    for a in range(joints):
        wanted = torques[a] + bias[arm_qvel[a]]
        ctrl[arm_ctrl[a]] = min(max(wanted, torque_limits[0, a]), torque_limits[1, a])
    for finger in range(2):
        direction = -1.0 if finger == 0 else 1.0
        grip[finger] = min(max(grip[finger] + direction * grip_speed * close, -1.0), 1.0)
        low, high = grip_range[finger, 0], grip_range[finger, 1]
        ctrl[grip_ctrl[finger]] = 0.5 * (high + low) + 0.5 * (high - low) * grip[finger]
