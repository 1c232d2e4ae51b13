"""Simulators behind the robot protocol: any suite of this package, played as if it were an arm."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from nightshift import config, envs
from nightshift.envs import protocols
from nightshift.envs.base import Env
from nightshift.envs.robot.messages import PROTOCOL, Description, Limits, Picture, RobotState, TaskInfo
from nightshift.envs.robot.poses import Scale, Vector, action_of, angle_between, quaternion_of_matrix
from nightshift.errors import SimulatorError, UnstablePhysics
from nightshift.types import INSTRUCTION, Observation, Scene, Split, Task

CONTROL_HZ = 20.0
SCALE = Scale(position=0.05, rotation=0.5)
"""Of LIBERO's operational-space control."""
_FINGERS = 0.08
"""Metres between open fingers."""
_OPEN, _CLOSE, _KEEP = -1.0, 1.0, 0.0
_HALF_OPEN = 0.5
_FULL_TURN = np.pi

LIMITS = Limits(
    box_low=(-2.0, -2.0, -0.5),
    box_high=(2.0, 2.0, 3.0),
    max_turn=_FULL_TURN,
    linear_speed=10.0,
    angular_speed=40.0,
    force=1e4,
    torque=1e4,
)
"""Wide, so that a simulated episode never meets them: nothing can break. A client may set its own below them."""


class ArmReadings(Protocol):
    """A simulator that knows its joints, its forces and its velocity; LIBERO's do."""

    def arm_readings(self) -> Mapping[str, Vector]:
        """vel [6], force [3], torque [3], q [7], dq [7]."""
        ...


class SimulatedArm:
    """The simulators of some tasks of a suite. Time stands still between commands: a pose command is one control step.

    Example:
        arm = SimulatedArm(env, watchdog_s=5.0)   # env: the section of params.yaml, with a suite of simulators
    """

    def __init__(
        self,
        env: config.Env,
        *,
        watchdog_s: float,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = env
        self._clock = clock
        self._tasks = {task.name: task for task in envs.tasks(env)}
        self._envs: dict[str, Env] = {}
        self._description = _describe(env, list(self._tasks.values()), watchdog_s, limits)
        first = next(iter(self._tasks))
        self._reset_to = (first, "train", 0)
        self._env: Env
        self._seen: Scene
        self._stopped = threading.Event()
        self._gripper = _KEEP
        self._success = self._unstable = False
        self._observation: Observation = {}
        self._pose = np.zeros(7)
        self._velocity = np.zeros(6)
        self.reset(*self._reset_to)

    @property
    def description(self) -> Description:
        return self._description

    def measure(self, cameras: Sequence[str]) -> RobotState:
        now = self._clock()
        images = self._env.camera_images(cameras) if cameras else {}
        vectors = {name: values for name, values in self._observation.items() if name != INSTRUCTION}
        return RobotState(
            time=now,
            mode="ready",
            pose=self._pose,
            **self._readings(),
            gripper_pos=min(max(self._seen.gripper_opening / _FINGERS, 0.0), 1.0),
            success=self._success,
            unstable=self._unstable,
            observations={name: np.asarray(values, np.float32) for name, values in vectors.items()},
            images={name: Picture(time=now, pixels=pixels) for name, pixels in images.items()},
        )

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        if self._stopped.is_set():
            return
        if gripper is not None:
            self.grip(gripper)
        if action is None:
            action = np.append(action_of(self._pose, target, SCALE), self._gripper)
        before = self._pose
        try:
            self._observation, self._success = self._env.step(action.astype(np.float32))
        except UnstablePhysics:
            self._unstable = True
            return
        self._look_around()
        self._velocity = _velocity(before, self._pose)

    def grip(self, opening: float) -> None:
        if not self._stopped.is_set():
            self._gripper = _OPEN if opening >= _HALF_OPEN else _CLOSE

    def joint_reset(self) -> None:
        """The arm alone cannot be moved back in a simulation: the last start again."""
        self.reset(*self._reset_to)

    def reset(self, task: str, split: str, init_state: int) -> None:
        if self._stopped.is_set():
            return
        if task not in self._envs:
            self._envs[task] = envs.make(self._tasks[task], self._config)
        self._env = self._envs[task]
        self._observation = self._env.reset(cast(Split, split), init_state)
        self._reset_to = (task, split, init_state)
        self._gripper = _KEEP
        self._success = self._unstable = False
        self._look_around()
        self._velocity = np.zeros(6)

    def update_param(self, values: Mapping[str, float]) -> None:
        raise SimulatorError(f"a simulated arm has no compliance parameters, and got {', '.join(values)}")

    def scene(self) -> Scene:
        return self._seen

    def clear_error(self) -> None:
        self._stopped.clear()

    def hold(self) -> None:
        """Nothing moves between commands."""

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        for env in self._envs.values():
            env.close()

    def _look_around(self) -> None:
        scene = self._seen = self._env.scene()
        self._pose = np.concatenate([scene.gripper_position, quaternion_of_matrix(scene.gripper_rotation)])

    def _readings(self) -> dict[str, Vector]:
        zeros = {
            "vel": self._velocity,
            "force": np.zeros(3),
            "torque": np.zeros(3),
            "q": np.zeros(7),
            "dq": np.zeros(7),
        }
        if not hasattr(self._env, "arm_readings") or self._unstable:
            return zeros
        return {**zeros, **cast(ArmReadings, self._env).arm_readings()}


def _describe(env: config.Env, tasks: Sequence[Task], watchdog_s: float, limits: Limits) -> Description:
    suite = envs.suite(env.suite)
    space = envs.observation_space(env)
    drawing = suite.drawing(protocols.find(env.protocol), env.cameras)
    return Description(
        protocol=PROTOCOL,
        name=f"simulated {env.suite}",
        capabilities=("action", "observations", "success", "init_states", "scene", "move_gripper"),
        realtime=False,
        control_hz=CONTROL_HZ,
        watchdog_s=watchdog_s,
        command_age_s=watchdog_s,
        action_size=suite.action_space.size,
        action_scale=SCALE,
        tasks=tuple(_task_info(task) for task in tasks),
        observations={name: spec.shape for name, spec in space.items() if spec.dtype == "float32"},
        cameras={camera: (size, size, 3) for camera, size in drawing.sizes.items()},
        limits=limits,
        versions={**suite.versions(), **_picture_version(env)},
        flips=dict.fromkeys(drawing.cameras, suite.flip(drawing)),
    )


def _picture_version(env: config.Env) -> dict[str, str]:
    """What the pixels and the settling depend on: they are no choice of the client's."""
    conditions = repr(sorted(envs.conditions(env, env.cameras.names).items()))
    return {"conditions": hashlib.sha256(conditions.encode()).hexdigest()[:12]}


def _task_info(task: Task) -> TaskInfo:
    splits: tuple[Split, Split] = ("train", "eval")
    return TaskInfo(
        name=task.name,
        language=task.language,
        index=task.index,
        suite_size=task.suite_size,
        init_states={split: envs.init_state_count(task, split) for split in splits},
        digest={split: envs.init_states_digest(task, split) for split in splits},
    )


def _velocity(before: Vector, after: Vector) -> Vector:
    """Over the last control step, for a simulator that has no readings of its own."""
    turned = angle_between(after[3:], before[3:]) * CONTROL_HZ
    return np.concatenate([(after[:3] - before[:3]) * CONTROL_HZ, [turned, 0.0, 0.0]])
