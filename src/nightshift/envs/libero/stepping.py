"""Compiled control steps (osc.py) of the simulations on one built LIBERO problem."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.problem import ACTIONS

if TYPE_CHECKING:
    from nightshift.envs.libero.goal import Goal

Addresses = NDArray[np.int64]
"""Memory addresses of a simulation's arrays, [fields], or of several simulations', [N, fields]."""
Made = NDArray[np.int64]
Found = tuple[NDArray[np.bool_], NDArray[np.bool_]]


class Lane:
    """The controller state of one simulation, and the addresses of its arrays for the compiled step."""

    def __init__(self, data: mujoco.MjData, grip_site: int) -> None:
        self.data = data
        self.goal_position = np.zeros(3)
        self.goal_rotation = np.zeros((3, 3))
        self.fingers = np.zeros(2)
        self._site = data.site_xpos[grip_site], data.site_xmat[grip_site].reshape(3, 3)
        read = (data.qpos, data.qvel, data.ctrl, data.qM, data.qfrc_bias, *self._site)
        written = (self.goal_position, self.goal_rotation, self.fingers)
        self.addresses: Addresses = np.array([data._address, *(a.ctypes.data for a in (*read, *written))])

    def restart(self) -> None:
        """A new episode: the goal is the present pose of the hand, and the fingers have no target yet."""
        self.goal_position[:], self.goal_rotation[:] = self._site
        self.fingers[:] = 0.0


class CompiledStepping:
    """Steps lanes of one built LIBERO problem.

    Example:
        stepping = CompiledStepping(domain)
        lanes = [stepping.lane(mujoco.MjData(model)) for _ in range(8)]
        stepping.step(np.stack([lane.addresses for lane in lanes]), np.zeros((8, 7)))
    """

    def __init__(self, domain: Any) -> None:
        from nightshift.envs.libero.chunks import play
        from nightshift.envs.libero.osc import advance

        self._advance, self._play = advance, play
        self._robot = domain.robots[0]
        self._model: mujoco.MjModel = domain.sim.model._model
        self._constants = self._read_constants(int(domain.control_timestep / domain.model_timestep))

    def on(self, model: mujoco.MjModel) -> CompiledStepping:
        """The same for simulations of another model of the problem, whose robot is the same."""
        other = copy.copy(self)
        other._model = model
        return other

    def lane(self, data: mujoco.MjData) -> Lane:
        return Lane(data, self._robot.eef_site_id)

    def step(self, addresses: Addresses, actions: NDArray[np.float64]) -> None:
        """One control step of every simulation; `mj_step1` must have run on each."""
        assert actions.shape == (len(addresses), ACTIONS.size)
        self._advance(addresses, actions, self._model._address, *self._constants)

    def play(self, rows: tuple[Addresses, Addresses], goal: Goal, actions: NDArray[np.float64], made: Made) -> Found:
        """Control steps of every simulation with its `actions` [N, T, A], from number `made` [N] on, which is updated.

        Stops a simulation whose goal may be reached or whose physics is unstable: [N] both. `rows` are addresses of its
        control and of its state.
        """
        possible, unstable = np.zeros((2, len(made)), np.bool_)
        control = self._constants
        self._play(*rows, actions, self._model._address, control, goal.constants, made, possible, unstable)
        return possible, unstable

    def _read_constants(self, substeps: int) -> tuple[Any, ...]:
        """Indices, limits and gains, in the order of `advance`'s arguments."""
        robot, model = self._robot, self._model
        controller = robot.controller
        controller.scale_action(np.zeros(controller.control_dim))  # robosuite computes its scale on first use
        fingers = np.array([model.actuator(name).id for name in robot.gripper.actuators])
        return (
            np.array([model.nq, model.nv, model.nu, model.nM, substeps, robot.eef_site_id]),
            np.array(robot.init_qpos),
            _places_in_mass(model, np.array(robot._ref_joint_vel_indexes)),
            np.array(robot._ref_joint_pos_indexes),
            np.array(robot._ref_joint_vel_indexes),
            np.array(robot._ref_joint_actuator_indexes),
            np.array(robot.torque_limits),
            fingers,
            model.actuator_ctrlrange[fingers].copy(),
            np.array([controller.kp, controller.kd]),
            np.array(controller.action_scale),
            float(robot.gripper.speed),
        )


def _places_in_mass(model: mujoco.MjModel, dofs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where MuJoCo's sparse mass matrix has the elements [n, n] of these degrees of freedom; -1 where it has none."""
    dense = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, dense, np.arange(1.0, model.nM + 1))
    return dense[np.ix_(dofs, dofs)].astype(np.int64) - 1
