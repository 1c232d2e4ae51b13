"""The suite `robot`: tasks, observations and starts are those that the server of `env.robot` describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from nightshift import config
from nightshift.envs.base import (
    ActionSpace,
    ArraySpec,
    Drawing,
    Finding,
    InitStates,
    Predicate,
    States,
    Suite,
    installed,
    stored_split,
)
from nightshift.envs.protocols import Protocol
from nightshift.envs.robot.client import RobotClient, describe
from nightshift.envs.robot.env import RobotEnv, RobotFleet, observation_shapes
from nightshift.envs.robot.messages import Description, TaskInfo
from nightshift.envs.robot.people import FolderPerson
from nightshift.envs.robot.resetting import open_resetter
from nightshift.errors import ConfigError, SimulatorError
from nightshift.types import Split, Task

NAME = "robot"


class RobotSuite(Suite):
    """A process commands one robot: the one it was configured for last, with one client for all its tasks."""

    name = NAME
    perturbation_kinds = frozenset()  # noise on the commands of a real robot is no experiment

    def __init__(self) -> None:
        self._env: config.Env | None = None
        self._client: RobotClient | None = None
        self._description: Description | None = None
        self._person = FolderPerson()
        self.action_space = ActionSpace(size=7)

    def configured(self, env: config.Env) -> RobotSuite:
        """Ask the server of `env.robot` what it is, once; SimulatorError or ConfigError if it is not as expected."""
        if env == self._env:
            return self
        assert env.robot is not None, "config.Env sees to it"
        if self._env is None or env.robot != self._env.robot:
            self.forget()
            self._description = describe(env.robot)
            self.action_space = ActionSpace(size=self._description.action_size)
            self.control_hz = self._description.control_hz
            self.cameras = tuple(self._description.cameras)
        self._env = env
        return self

    def forget(self) -> None:
        """End the session, and ask the server again when it is next needed."""
        if self._client is not None:
            self._client.close()
        self._env = self._client = self._description = None
        self.cameras = ()

    def tasks(self) -> list[Task]:
        """None before a server is configured."""
        if self._description is None:
            return []
        return [
            Task(suite=NAME, name=task.name, language=task.language, index=task.index, suite_size=task.suite_size)
            for task in self._description.tasks
        ]

    def goal(self, task: Task) -> Sequence[Predicate]:
        return ()

    def state_space(self) -> Mapping[str, ArraySpec]:
        if self._description is None:
            return {}
        return {name: ArraySpec(shape) for name, shape in observation_shapes(self._description).items()}

    def init_states(self, task: Task, split: Split) -> InitStates:
        (info,) = [info for info in self._described().tasks if info.name == task.name]
        return _starts(info, split)

    def make_env(self, task: Task, protocol: Protocol, cameras: config.Cameras) -> RobotEnv:
        settings, horizon = self._settings()
        self.drawing(protocol, cameras)
        if self._client is None:
            self._client = RobotClient(settings, self._described())
        people = (open_resetter(settings, self._person), self._person)
        return RobotEnv(task, self._client, settings, horizon, people)

    def make_fleet(
        self, task: Task, protocol: Protocol, cameras: config.Cameras, train_states: States | None = None
    ) -> RobotFleet:
        return RobotFleet(lambda: self.make_env(task, protocol, cameras))

    def drawing(self, protocol: Protocol, cameras: config.Cameras) -> Drawing:
        """As the server's cameras are: nothing is drawn or resized here."""
        sizes = {name: self._described().cameras[name][0] for name in cameras.names if name in self.cameras}
        for name, size in sizes.items():
            if cameras.size_of(name) not in ("auto", size):
                raise SimulatorError(
                    f"env.cameras.size is {cameras.size_of(name)} for {name}, and the robot's images have {size}",
                    "set env.cameras.size in params.yaml to auto, or change the server",
                )
        drawn = super().drawing(protocol, cameras.model_copy(update={"size": sizes or 1})).cameras
        return Drawing(cameras=drawn, shadows=True, rotated=False)

    def versions(self) -> dict[str, str]:
        described = self._description
        known = {} if described is None else {**described.versions, NAME: described.digest}
        return {**known, **self._compliance(), "nightshift": installed("nightshift")}

    def _compliance(self) -> dict[str, str]:
        """Results of a stiffer arm do not compare."""
        chosen = self._env.robot.compliance if self._env and self._env.robot else {}
        return {"compliance": ", ".join(f"{name} {chosen[name]!r}" for name in sorted(chosen))} if chosen else {}

    def check_machine(self, machine: config.Machine) -> None:
        if machine.workers or machine.requests_at_once > 1 or machine.actors > 1:
            raise ConfigError(
                f"machine asks for {machine.workers} workers, {machine.requests_at_once} requests at once and "
                f"{machine.actors} actors, and one robot plays one episode at a time",
                "set machine.workers: 0, requests_at_once: 1, threads: 1, and actors to 0 or 1 in params.yaml",
            )
        if machine.listen:
            raise ConfigError(
                f"machine.listen is {machine.listen}: actors of other machines would share one robot",
                'set machine.listen: "" in params.yaml; env.robot.url may name a robot elsewhere',
            )

    def check_run(self, params: config.Params) -> None:
        if "rloo" in params.algorithms:
            raise ConfigError(
                "rloo plays groups of episodes from the same start side by side, and there is one robot",
                "choose algorithms: [rlpd] in params.yaml",
            )
        if "rlpd" in params.algorithms:
            _check_rlpd(params)

    def release(self) -> None:
        """The robot is held, and another process of the run may play on it: a learner validates between the rounds of
        its actor."""
        if self._client is not None:
            self._client.close()
            self._person.withdraw()  # of an episode that was broken off

    def begin(self, on_wait: Callable[[], None]) -> None:
        self._person.await_again(on_wait)

    def let_go(self) -> None:
        self._person.let_go()

    def findings(self) -> Iterator[Finding]:
        if self._description is not None:
            yield Finding(about="robot", found=f"{self._description.name} ({self._description.digest}) answers")

    def _described(self) -> Description:
        if self._description is None:
            raise SimulatorError("no robot is configured", "write the section env.robot in params.yaml: docs/robots.md")
        return self._description

    def _settings(self) -> tuple[config.Robot, int]:
        """And the horizon, which a person who judges episodes needs."""
        self._described()
        assert self._env is not None
        assert self._env.robot is not None
        if self._env.horizon == "auto":
            raise SimulatorError(
                "no published protocol has the suite robot, so env.horizon cannot be auto",
                "write a number of control steps in env.horizon of params.yaml",
            )
        return self._env.robot, self._env.horizon


def _check_rlpd(params: config.Params) -> None:
    assert params.env.robot is not None
    if params.machine.actors and params.rlpd.staleness:
        raise ConfigError(
            f"rlpd.staleness is {params.rlpd.staleness}: the actor would play while the learner validates, and there "
            "is one robot",
            "set rlpd.staleness: 0 or machine.actors: 0 in params.yaml",
        )
    if params.env.robot.success == "none" and params.rlpd.reward == config.SIMULATOR:
        raise ConfigError(
            "env.robot.success is none and rlpd.reward is simulator: nobody says that an episode succeeded",
            "name a success classifier in rlpd.reward (docs/classifier.md), or set env.robot.success: person",
        )


def _starts(info: TaskInfo, split: Split) -> InitStates:
    stored = stored_split(split)
    return InitStates(count=info.init_states[stored], digest=info.digest[stored])


ROBOT = RobotSuite()
