"""A session whose time passes step by step, and what its listener hears."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift import config, envs
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.policies.base import Inputs
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.teleop import messages
from nightshift.teleop.driver import Driver
from nightshift.teleop.library import Library
from nightshift.teleop.mirror import Frame
from nightshift.teleop.pilot import Pilot
from nightshift.teleop.robot import marked_by_pilot
from nightshift.teleop.session import Session, Setup
from nightshift.types import Array

ALICE = 1
"""Her connection."""
PERIOD = 0.05
FULL_STEP = 0.05
"""Metres of a full action in the fake simulator."""
NAME = "shown"
RANGES = {"actions": (-1.0, 1.0)}
STILL = (0.0,) * 6


class Clock:
    """Stands still until a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Ear:
    """Keeps what a session says."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.frames: list[Frame] = []
        self.errors: list[BaseException] = []

    def tell(self, message: Mapping[str, Any]) -> None:
        self.told.append(message)

    def show(self, frame: Frame) -> None:
        self.frames.append(frame)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    @property
    def notices(self) -> list[str]:
        return [message["text"] for message in self.told if message["type"] == "notice"]


class Rig:
    """A session in this thread. `drive` is what the pilot's page does; `tick` is one control period."""

    def __init__(self, setup: Setup, *, listener: Any = None, name: str = NAME) -> None:
        self.clock, self.ear = Clock(), Ear()
        self.setup = setup
        self.library = Library(name, RANGES)
        self.pilot = Pilot(self.clock)
        self.session = Session(setup, self.library, self.pilot, listener or self.ear, self.clock)
        self.session.load()
        self._seq = 0

    def close(self) -> None:
        self.session._shut()
        self.library.close()

    @property
    def phase(self) -> str:
        return str(self.session.state()["phase"])

    @property
    def steps(self) -> int:
        return int(self.session.state()["step"])

    def order(self, order: messages.Order, client: int = ALICE) -> None:
        self.session.submit(client, order)
        self.tick()

    def drive(self, axes: tuple[float, ...] = STILL, *, gripper: Any = "open", speed: float = 1.0) -> None:
        """A command, and the control step that it leads to."""
        self._seq += 1
        command = messages.Drive(type="drive", seq=self._seq, axes=axes, gripper=gripper, speed=speed)
        assert self.pilot.drive(ALICE, command)
        self.tick()

    def tick(self) -> None:
        self.session.tick()
        self.clock.now += PERIOD

    def settle(self) -> None:
        """Until what was played is saved."""
        deadline = time.monotonic() + 120
        while self.phase == "saving":
            assert time.monotonic() < deadline
            time.sleep(0.005)
            self.session.tick()

    def begin(self, who: str = "Alice", client: int = ALICE) -> None:
        self.pilot.claim(client, who)
        self.order(start())

    def to_goal(self) -> Array:
        """What is left of the way, of the fake simulator."""
        way: Array = self.session._observation["objects"]
        return way

    def demonstrate(self) -> None:
        """Play an episode of the fake simulator to its success."""
        self.begin()
        while self.phase == "running":
            x, y, z = np.clip(self.to_goal() / FULL_STEP, -1, 1).astype(float)
            self.drive((x, y, z, 0.0, 0.0, 0.0))
        self.settle()


def start() -> messages.Start:
    return messages.Start(type="start")


def mark(*, success: bool) -> messages.Mark:
    return messages.Mark(type="mark", success=success)


@contextmanager
def rig(params: config.Params, *, driver: Driver | None = None, **more: Any) -> Iterator[Rig]:
    made = Rig(setup_of(params, driver), **more)
    try:
        yield made
    finally:
        made.close()


def setup_of(params: config.Params, driver: Driver | None = None) -> Setup:
    return Setup(env=marked_by_pilot(params.env), states=params.states, commit="abc1234", driver=driver)


def stored(library: Library) -> list[Episode]:
    """The successes of a source, oldest first."""
    return list(EpisodeStore(library.successes))


def replayed(episode: Episode, env: config.Env) -> dict[str, Array]:
    """The observations [N, …] of its actions in a fresh simulator."""
    (task,) = [task for task in envs.tasks(env) if task.name == episode.provenance.task]
    simulator = envs.make(task, env)
    assert episode.provenance.init_state is not None
    seen = [simulator.reset("train", episode.provenance.init_state)]
    seen += [simulator.step(action).observation for action in episode.actions[:-1]]
    simulator.close()
    return {name: np.stack([one[name] for one in seen]) for name in episode.observations}


def assert_replays(episode: Episode, env: config.Env) -> None:
    for name, values in replayed(episode, env).items():
        assert np.array_equal(values, episode.observations[name]), name


class Straight(GaussianMlp):
    """A policy of the fake simulator that goes a tenth of a full step along x, in chunks of three."""

    def greedy(self, inputs: Inputs) -> Tensor:
        (count,) = {len(tensor) for tensor in inputs.values()}
        actions = torch.zeros(count, 3, 7)
        actions[:, :, 0] = torch.tensor([0.1, 0.11, 0.12])
        return actions


def straight() -> Driver:
    policy = Straight(
        inputs={"objects": 3}, hidden=[4], activation="tanh", layer_norm=False, chunk=3, action_dim=7, head="gaussian"
    )
    return Driver(policy=policy, label="models/straight", version=7)
