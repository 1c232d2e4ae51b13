"""A robot behind the Env seam: actions become pose targets within the limits, states become observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs.base import ActionSpace, Step, flipped, stored_split
from nightshift.envs.robot.client import RobotClient
from nightshift.envs.robot.messages import Description, RobotState
from nightshift.envs.robot.people import Person, Question, await_answer
from nightshift.envs.robot.poses import Vector, action_of, target_of
from nightshift.envs.robot.resetting import Resetter
from nightshift.envs.robot.safety import within
from nightshift.envs.robot.settings import limits_in, scale_in
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.errors import SimulatorError, UnstablePhysics
from nightshift.types import INSTRUCTION, Array, Observation, Scene, Split, Task

STATE_OBSERVATIONS = {"tcp_pose": "pose", "tcp_vel": "vel", "tcp_force": "force", "tcp_torque": "torque"}
"""HIL-SERL's names of observations, and where a state has them; `gripper_pose` is a number."""
GRIPPER = "gripper_pose"
_OPEN, _CLOSED = 1.0, 0.0
Judge = Literal["server", "person", "none"]
"""Who says that the task is done."""


class RobotEnv:
    """One task on the robot of this process."""

    def __init__(
        self, task: Task, client: RobotClient, settings: config.Robot, horizon: int, people: tuple[Resetter, Person]
    ) -> None:
        """`people`: who brings the robot back to a start, and who is asked about success."""
        self.task = task
        self._client = client
        self._described = client.description
        self._settings = settings
        self._limits, self._scale = limits_in(settings), scale_in(settings)
        self._horizon = horizon
        self._resetter, self._person = people
        self._steps = 0
        self._sent = 0.0
        self._state: RobotState | None = None
        self._images: dict[str, NDArray[np.uint8]] = {}
        """Seen since the last step."""
        self._home = np.zeros(4)
        self._judge: Judge = settings.success
        self._was_solved = False
        """In this episode, by the person, whose yes holds: an episode may go on after it."""

    @property
    def action_space(self) -> ActionSpace:
        return ActionSpace(size=self._described.action_size)

    def reset(self, split: Split, init_state: int, before_motion: Callable[[], None] = lambda: None) -> Observation:
        """`before_motion` is called when the robot may move from then on: what it raises keeps it where it is."""
        self.connect()
        self._client.make_ready()
        before_motion()
        self._state = self._resetter.reset(self._client, self.task, stored_split(split), init_state)
        self._home = self._state.pose[3:]
        self._steps = 0
        self._images = {}
        self._judge = _judge(self._settings, split)
        self._was_solved = False
        if self._judge == "person":
            self._person.ask(self._question())
        return self._observe(self._state)

    def step(self, action: Array) -> Step:
        before = self._last_state()
        self._steps += 1
        self._images = {}
        wanted = self._usable(action)
        target = target_of(before.pose, wanted, self._scale)
        safe = within(target, before.pose, self._home, self._limits, self._described.control_hz)
        content = {"arr": safe.tolist(), "based_on": before.time, "gripper": _gripper(wanted[6])}
        if "action" in self._described.capabilities:
            content["action"] = self._executed(wanted, before, target, safe).tolist()
        self._sent = self._client.clock.now()
        self._state = self._client.command("pose", **content)
        if self._described.realtime:
            self._keep_rate()
            self._state = self._client.command("getstate")
        if self._state.unstable:
            what = f"{self.task.name}, step {self._steps}: the physics behind the server became unstable"
            raise UnstablePhysics(what, "reset the environment and go on with another episode")
        return Step(self._observe(self._state), self._is_solved(self._state))

    def scene(self) -> Scene:
        return self._client.scene()

    def full_state(self) -> NDArray[np.float64]:
        raise SimulatorError("a robot has no state from which an episode could be continued")

    def camera_images(self, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        if not cameras:
            return {}
        # Of a robot that was stopped, too: the next command is refused, and after the last one nothing follows.
        seen = self._client.watch(cameras)
        found = {camera: seen.images[camera].pixels for camera in cameras}
        self._images.update(found)
        return found

    def render(self) -> NDArray[np.uint8] | None:
        """What the policy has seen of the first camera, if it has: a camera has no second image so soon."""
        if not self._described.cameras:
            return None
        camera = next(iter(self._described.cameras))
        image = self._images[camera] if camera in self._images else self.camera_images([camera])[camera]
        return self.upright(camera, image)

    def upright(self, camera: str, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A camera's image the way round that people expect."""
        return flipped(image, self._described.flips.get(camera, "none"))

    @property
    def is_connected(self) -> bool:
        """Whether a session of this process commands the robot."""
        return self._client.is_open

    def connect(self) -> None:
        """Begin a session, in which the robot stays held until `reset`."""
        if not self._client.is_open:
            self._client.open()

    def watch(self, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """What cameras show while nothing is commanded, also of a robot that is held or stopped."""
        return {name: picture.pixels for name, picture in self._client.watch(cameras).images.items()}

    def halt(self, reason: str) -> bool:
        """Stop the robot in the middle of an episode, from any thread; whether the server has confirmed it."""
        return self._client.halt(reason)

    def resume(self) -> Observation:
        """Go on with an episode after `halt`, or after a silence in which the watchdog held the robot."""
        self._state = self._client.make_ready()
        self._images = {}
        return self._observe(self._state)

    def close(self) -> None:
        self._client.close()

    def _last_state(self) -> RobotState:
        assert self._state is not None, "reset comes before step"
        return self._state

    def _usable(self, action: Array) -> Vector:
        values = np.asarray(action, np.float64)
        if values.shape != (self._described.action_size,) or not np.isfinite(values).all():
            what = f"{self.task.name}, step {self._steps}: action {np.array2string(values, precision=3)} is not usable"
            self._client.stop(what)
            raise SimulatorError(
                what, f"give {self._described.action_size} finite numbers; a policy that does not has diverged"
            )
        return np.clip(values, self.action_space.low, self.action_space.high)

    def _executed(self, wanted: Vector, before: RobotState, target: Vector, safe: Vector) -> Vector:
        """The action as it is where its target keeps the limits, so that a simulator computes the same bits."""
        if np.array_equal(target, safe):
            return wanted
        return np.concatenate([action_of(before.pose, safe, self._scale), wanted[6:]])

    def _keep_rate(self) -> None:
        """Until the control period is over, as HIL-SERL's environment does."""
        left = self._sent + 1 / self._described.control_hz - self._client.clock.now()
        if left > 0:
            self._client.clock.sleep(left)

    def _is_solved(self, state: RobotState) -> bool:
        if self._judge == "server":
            return state.success
        if self._judge == "none":
            return False
        self._was_solved = self._was_solved or self._says_person()
        return self._was_solved

    def _says_person(self) -> bool:
        """Without waiting, until the horizon."""
        if self._steps >= self._horizon:
            return await_answer(self._person, self._question(), self._settings.answer_within_s, self._client.clock)
        answer = self._person.answer()
        if answer:
            self._person.withdraw()
        elif answer is False:  # not yet: the question stays open
            self._person.ask(self._question())
        return answer is True

    def _question(self) -> Question:
        return Question(kind="success", words=f"Is this done: {self.task.language}?")

    def _observe(self, state: RobotState) -> Observation:
        vectors = dict(state.observations) or self._measured(state)
        if "task" not in vectors:
            vectors["task"] = np.eye(self.task.suite_size, dtype=np.float32)[self.task.index]
        return {**vectors, INSTRUCTION: np.array(self.task.language)}

    def _measured(self, state: RobotState) -> dict[str, Array]:
        vectors = {name: getattr(state, part).astype(np.float32) for name, part in STATE_OBSERVATIONS.items()}
        return {**vectors, GRIPPER: np.array([state.gripper_pos], np.float32)}


def _judge(settings: config.Robot, split: Split) -> Judge:
    """Where nobody judges what is trained on, a person does in evaluation: a policy learns to please a classifier."""
    return "person" if settings.success == "none" and split == "eval" else settings.success


class RobotFleet(SequentialFleet):
    """One robot: one episode at a time."""

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        if len(init_states) > 1:
            raise SimulatorError(
                f"a group of {len(init_states)} episodes is asked for at once, and there is one robot",
                "choose algorithms: [rlpd], which learns from single episodes",
            )
        return super().reset(split, init_states)

    def sibling(self) -> RobotFleet:
        raise SimulatorError(
            "several requests are asked for at once, and there is one robot",
            "set machine.requests_at_once and machine.threads to 1 in params.yaml",
        )


def _gripper(action: float) -> float | None:
    """An action above 0 closes, one below 0 opens, as in LIBERO."""
    return None if action == 0 else _CLOSED if action > 0 else _OPEN


def observation_shapes(described: Description) -> dict[str, tuple[int, ...]]:
    """What `RobotEnv` shows beside images and the instruction, by name."""
    measured: dict[str, tuple[int, ...]] = {"tcp_pose": (7,), "tcp_vel": (6,), "tcp_force": (3,), "tcp_torque": (3,)}
    own = dict(described.observations) or {**measured, GRIPPER: (1,)}
    return {**own, "task": own.get("task", (described.tasks[0].suite_size,))}
