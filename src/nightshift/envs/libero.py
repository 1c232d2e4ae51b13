"""LIBERO behind the Env seam: state observations, frozen init states, bit-identical replay.

The simulation is LIBERO's own (problem classes, OSC_POSE at 20 Hz, success predicates). What is ours: a reset that
restores a state instead of rebuilding the world, and observations read straight from MuJoCo.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Step
from nightshift.envs.goal import Goal
from nightshift.envs.libero_setup import give_back_memory, prepare, quiet
from nightshift.envs.stepping import CompiledStepping, Lane, Rows
from nightshift.envs.suites import MINI, init_state_count, load_init_states, load_problem, suite_tasks
from nightshift.envs.world import World
from nightshift.errors import SimulatorError, UnstablePhysics
from nightshift.types import ACTION_DIM, Array, Observation, Scene, Split, Task

__all__ = ["LiberoEnv", "suite_tasks"]

CONTROL_HZ = 20
REST_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float64)
FRAME = (256, 256)
CAMERA = "agentview"
BUILD_SEED = 0
SETTLE_LIMIT = 3000
AT_REST = 1e-3
"""A drawn state has settled when nothing moves faster (m/s, rad/s), or after SETTLE_LIMIT physics steps of 2 ms."""
TRAIN_SEED = 1_000_000
"""Sampled train state i is drawn with seed TRAIN_SEED + i."""
BROKEN_PHYSICS = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)


class LiberoEnv:
    """One LIBERO task.

    Example:
        env = LiberoEnv(suite_tasks("libero_mini")[0])
        observation = env.reset("train", 0)
        observation, success = env.step(np.zeros(7, np.float32))
    """

    def __init__(self, task: Task, *, compiled: bool = True) -> None:
        """`compiled=False` steps through robosuite's own calls: the reference, several times slower."""
        self._task = task
        prepare()
        self._problem = load_problem(task)
        self._domain = control_env(task).env
        self._domain.visualize(vis_settings=dict.fromkeys(self._domain._visualizations, False))  # no helper shapes
        self._domain._observables = {}  # we read MuJoCo directly; robosuite would poll its sensors every substep
        self._sim = self._domain.sim
        self._robot = self._domain.robots[0]
        self._model: mujoco.MjModel = self._sim.model._model
        self._stepping = CompiledStepping(self._domain) if compiled else None
        give_back_memory()
        self._body_poses = self._model.body_pos.copy(), self._model.body_quat.copy()
        self._rest_joints = np.array(self._robot.init_qpos)
        self._one_hot = np.eye(task.suite_size, dtype=np.float32)[task.index]
        self._simulate_in(self._sim.data._data)

    def twin(self) -> LiberoEnv:
        """Another simulation on the same compiled model: megabytes and milliseconds where a build takes seconds."""
        other = copy.copy(self)
        other._simulate_in(mujoco.MjData(self._model))
        return other

    def _simulate_in(self, data: mujoco.MjData) -> None:
        self._data = data
        self._lane: Lane | None = self._stepping.lane(data) if self._stepping else None
        self._world = World(self._domain, data)
        self._goal = Goal(self._domain, data)
        self._steps = 0
        self._renderer: mujoco.Renderer | None = None
        self._can_render = True

    @property
    def task(self) -> Task:
        return self._task

    @cached_property
    def _init_states(self) -> dict[Split, NDArray[np.float64]]:
        return load_init_states(self._task)

    def reset(self, split: Split, init_state: int) -> Observation:
        count = init_state_count(self._task, split)
        if not 0 <= init_state < count:
            what = f"{self._task.name} has no {split} init state {init_state}"
            raise SimulatorError(what, f"choose one from 0 to {count - 1}")
        states = self._init_states.get(split)
        state = self.sample_state(TRAIN_SEED + init_state) if states is None else states[init_state]
        self._restore(state)
        for _ in range(self._problem.settle_steps):
            self._advance(REST_ACTION)
        self._steps = 0
        return self.observe()

    def step(self, action: Array) -> Step:
        self._steps += 1
        success = self._advance(usable_actions(self._task, self._steps, np.asarray(action)[None])[0])
        if self.is_broken():
            what = f"{self._task.name}, step {self._steps}: the physics became unstable and MuJoCo gave up"
            raise UnstablePhysics(what, "reset the environment and go on with another episode")
        return Step(self.observe(), success)

    @property
    def stepping(self) -> CompiledStepping:
        """Moves this simulation and its twins on, by their `address`."""
        assert self._stepping is not None, "this is the reference, which is not compiled"
        return self._stepping

    @property
    def address(self) -> Rows:
        assert self._lane is not None, "this is the reference, which is not compiled"
        return self._lane.row

    def is_broken(self) -> bool:
        """Whether the physics became unstable since the last reset; MuJoCo starts over by itself then."""
        return any(self._data.warning[kind].number for kind in BROKEN_PHYSICS)

    def is_solved(self) -> bool:
        self._focus()
        return self._goal.holds()

    def scene(self) -> Scene:
        return self._world.scene()

    def render(self) -> NDArray[np.uint8] | None:
        if self._renderer is None and self._can_render:
            self._renderer = _renderer(self._model)
            self._can_render = self._renderer is not None
            # Registered after the GL backend's own, so it runs before that takes GL down at exit.
            atexit.register(_close, weakref.ref(self))
        if self._renderer is None:
            return None
        options = mujoco.MjvOption()
        options.geomgroup[0] = 0  # collision shapes
        self._renderer.update_scene(self._data, camera=CAMERA, scene_option=options)
        return np.array(self._renderer.render(), dtype=np.uint8)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
            self._can_render = False

    def sample_state(self, seed: int) -> NDArray[np.float64]:
        """A state drawn from LIBERO's placement samplers: robot at rest, objects settled on the table, time 0."""
        self._focus()
        self._clear()
        with quiet(), _numpy_seed(seed):
            _until_placed(self._domain)
        self._model.body_pos[:], self._model.body_quat[:] = self._body_poses  # a state cannot hold where fixtures stand
        arm = self._robot._ref_joint_pos_indexes + self._robot._ref_gripper_joint_pos_indexes
        arm_speed = self._robot._ref_joint_vel_indexes + self._robot._ref_gripper_joint_vel_indexes
        rest = self._data.qpos[arm].copy()
        for step in range(SETTLE_LIMIT):
            self._data.qpos[arm], self._data.qvel[arm_speed] = rest, 0.0
            if step > SETTLE_LIMIT // 10 and np.abs(self._data.qvel).max() < AT_REST:
                break
            mujoco.mj_step(self._model, self._data)
        self._data.qpos[arm] = rest
        return np.concatenate([[0.0], self._data.qpos, np.zeros(self._model.nv)])

    def is_solved_in(self, state: NDArray[np.float64]) -> bool:
        """Whether the task's goal already holds in `state`."""
        self._restore(state)
        return bool(self._domain._check_success())

    def _advance(self, action: NDArray[np.float64]) -> bool:
        """One control step; whether the goal holds after it."""
        if self._stepping is None or self._lane is None:
            _, _, success, _ = self._domain.step(action)
            self._sim.forward()
            return bool(success)
        self._stepping.step(self._lane.row[None], action[None])
        return self.is_solved()

    def _restore(self, state: NDArray[np.float64]) -> None:
        expected = 1 + self._model.nq + self._model.nv
        if state.shape != (expected,):
            what = f"an init state of {self._task.name} has {state.size} numbers, the simulation {expected}"
            raise SimulatorError(what, "the init states belong to another version of the task; make them again")
        self._focus()
        self._clear()
        self._sim.set_state_from_flattened(state)
        self._sim.forward()
        if self._lane is not None:
            self._lane.restart()
        controller = self._robot.controller
        controller.update_initial_joints(self._rest_joints)  # also takes up the arm's pose as the goal
        controller.new_update = True

    def _focus(self) -> None:
        """LIBERO's objects look at one MjData: ours, from here on. Twins share those objects."""
        self._sim.data._data = self._data

    def _clear(self) -> None:
        """Everything that could carry over from what was simulated before."""
        mujoco.mj_resetData(self._model, self._data)
        self._model.body_pos[:], self._model.body_quat[:] = self._body_poses
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)
        self._domain.timestep = 0
        self._domain.cur_time = 0
        self._domain.done = False

    def observe(self) -> dict[str, Array]:
        return {"proprio": self._world.proprio(), "objects": self._world.objects(), "task": self._one_hot}


def usable_actions(task: Task, step: int, actions: Array) -> NDArray[np.float64]:
    """`actions` [N, A], clipped to the range as LIBERO does; nothing else reaches the simulator."""
    values = np.asarray(actions, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != ACTION_DIM or not np.isfinite(values).all():  # noqa: PLR2004
        what = f"{task.name}, step {step}: action {np.array2string(values, precision=3)} is not usable"
        raise SimulatorError(what, f"give {ACTION_DIM} finite numbers; a policy that does not has diverged")
    return np.clip(values, -1.0, 1.0)


def control_env(task: Task) -> Any:
    """LIBERO's own environment, as it comes. Fixtures are placed at random while it is built, so the seed is fixed."""
    prepare()
    import libero.libero
    from libero.libero.envs.env_wrapper import ControlEnv

    if task.suite == MINI:
        import nightshift.envs.mini.objects  # noqa: F401 - registers the objects with LIBERO

    problem = load_problem(task)
    libero.libero._assets_path_cache = str(problem.assets)
    scene = {"scene_xml": str(problem.scene)} if problem.scene else {}
    with quiet(), _numpy_seed(BUILD_SEED):
        return ControlEnv(
            bddl_file_name=str(problem.bddl),
            controller="OSC_POSE",
            control_freq=CONTROL_HZ,
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
            horizon=2**31,
            **scene,
        )


def _until_placed(domain: Any) -> None:
    from robosuite.utils.errors import RandomizationError

    for _ in range(100):
        with contextlib.suppress(RandomizationError):
            domain._reset_internal()
            return
    raise SimulatorError("LIBERO's samplers found no room for the objects", "widen the regions in the BDDL file")


def _close(env: weakref.ref[LiberoEnv]) -> None:
    alive = env()
    if alive is not None:
        alive.close()


def _renderer(model: mujoco.MjModel) -> mujoco.Renderer | None:
    """None where no GL library works: every backend fails in its own way, so any error means no pictures."""
    backend = os.environ["MUJOCO_GL"]
    if backend not in ("egl", "osmesa"):
        return None
    try:
        context: Any = importlib.import_module(f"mujoco.{backend}").GLContext
        context(*FRAME).free()
        # mujoco picks its backend when it is first imported, which may have been before prepare() chose one.
        mujoco.gl_context.GLContext = context
        return mujoco.Renderer(model, *FRAME)
    except Exception:  # noqa: BLE001
        return None


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: seed it here and leave it as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
