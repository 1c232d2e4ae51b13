"""LIBERO's physics without robosuite's repeated work, bit for bit the same.

Per substep robosuite calls `mj_forward`, then `mj_forward` again from the controller, then `mj_step`, which starts
with a third one. Positions and velocities do not change in between, so one `mj_step1` and one `mj_step2` give the
same numbers. The controller looks up its site by name seven times and computes each Jacobian twice; once is enough.
`tests/envs/test_libero.py` compares the two.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np


class LeanStepping:
    """Takes over `forward` and `step` of one robosuite MjSim, and `update` of the controllers it is attached to."""

    def __init__(self, sim: Any) -> None:
        self._model: mujoco.MjModel = sim.model._model
        self._data: mujoco.MjData = sim.data._data
        self._stale = True
        self._jacobians = np.zeros((3, self._model.nv)), np.zeros((3, self._model.nv))
        self._mass = np.zeros((self._model.nv, self._model.nv))
        sim.forward = self.forward
        sim.step = self.step

    def invalidate(self) -> None:
        """Tell it that positions or velocities were written from outside."""
        self._stale = True

    def forward(self) -> None:
        if self._stale:
            mujoco.mj_step1(self._model, self._data)
            self._stale = False

    def step(self, with_udd: bool = True) -> None:
        self.forward()
        mujoco.mj_step2(self._model, self._data)
        self._stale = True

    def attach(self, controller: Any) -> None:
        site = self._model.site(controller.eef_name).id

        def update(force: bool = False) -> None:
            if controller.new_update or force:
                self.forward()
                self._read(controller, site)
                controller.new_update = False

        controller.update = update

    def _read(self, controller: Any, site: int) -> None:
        """What robosuite's Controller.update reads, computed by the same operations in the same order."""
        data, joints = self._data, controller.qvel_index
        position, rotation = self._jacobians
        mujoco.mj_jacSite(self._model, data, position, rotation, site)
        mujoco.mj_fullM(self._model, self._mass, data.qM)
        controller.ee_pos = data.site_xpos[site].copy()
        controller.ee_ori_mat = data.site_xmat[site].reshape(3, 3).copy()
        controller.ee_pos_vel = np.dot(position, data.qvel)
        controller.ee_ori_vel = np.dot(rotation, data.qvel)
        controller.joint_pos = data.qpos[controller.qpos_index]
        controller.joint_vel = data.qvel[joints]
        controller.J_pos = position[:, joints]
        controller.J_ori = rotation[:, joints]
        controller.J_full = np.vstack([controller.J_pos, controller.J_ori])
        controller.mass_matrix = self._mass[joints, :][:, joints]
