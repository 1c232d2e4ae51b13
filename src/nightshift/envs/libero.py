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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Camera, Step
from nightshift.envs.compiling import compile_control_step
from nightshift.envs.goal import Goal
from nightshift.envs.libero_setup import NO_GL, give_back_memory, prepare, quiet
from nightshift.envs.placement import Placement
from nightshift.envs.protocols import DEFAULT, Protocol, rotate
from nightshift.envs.stepping import CompiledStepping, Lane, Rows
from nightshift.envs.suites import MINI, load_init_states, load_problem, settle_steps, suite_tasks
from nightshift.envs.world import World
from nightshift.errors import SimulatorError, UnstablePhysics
from nightshift.types import ACTION_DIM, Array, Observation, Scene, Split, Task

if TYPE_CHECKING:
    from nightshift.envs.observations import Sight

__all__ = ["LiberoEnv", "can_render", "suite_tasks"]

CONTROL_HZ = 20
CAMERA_NAMES: dict[Camera, str] = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""LIBERO's names of the cameras."""
SETTLE_LIMIT = 3000
AT_REST = 1e-3
"""A drawn state has settled when nothing moves faster (m/s, rad/s), or after SETTLE_LIMIT physics steps of 2 ms."""
STAYED = 0.05
"""Metres that a drawn object may slide while it settles."""
_WARNING = mujoco.mjtWarning
BROKEN_PHYSICS = [int(kind) for kind in (_WARNING.mjWARN_BADQPOS, _WARNING.mjWARN_BADQVEL, _WARNING.mjWARN_BADQACC)]


class LiberoEnv:
    """One LIBERO task.

    Example:
        env = LiberoEnv(suite_tasks("libero_mini")[0])
        observation = env.reset("train", 0)
        observation, success = env.step(np.zeros(7, np.float32))
    """

    def __init__(
        self,
        task: Task,
        protocol: Protocol = DEFAULT,
        *,
        compiled: bool = True,
        train_states: NDArray[np.float64] | None = None,
    ) -> None:
        """`compiled=False` steps through robosuite's own calls: the reference, several times slower.

        Init states are read when they are first needed; `train_states` [N, D] come from elsewhere.
        """
        self._task = task
        prepare()
        compile_control_step()
        self._protocol = protocol
        self._settling = [np.array(protocol.settle_action)] * settle_steps(task.suite, protocol)
        self._domain = control_env(task, protocol.seed).env
        self._domain.visualize(vis_settings=dict.fromkeys(self._domain._visualizations, False))  # no helper shapes
        self._domain._observables = {}  # we read MuJoCo directly; robosuite would poll its sensors every substep
        self._sim = self._domain.sim
        self._robot = self._domain.robots[0]
        self._model: mujoco.MjModel = self._sim.model._model
        self._stepping = CompiledStepping(self._domain) if compiled else None
        self.sight = _sight(self._domain)
        give_back_memory()
        self._body_poses = self._model.body_pos.copy(), self._model.body_quat.copy()
        self._rest_joints = np.array(self._robot.init_qpos)
        self._placement = Placement(self._domain)
        free = self._model.jnt_qposadr[self._model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
        self._objects_xy = np.stack([free, free + 1], axis=-1)  # [objects, 2] addresses in qpos
        self._one_hot = np.eye(task.suite_size, dtype=np.float32)[task.index]
        self._init_states: dict[Split, NDArray[np.float64]] = {} if train_states is None else {"train": train_states}
        self._simulate_in(self._sim.data._data)

    def twin(self) -> LiberoEnv:
        """Another simulation on the same compiled model: megabytes and milliseconds where a build takes seconds."""
        other = copy.copy(self)
        other._simulate_in(mujoco.MjData(self._model))
        return other

    def _simulate_in(self, data: mujoco.MjData) -> None:
        self._data = data
        self._warnings = data.warning.number  # how often each was raised since the last reset
        self._lane: Lane | None = self._stepping.lane(data) if self._stepping else None
        self.sight_row = self.sight.row(data)
        self._world = World(self._domain, data)
        self._goal = Goal(self._domain, data)
        self._steps = 0
        self._renderer: mujoco.Renderer | None = None
        self._can_render = True

    @property
    def task(self) -> Task:
        return self._task

    def reset(self, split: Split, init_state: int) -> Observation:
        if split not in self._init_states:
            self._init_states[split] = load_init_states(self._task, split)
        states = self._init_states[split]
        if not 0 <= init_state < len(states):
            what = f"{self._task.name} has no {split} init state {init_state}"
            raise SimulatorError(what, f"choose one from 0 to {len(states) - 1}")
        self._restore(states[init_state])
        for action in self._settling:
            self._advance(action)
        self._steps = 0
        return self.observe()

    def step(self, action: Array) -> Step:
        self._steps += 1
        success = self._advance(usable_actions(self._task, self._steps, np.asarray(action)[None])[0])
        if self.is_unstable():
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

    def is_unstable(self) -> bool:
        """Whether the physics became unstable since the last reset; MuJoCo starts over by itself then."""
        return bool(self._warnings[BROKEN_PHYSICS].any())

    def is_solved(self) -> bool:
        self._focus()
        return self._goal.holds()

    def scene(self) -> Scene:
        return self._world.scene()

    def full_state(self) -> NDArray[np.float64]:
        return np.concatenate([[self._data.time], self._data.qpos, self._data.qvel])

    def look(self, cameras: Sequence[Camera]) -> dict[Camera, NDArray[np.uint8]]:
        pictures: dict[Camera, NDArray[np.uint8]] = {}
        for camera in cameras:
            picture = self._picture(camera)
            if picture is None:
                raise SimulatorError(f"{self._task.name} cannot be looked at: no GL library works here", NO_GL)
            from_below = picture[::-1]  # as LIBERO hands images out: the lowest row first
            pictures[camera] = rotate(from_below) if self._protocol.rotated else np.ascontiguousarray(from_below)
        return pictures

    def render(self) -> NDArray[np.uint8] | None:
        return self._picture("agentview")

    def _picture(self, camera: Camera) -> NDArray[np.uint8] | None:
        """The highest row first; None where no GL library works."""
        if self._renderer is None and self._can_render:
            self._renderer = _renderer(self._model, self._protocol.resolution)
            self._can_render = self._renderer is not None
            # Registered after the GL backend's own, so it runs before that takes GL down at exit.
            atexit.register(_close, weakref.ref(self))
        if self._renderer is None:
            return None
        self._focus()
        self._domain._post_process()  # what is switched on shines; nothing but pictures depends on it
        options = mujoco.MjvOption()
        options.geomgroup[0] = 0  # collision shapes
        self._renderer.update_scene(self._data, camera=CAMERA_NAMES[camera], scene_option=options)
        return np.array(self._renderer.render(), dtype=np.uint8)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
            self._can_render = False

    def sample_state(self, seed: int) -> NDArray[np.float64] | None:
        """A state drawn from LIBERO's placement samplers: robot at rest, objects settled on the table, time 0.

        None where something fell over or was pushed away while it settled: the samplers let objects overlap.
        """
        self._focus()
        self._clear()
        with quiet(), _numpy_seed(seed):
            self._placement.draw()
        arm = self._robot._ref_joint_pos_indexes + self._robot._ref_gripper_joint_pos_indexes
        arm_speed = self._robot._ref_joint_vel_indexes + self._robot._ref_gripper_joint_vel_indexes
        rest = self._data.qpos[arm].copy()
        placed = self._data.qpos[self._objects_xy].copy()
        for step in range(SETTLE_LIMIT):
            self._data.qpos[arm], self._data.qvel[arm_speed] = rest, 0.0
            if step > SETTLE_LIMIT // 10 and np.abs(self._data.qvel).max() < AT_REST:
                break
            mujoco.mj_step(self._model, self._data)
        self._data.qpos[arm] = rest
        if (np.linalg.norm(self._data.qpos[self._objects_xy] - placed, axis=-1) > STAYED).any():
            return None
        return np.concatenate([[0.0], self._data.qpos, np.zeros(self._model.nv)])

    def positions_in(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of `state` that says where things are, without the time and the velocities."""
        return state[1 : 1 + self._model.nq]

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
        shown = {name: np.zeros((1, size), np.float32) for name, size in self.sight.sizes.items()}
        self.sight.write(self.sight_row[None], np.zeros(1, np.int64), shown)
        return {**{name: values[0] for name, values in shown.items()}, "task": self._one_hot}


def _sight(domain: Any) -> Sight:
    from nightshift.envs.observations import Sight  # compiles, so not before `prepare` has said where to

    return Sight(domain)


def usable_actions(task: Task, step: int, actions: Array) -> NDArray[np.float64]:
    """`actions` [N, A], clipped to the range as LIBERO does; nothing else reaches the simulator."""
    values = np.asarray(actions, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != ACTION_DIM or not np.isfinite(values).all():  # noqa: PLR2004
        what = f"{task.name}, step {step}: action {np.array2string(values, precision=3)} is not usable"
        raise SimulatorError(what, f"give {ACTION_DIM} finite numbers; a policy that does not has diverged")
    return np.clip(values, -1.0, 1.0)


def can_render() -> bool:
    """Whether a GL library works here, found out by drawing."""
    prepare()
    renderer = _renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), resolution=16)
    if renderer is None:
        return False
    renderer.close()
    return True


def control_env(task: Task, seed: int = DEFAULT.seed) -> Any:
    """LIBERO's own environment, as it comes. Fixtures are placed at random while it is built, so the seed is fixed."""
    prepare()
    import libero.libero
    from libero.libero.envs.env_wrapper import ControlEnv

    if task.suite == MINI:
        import nightshift.envs.mini.objects  # noqa: F401 - registers the objects with LIBERO

    problem = load_problem(task)
    libero.libero._assets_path_cache = str(problem.assets)
    scene = {"scene_xml": str(problem.scene)} if problem.scene else {}
    with quiet(), _numpy_seed(seed):
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


def _close(env: weakref.ref[LiberoEnv]) -> None:
    alive = env()
    if alive is not None:
        alive.close()


def _renderer(model: mujoco.MjModel, resolution: int) -> mujoco.Renderer | None:
    """None where no GL library works: every backend fails in its own way, so any error means no pictures."""
    backend = os.environ["MUJOCO_GL"]
    if backend not in ("egl", "osmesa"):
        return None
    try:
        context: Any = importlib.import_module(f"mujoco.{backend}").GLContext
        context(resolution, resolution).free()
        # mujoco picks its backend when it is first imported, which may have been before prepare() chose one.
        mujoco.gl_context.GLContext = context
        return mujoco.Renderer(model, resolution, resolution)
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
