"""LIBERO behind the Env seam: state observations, frozen init states, bit-identical replay.

The simulation is LIBERO's own (problem classes, OSC_POSE at 20 Hz, success predicates). Different here: a reset
restores a state instead of rebuilding the model, and observations are read straight from MuJoCo's arrays.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import ActionSpace, Drawing, States, Step, stored_split
from nightshift.envs.libero.arm import arm_readings
from nightshift.envs.libero.cameras import CameraRenderer, Dress
from nightshift.envs.libero.compiling import compile_control_step
from nightshift.envs.libero.model_copies import ModelCopies
from nightshift.envs.libero.placement import Placement
from nightshift.envs.libero.problem import ACTIONS, STATE_SIZES, Problem, ProblemSource
from nightshift.envs.libero.scene_model import Furnished, SceneModel, furnish
from nightshift.envs.libero.setup import prepare, quiet, trim_memory
from nightshift.envs.libero.stepping import Addresses, CompiledStepping, Lane
from nightshift.envs.libero.world import World
from nightshift.envs.protocols import DEFAULT, Protocol
from nightshift.errors import SimulatorError, UnstablePhysics
from nightshift.types import INSTRUCTION, Array, Observation, Scene, Split, Task

if TYPE_CHECKING:
    from nightshift.envs.libero.goal import Goal
    from nightshift.envs.libero.observations import Observer
    from nightshift.envs.perturbations.base import Perturbation

CONTROL_HZ = 20
SETTLE_LIMIT = 3000
AT_REST = 1e-3
"""A drawn state has settled when nothing moves faster (m/s, rad/s), or after SETTLE_LIMIT physics steps of 2 ms."""
MAX_SLIDE = 0.05
"""Metres that a drawn object may slide while it settles."""
_WARNING = mujoco.mjtWarning
BROKEN_PHYSICS = [int(kind) for kind in (_WARNING.mjWARN_BADQPOS, _WARNING.mjWARN_BADQVEL, _WARNING.mjWARN_BADQACC)]


class LiberoEnv:
    """One LIBERO task.

    Example:
        env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
        observation = env.reset("train", 0)
        observation, success = env.step(np.zeros(7, np.float32))
    """

    def __init__(
        self,
        suite: ProblemSource,
        task: Task,
        protocol: Protocol,
        drawing: Drawing,
        *,
        compiled: bool = True,
        train_states: States | None = None,
    ) -> None:
        """`compiled=False` steps through robosuite's own calls: the reference, several times slower.

        Init states are read when they are first needed; `train_states` [N, D] replace those of the project.
        """
        self._suite = suite
        self._task = task
        prepare()
        compile_control_step()
        self.settling = [np.array(protocol.settle_action)] * suite.settle_steps(protocol)
        self._domain = control_env(suite.problem(task), protocol.seed).env
        self._domain.visualize(vis_settings=dict.fromkeys(self._domain._visualizations, False))  # no marker shapes
        self._domain._observables = {}  # unused, and robosuite would compute them every substep
        self._sim = self._domain.sim
        self._robot = self._domain.robots[0]
        self._robot.initialization_noise = {"magnitude": suite.arm_noise, "type": "gaussian"}
        self._model: mujoco.MjModel = self._sim.model._model
        self._stepping = CompiledStepping(self._domain) if compiled else None
        self.observer, self.goal = _compiled_parts(self._domain)
        trim_memory()
        self._body_poses = self._model.body_pos.copy(), self._model.body_quat.copy()
        self._rest_joints = np.array(self._robot.init_qpos)
        self._placement = Placement(self._domain)
        free = self._model.jnt_qposadr[self._model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
        self._objects_xy = np.stack([free, free + 1], axis=-1)  # [objects, 2] addresses in qpos
        self._of_task = {
            "task": np.eye(task.suite_size, dtype=np.float32)[task.index],
            INSTRUCTION: np.array(task.language),
        }
        self._renderer = CameraRenderer(self._model, drawing, protocol.resolution)
        self._domain_lock = threading.Lock()
        self._init_states: dict[str, States] = {} if train_states is None else {"train": train_states}
        self._starts: dict[tuple[str, int], NDArray[np.float64]] = {}
        self._names = self._sim.model
        self._dress = Dress(self._model)
        self._furnished: list[Furnished] = []
        self._lent_by: ModelCopies | None = None
        """Where the model of an altered simulation goes when it is closed."""
        self._simulate_in(self._sim.data._data)

    def with_new_data(self) -> LiberoEnv:
        """Another simulation: the same MjModel with an MjData of its own. Milliseconds, where a build takes seconds."""
        other = copy.copy(self)
        other._simulate_in(mujoco.MjData(self._model))
        return other

    def altered(self, changes: Sequence[Perturbation], split: Split, init_state: int) -> LiberoEnv:
        """Another simulation with a model and an init state of its own, which `changes` have changed.

        It may be reset to that init state alone. Closing it makes room for the next one.
        """
        furnished = self._furnish()
        scene = SceneModel(self._domain, furnished, self._state(split, init_state))
        for change in changes:
            change.change_scene(scene)
        scene.finished()
        other = copy.copy(self)
        other._starts = {(stored_split(split), init_state): scene.start}
        other._lent_by = furnished.copies
        other._model = scene.model
        other._names = type(self._names)(scene.model)
        other._dress = Dress(scene.model, frozenset(scene.textures), frozenset(scene.meshes))
        other._stepping = self._stepping.on(scene.model) if self._stepping else None
        other._body_poses = scene.model.body_pos.copy(), scene.model.body_quat.copy()
        other._simulate_in(mujoco.MjData(scene.model))
        return other

    def _furnish(self) -> Furnished:
        """Compiled once for all simulations of the task."""
        with self._domain_lock:
            if not self._furnished:
                self._furnished.append(furnish(self._domain, self._model))
            return self._furnished[0]

    def _simulate_in(self, data: mujoco.MjData) -> None:
        self._data = data
        self._warnings = data.warning.number  # count of each kind since the last reset
        self._lane: Lane | None = self._stepping.lane(data) if self._stepping else None
        self.observation_addresses = self.observer.addresses(data)
        self._world: World | None = None
        self._steps = 0

    @property
    def task(self) -> Task:
        return self._task

    @property
    def action_space(self) -> ActionSpace:
        return ACTIONS

    def reset(self, split: Split, init_state: int) -> Observation:
        self.restore(split, init_state)
        for action in self.settling:
            self._advance(action)
        self.check_settled(split, init_state)
        return self.observe()

    def restore(self, split: Split, init_state: int) -> None:
        """The first part of a reset. Next come the control steps of `settling`, then `check_settled`."""
        self._restore(self._state(split, init_state))
        self._steps = 0

    def _state(self, split: Split, init_state: int) -> NDArray[np.float64]:
        stored = stored_split(split)
        if self._starts:
            return self._starts[stored, init_state]
        if stored not in self._init_states:
            self._init_states[stored] = self._suite.load_init_states(self._task, stored)
        states = self._init_states[stored]
        if not 0 <= init_state < len(states):
            what = f"{self._task.name} has no {split} init state {init_state}"
            raise SimulatorError(what, f"choose one from 0 to {len(states) - 1}")
        found: NDArray[np.float64] = states[init_state]
        return found

    def check_settled(self, split: Split, init_state: int) -> None:
        if self.is_unstable():  # before the first action: not the policy's failure
            raise RuntimeError(
                f"{self._task.name}, {split} state {init_state}: the physics is unstable while it settles"
            )

    def step(self, action: Array) -> Step:
        self._steps += 1
        success = self._advance(usable_actions(self._task, self._steps, np.reshape(action, (1, 1, -1)))[0, 0])
        if self.is_unstable():
            what = f"{self._task.name}, step {self._steps}: the physics became unstable and MuJoCo gave up"
            raise UnstablePhysics(what, "reset the environment and go on with another episode")
        return Step(self.observe(), success)

    @property
    def stepping(self) -> CompiledStepping:
        """Steps this simulation, and those that share its model, by their `step_addresses`."""
        assert self._stepping is not None, "the reference has no compiled step"
        return self._stepping

    @property
    def step_addresses(self) -> Addresses:
        assert self._lane is not None, "the reference has no compiled step"
        return self._lane.addresses

    def is_unstable(self) -> bool:
        """Whether the physics became unstable since the last reset; MuJoCo starts over by itself then."""
        return bool(self._warnings[BROKEN_PHYSICS].any())

    def is_solved(self) -> bool:
        """What LIBERO's own predicates say."""
        with self._bound():
            return bool(self._domain._check_success())

    def scene(self) -> Scene:
        if self._world is None:  # an expert alone reads it, and making one takes as long as some control steps
            self._world = World(self._domain, self._model, self._data)
        return self._world.scene()

    def arm_readings(self) -> Mapping[str, NDArray[np.float64]]:
        """What a robot's own sensors would say."""
        return arm_readings(self._model, self._data, self._robot)

    def full_state(self) -> NDArray[np.float64]:
        return np.concatenate([[self._data.time], self._data.qpos, self._data.qvel])

    def camera_images(self, cameras: Sequence[str]) -> dict[str, NDArray[np.uint8]]:
        return {camera: images[0] for camera, images in self.images_of([self], cameras).items()}

    def images_of(self, simulations: Sequence[LiberoEnv], cameras: Sequence[str]) -> dict[str, NDArray[np.uint8]]:
        """Images [N, S, S, 3] of simulations of this one's model."""
        return self.begin_images_of(simulations, cameras)()

    def begin_images_of(
        self, simulations: Sequence[LiberoEnv], cameras: Sequence[str]
    ) -> Callable[[], dict[str, NDArray[np.uint8]]]:
        """What `images_of` gives, once it is called; the GPU draws meanwhile."""
        lit = (simulation.lit() for simulation in simulations)
        return self._renderer.begin_images(lit, len(simulations), cameras, simulations[0]._dress)

    def images_in(self, states: States, cameras: Sequence[str]) -> dict[str, NDArray[np.uint8]]:
        """Images [T, S, S, 3] of this simulation in each of `states` [T, D]. Reset it before it steps again."""
        return self._renderer.images(map(self._shown_in, states), len(states), cameras, self._dress)

    def _shown_in(self, state: NDArray[np.float64]) -> mujoco.MjData:
        self._data.qpos[:] = self.positions_in(state)
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        return self.lit()

    def render(self) -> NDArray[np.uint8] | None:
        return self._renderer.film_frame(self.lit(), self._dress)

    def lit(self) -> mujoco.MjData:
        """The simulation's data, to be drawn before another's: what is switched on is lit in the model that they share.
        Only images depend on it."""
        with self._bound():
            self._domain._post_process()
        return self._data

    def sketch(self, *, films_alone: bool) -> None:
        """For all simulations of this model, before the first image."""
        self._renderer.sketch(films_alone=films_alone)

    def close(self) -> None:
        """Simulations of the same model cannot draw afterwards either."""
        if self._lent_by is not None:
            self._lent_by.give_back(self._model)
            return
        self._renderer.close()
        for furnished in self._furnished:
            furnished.copies.drop_idle()

    def sample_state(self, seed: int) -> NDArray[np.float64] | None:
        """A state drawn from LIBERO's samplers: arm at rest near its pose, objects settled on the table, time 0.

        None where something fell over or was pushed away while it settled: the samplers let objects overlap.
        """
        with self._bound(), quiet(), _numpy_seed(seed):
            self._clear()
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
        if (np.linalg.norm(self._data.qpos[self._objects_xy] - placed, axis=-1) > MAX_SLIDE).any():
            return None
        return np.concatenate([[0.0], self._data.qpos, np.zeros(self._model.nv)])

    def positions_in(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """The positions (qpos) in `state`, without time and velocities."""
        return state[1 : 1 + self._model.nq]

    def is_solved_in(self, state: NDArray[np.float64]) -> bool:
        """Whether the task's goal already holds in `state`."""
        self._restore(state)
        return self.is_solved()

    def _advance(self, action: NDArray[np.float64]) -> bool:
        """One control step; whether the goal holds after it."""
        if self._stepping is not None and self._lane is not None:
            self._stepping.step(self._lane.addresses[None], action[None])
            return self.is_solved()
        with self._bound():
            _, _, success, _ = self._domain.step(action)
            self._sim.forward()
            return bool(success)

    def _restore(self, state: NDArray[np.float64]) -> None:
        expected = 1 + self._model.nq + self._model.nv
        if state.shape != (expected,):
            what = f"an init state of {self._task.name} has {state.size} numbers, the simulation {expected}"
            raise SimulatorError(what, "the init states belong to another version of the task; make them again")
        with self._bound():
            self._clear()
            self._sim.set_state_from_flattened(state)
            self._sim.forward()
            controller = self._robot.controller
            controller.update_initial_joints(self._rest_joints)  # also takes up the arm's pose as the goal
            controller.new_update = True
        if self._lane is not None:
            self._lane.restart()

    @contextlib.contextmanager
    def _bound(self) -> Iterator[None]:
        """Make LIBERO's objects refer to this simulation's model and MjData. The simulations of a task share those
        objects, and their threads take turns with them."""
        with self._domain_lock:
            self._sim.model, self._sim.data._data = self._names, self._data
            yield

    def _clear(self) -> None:
        """Reset everything that could carry over from the previous episode."""
        mujoco.mj_resetData(self._model, self._data)
        self._model.body_pos[:], self._model.body_quat[:] = self._body_poses
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)
        self._domain.timestep = 0
        self._domain.cur_time = 0
        self._domain.done = False

    def observe(self) -> dict[str, Array]:
        rows = {name: np.zeros((1, size), np.float32) for name, size in STATE_SIZES.items()}
        self.observer.write(self.observation_addresses[None], np.zeros(1, np.int64), rows)
        return {**{name: values[0] for name, values in rows.items()}, **self._of_task}


def _compiled_parts(domain: Any) -> tuple[Observer, Goal]:
    from nightshift.envs.libero.goal import Goal  # these compile: `prepare` must have set the cache folder
    from nightshift.envs.libero.observations import Observer

    return Observer(domain), Goal(domain)


def usable_actions(task: Task, first: int, actions: Array) -> NDArray[np.float64]:
    """`actions` [N, T, A] of the steps from number `first` on, clipped to the action space as LIBERO does; others are
    refused."""
    values = np.asarray(actions, dtype=np.float64)
    steps = np.isfinite(values).all(axis=(0, 2))
    if values.shape[2] != ACTIONS.size or not steps.all():
        bad = int(np.argmin(steps))
        what = f"{task.name}, step {first + bad}: action {np.array2string(values[:, bad], precision=3)} is not usable"
        raise SimulatorError(what, f"give {ACTIONS.size} finite numbers; a policy that does not has diverged")
    return np.clip(values, ACTIONS.low, ACTIONS.high)


def control_env(problem: Problem, seed: int = DEFAULT.seed) -> Any:
    """LIBERO's own environment, unchanged. Fixtures are placed at random while it is built, so the seed is fixed."""
    prepare()
    import libero.libero
    from libero.libero.envs.env_wrapper import ControlEnv

    if problem.objects:
        importlib.import_module(problem.objects)
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


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: seed it here and leave it as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
