"""A robot behind HTTP that the pilot moves. Its own cameras show it, and its own server stops it.

The robot moves on in real time, so nothing can be drawn again afterwards: the cameras are read after every step, and
what they showed is what is recorded. While nothing is commanded they are read now and then, for people.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from nightshift import config
from nightshift.envs import protocols
from nightshift.envs.robot.client import RobotFault
from nightshift.envs.robot.env import RobotEnv
from nightshift.envs.robot.suite import ROBOT
from nightshift.errors import NightshiftError, UnstablePhysics
from nightshift.teleop.mirror import Development, Frame, Image, to_jpeg
from nightshift.teleop.plant import After, PlantFault
from nightshift.teleop.recorder import SERVER
from nightshift.types import Array, Observation, Task

IDLE_SECONDS = 0.2
"""Between two pictures of a robot that is not commanded."""
_ATTENDANCE_SECONDS = 0.1
_STEP_ABSENCES = 3
"""How often in a row a step finds its pilot gone before it is broken off: the session stops between two steps."""
_ABSENT = "its pilot is gone, or said Stop"
_RESET = "look at the robot, then reset"


def marked_by_pilot(env: config.Env) -> config.Env:
    """The section of params.yaml for a session, whose pilot says what a run would ask a person: whether it is done."""
    if env.robot is None or env.robot.success == "server":
        return env
    return env.model_copy(update={"robot": env.robot.model_copy(update={"success": "none"})})


@dataclass(frozen=True)
class _Shot:
    """What is kept of one state."""

    images: Mapping[str, Image]
    """Of the cameras that are recorded, as a policy sees them, each [S, S, 3]."""
    film: bytes
    """JPEG of the first view; empty where there is none."""


class Robot:
    """`views` are the cameras that people see, the first of them on film; `cameras` all that are read."""

    judge = SERVER
    needs_pilot = True

    def __init__(
        self,
        env: config.Env,
        views: Sequence[str],
        cameras: Sequence[str],
        on_frame: Callable[[Frame], None],
        clock: Callable[[], float],
        is_attended: Callable[[], bool],
    ) -> None:
        """`is_attended`, asked by any thread: the pilot is there and has not said Stop."""
        self._config = env
        self._is_attended = is_attended
        self._views, self._cameras = list(views), list(cameras)
        self._on_frame = on_frame
        self._clock = clock
        self._envs: dict[str, RobotEnv] = {}
        self._env: RobotEnv
        self._observation: Observation = {}
        self._shots: list[_Shot] = []
        """Of the states of the episode, with the one after the reset."""
        self._newest: Mapping[str, Image] = {}
        """What all the cameras showed after the last command."""
        self._looked = -np.inf

    def open(self, task: Task) -> None:
        ROBOT.configured(self._config).begin(on_wait=self.idle)
        with _as_plant_fault():
            self._env = self._env_of(task)
            self._env.connect()
        self.idle()

    def reset(self, task: Task, init_state: int) -> Observation:
        """PlantFault, too, if the pilot is not there before the robot moves or after it has."""
        self._env = self._env_of(task)
        self._shots = []
        try:
            self._require_pilot()
            with _as_plant_fault(), self._stopped_without_pilot():
                # A stop that came before the robot was made ready is gone.
                self._observation = self._env.reset("train", init_state, before_motion=self._require_pilot)
                self._shots = [self._shot(0)]
            self._require_pilot()
        except PlantFault:
            ROBOT.release()
            raise
        return self._observation

    def wake(self) -> Observation:
        """The pilot acts on what is there now, so that is what is recorded before the next action."""
        with _as_plant_fault():
            self._observation = self._env.resume()
            self._shots[-1] = self._shot(len(self._shots) - 1)
        return self._observation

    def step(self, action: Array) -> After:
        with _as_plant_fault(), self._stopped_without_pilot(_STEP_ABSENCES):
            try:
                self._observation, success = self._env.step(action)
            except UnstablePhysics:
                self._shots.append(self._shots[-1])
                return After(self._observation, success=False, unstable=True)
            self._shots.append(self._shot(len(self._shots)))
        return After(self._observation, success=success, unstable=False)

    def idle(self) -> None:
        if self._clock() - self._looked < IDLE_SECONDS or not self._env.is_connected:
            return
        with _as_plant_fault():
            asked = self._clock()
            self._show(self._env.watch(self._views), max(0, len(self._shots) - 1), asked)

    def stop(self, why: str) -> bool:
        return self._env.halt(why)

    def look(self, cameras: Sequence[str]) -> Mapping[str, Image]:
        return {camera: self._newest[camera][None] for camera in cameras}

    def develop(self, actions: Array, cameras: Sequence[str]) -> Future[Development]:
        images = {camera: np.stack([shot.images[camera] for shot in self._shots]) for camera in cameras}
        self._shots = [  # views, so that the images are in memory once while they are saved
            replace(shot, images={camera: all_steps[step] for camera, all_steps in images.items()})
            for step, shot in enumerate(self._shots)
        ]
        film = [(step, shot.film) for step, shot in enumerate(self._shots) if shot.film]
        done: Future[Development] = Future()
        done.set_result(Development(images=images, film=film))
        return done

    def let_go(self) -> None:
        ROBOT.let_go()

    def close(self) -> None:
        """The server holds the robot."""
        ROBOT.release()

    def _env_of(self, task: Task) -> RobotEnv:
        if task.name not in self._envs:
            suite, protocol = ROBOT.configured(self._config), protocols.find(self._config.protocol)
            self._envs[task.name] = suite.make_env(task, protocol, self._config.cameras)
        return self._envs[task.name]

    def _shot(self, step: int) -> _Shot:
        asked = self._clock()
        self._newest = self._env.camera_images(self._cameras)
        recorded = {camera: self._newest[camera] for camera in self._config.cameras.names}
        return _Shot(recorded, self._show(self._newest, step, asked))

    def _show(self, images: Mapping[str, Image], step: int, asked: float) -> bytes:
        """To people; JPEG of the first view. `asked`: when, because what a slow server answers is not new any more."""
        self._looked = self._clock()
        pictures = [to_jpeg(self._env.upright(view, images[view])) for view in self._views]
        for view, jpeg in zip(self._views, pictures, strict=True):
            self._on_frame(Frame(view=view, step=step, time=asked, jpeg=jpeg))
        return pictures[0] if pictures else b""

    @contextmanager
    def _stopped_without_pilot(self, absences: int = 1) -> Iterator[None]:
        """This thread waits for the robot: seconds for the arm's way to its rest, or for a server that is slow to
        answer. Another one watches meanwhile, and stops the robot when its pilot was absent so often in a row.
        It goes on to do so: a stop may be lost on its way, or cleared by the command that is waited for."""
        is_over, env = threading.Event(), self._env

        def watch() -> None:
            found = 0
            while not is_set_soon(is_over):
                found = 0 if self._is_attended() else found + 1
                if found >= absences:
                    env.halt(_ABSENT)

        watching = threading.Thread(target=watch, name="teleop-attendance", daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()

    def _require_pilot(self) -> None:
        """The robot of somebody else is not stopped: without a session nothing was commanded."""
        if not self._is_attended():
            commanded = self._env.is_connected
            stopped = _stop_in_words(self._env.halt(_ABSENT)) if commanded else "Nothing has moved"
            raise PlantFault(f"{_ABSENT}. {stopped}", _RESET)


def is_set_soon(event: threading.Event) -> bool:
    """Wait between two looks for the pilot."""
    return event.wait(_ATTENDANCE_SECONDS)


@contextmanager
def _as_plant_fault() -> Iterator[None]:
    """Whatever the robot's client gives up for, in words."""
    try:
        yield
    except RobotFault as error:
        raise PlantFault(f"{error}. {_stop_in_words(error.is_stopped)}", _RESET) from error
    except NightshiftError as error:
        raise PlantFault(error.what, error.next_step) from error


def _stop_in_words(is_confirmed: bool) -> str:
    return "The robot is stopped" if is_confirmed else "No stop arrived: its watchdog has to hold the robot"
