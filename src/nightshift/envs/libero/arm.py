"""What a robot's own sensors would say of a simulated arm: joints, velocity of the hand, force and torque on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def arm_readings(model: mujoco.MjModel, data: mujoco.MjData, robot: Any) -> Mapping[str, Vector]:
    """vel [6] (linear, angular), force [3], torque [3], q [7], dq [7]."""
    velocity = np.zeros(6)
    mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_SITE, robot.eef_site_id, velocity, 0)
    prefix = robot.gripper.naming_prefix
    return {
        "vel": np.concatenate([velocity[3:], velocity[:3]]),  # MuJoCo has the angular part first
        "force": data.sensor(f"{prefix}force_ee").data.copy(),
        "torque": data.sensor(f"{prefix}torque_ee").data.copy(),
        "q": data.qpos[robot._ref_joint_pos_indexes].copy(),
        "dq": data.qvel[robot._ref_joint_vel_indexes].copy(),
    }
