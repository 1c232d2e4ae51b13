"""A control step of LIBERO without the work that robosuite repeats.

Per substep robosuite calls `mj_forward`, again `mj_forward` from the controller, then `mj_step`, which starts with a
third one. Positions and velocities do not change in between, so one `mj_step1` and one `mj_step2` do the same; and the
control law between them is compiled (osc.py). `tests/envs/test_libero.py` holds it against robosuite's own stepping.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray


class CompiledStepping:
    """Takes over `forward` of one robosuite MjSim, and the substeps of its robot."""

    def __init__(self, domain: Any) -> None:
        from nightshift.envs.osc import control

        self._control = control
        self._robot = domain.robots[0]
        self._model: mujoco.MjModel = domain.sim.model._model
        self._data: mujoco.MjData = domain.sim.data._data
        self._substeps = int(domain.control_timestep / domain.model_timestep)
        self._stale = True
        self._jacobians = np.zeros((3, self._model.nv)), np.zeros((3, self._model.nv))
        self._mass = np.zeros((self._model.nv, self._model.nv))
        self._fingers = np.zeros(2)
        self._site: int = self._robot.eef_site_id
        self._wiring = self._wire()
        domain.sim.forward = self.forward

    def restart(self) -> None:
        """A new episode: positions and velocities are written from outside, the fingers have no target yet."""
        self._stale = True
        self._fingers[:] = 0.0

    def forward(self) -> None:
        if self._stale:
            mujoco.mj_step1(self._model, self._data)
            self._stale = False

    def step(self, action: NDArray[np.float64]) -> None:
        """One control step: a new goal, then every substep of it."""
        model, data, robot = self._model, self._data, self._robot
        self.forward()
        robot.controller.set_goal(action[: robot.controller.control_dim])
        jacobians, close = self._jacobians, float(np.sign(action[-1]))
        goal = robot.controller.goal_pos, robot.controller.goal_ori, robot.controller.initial_joint
        seen = data.site_xpos[self._site], data.site_xmat[self._site], *jacobians, self._mass
        state = data.qpos, data.qvel, data.qfrc_bias
        for _ in range(self._substeps):
            self.forward()
            mujoco.mj_jacSite(model, data, *jacobians, self._site)
            mujoco.mj_fullM(model, self._mass, data.qM)
            self._control(data.ctrl, self._fingers, close, *goal, *seen, *state, *self._wiring)
            mujoco.mj_step2(model, data)
            self._stale = True
        robot.controller.new_update = True

    def _wire(self) -> tuple[Any, ...]:
        """Addresses, limits and gains, in the order `control` takes them."""
        robot, model = self._robot, self._model
        fingers = np.array([model.actuator(name).id for name in robot.gripper.actuators])
        return (
            np.array(robot._ref_joint_pos_indexes),
            np.array(robot._ref_joint_vel_indexes),
            np.array(robot._ref_joint_actuator_indexes),
            np.array(robot.torque_limits),
            fingers,
            model.actuator_ctrlrange[fingers].copy(),
            np.array([robot.controller.kp, robot.controller.kd]),
            float(robot.gripper.speed),
        )
