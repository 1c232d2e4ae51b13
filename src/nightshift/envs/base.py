"""The seams of simulation: one simulator (Env), several that step together (Fleet), and the tasks they play (Suite)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs import protocols
from nightshift.errors import SimulatorError
from nightshift.types import INSTRUCTION, Array, Observation, Scene, Split, Task

States = NDArray[np.float64]
"""Simulator states [N, D]."""

Predicate = tuple[str, ...]
"""One condition of a task's goal, e.g. ("on", "cube_1", "plate_1")."""


@dataclass(frozen=True, kw_only=True)
class ActionSpace:
    """Actions [size] with every number between low and high; a simulator clips what lies beyond."""

    size: int
    low: float = -1.0
    high: float = 1.0

    def clip(self, actions: Array) -> Array:
        return np.clip(actions, self.low, self.high)


class ArraySpec(NamedTuple):
    """Shape and dtype of one observation."""

    shape: tuple[int, ...]
    dtype: str = "float32"


TEXT = ArraySpec((), "str")


class Pixels(NamedTuple):
    """Of one side of an image, which is square."""

    resolution: int
    """As it is drawn."""
    size: int
    """After averaging over areas; divides `resolution`."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How camera images are drawn: what their pixels depend on besides the state of the simulation."""

    cameras: Mapping[str, Pixels]
    """Those of env.cameras.names: what is recorded and what policies may read."""
    shadows: bool
    """Shadows and reflections."""
    rotated: bool
    """Whether images are turned by 180°, as published policies see them."""

    @property
    def sizes(self) -> dict[str, int]:
        return {camera: pixels.size for camera, pixels in self.cameras.items()}

    def conditions(self) -> dict[str, Any]:
        """For records: one number where all cameras have the same."""
        return {
            "cameras": sorted(self.cameras),
            "resolution": _common({camera: pixels.resolution for camera, pixels in self.cameras.items()}),
            "size": _common(self.sizes),
            "shadows": self.shadows,
            "rotated": self.rotated,
        }


def _common(numbers: Mapping[str, int]) -> int | dict[str, int]:
    values = set(numbers.values())
    return values.pop() if len(values) == 1 else dict(sorted(numbers.items()))


Flip = Literal["none", "horizontal", "vertical", "both"]
"""Left and right are exchanged, top and bottom, or both."""


def flipped(image: NDArray[np.uint8], flip: Flip) -> NDArray[np.uint8]:
    """An image [H, W, 3]."""
    columns = slice(None, None, -1 if flip in ("horizontal", "both") else None)
    rows = slice(None, None, -1 if flip in ("vertical", "both") else None)
    return image if flip == "none" else image[rows, columns]


class Step(NamedTuple):
    """The result of one action. The reward is sparse: 1 exactly when `success`."""

    observation: Observation
    success: bool


class Env(Protocol):
    """One task in one simulator. The same init state and actions give the same steps, bit for bit."""

    @property
    def task(self) -> Task: ...

    @property
    def action_space(self) -> ActionSpace: ...

    def reset(self, split: Split, init_state: int) -> Observation: ...

    def step(self, action: Array) -> Step: ...

    def scene(self) -> Scene: ...

    def full_state(self) -> NDArray[np.float64]:
        """The state from which the simulation continues, [D]; D differs between tasks."""
        ...

    def camera_images(self, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """Observations of cameras, [S, S, 3] each. Not part of `step`: drawing costs more than a control step."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """An image [H, W, 3] for people, or None where no GL library works."""
        ...

    def close(self) -> None: ...


class Steps(NamedTuple):
    """The results of one action each, for N simulators."""

    observation: Observation  # each [N, …]; overwritten by the next step
    success: NDArray[np.bool_]  # [N]
    unstable: NDArray[np.bool_]  # [N] the actions drove the physics unstable; the observation means nothing then


class Fleet(Protocol):
    """Several simulators of one task. The observations of one do not depend on the others.

    Different siblings may step in different threads at once. Images of all of them are drawn by one thread: the first
    that calls `look`, `render` or `redraw`.
    """

    @property
    def task(self) -> Task: ...

    @property
    def action_space(self) -> ActionSpace: ...

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        """One simulator for every init state; each observation [N, …], cameras not included."""
        ...

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        """Step the active simulators with their rows of `actions` [N, A]; the others stay as they are."""
        ...

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        """Up to T steps of the active simulators with their rows of `actions` [N, T, A]. A simulator that succeeds or
        becomes unstable stops there. Returns what follows the last step of each, and the number of its steps [N]."""
        ...

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """Images of those cameras for those simulators, each [len(lanes), S, S, 3]."""
        ...

    def sibling(self) -> Fleet:
        """Another fleet of this task with simulators of its own. What takes long to build is shared."""
        ...

    def scene(self, lane: int) -> Scene: ...

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        """An image [H, W, 3] for people, or None where no GL library works."""
        ...

    def close(self) -> None:
        """Close siblings first: the fleet that they were made from frees what they share."""
        ...


@runtime_checkable
class SharingFleet(Protocol):
    """A fleet whose simulators can step side by side."""

    def share(self, threads: Executor) -> None:
        """From now on step them in those of `threads` that are idle, too, also those of siblings to come."""
        ...


Look = Callable[[], Mapping[str, NDArray[np.uint8]]]
"""Gives the images that were asked for. Call it once, in the thread that asked, and step no simulator before."""


@runtime_checkable
class QueueingFleet(Protocol):
    """A fleet whose images a GPU draws while the thread that asked for them does something else."""

    def begin_look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Look:
        """The images of `look`, which are drawn from now on. Other looks may be begun before this one is over."""
        ...


def begin_look(fleet: Fleet, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Look:
    """Of any fleet: one that cannot draw ahead draws when the images are needed."""
    if isinstance(fleet, QueueingFleet):
        return fleet.begin_look(lanes, cameras)
    return partial(fleet.look, lanes, cameras)


@runtime_checkable
class RedrawingFleet(Protocol):
    """A fleet that draws episodes which others have played."""

    def full_states(self, lanes: NDArray[np.int64]) -> States:
        """Of those simulators, [len(lanes), D]."""
        ...

    def redraw(self, lane: int, states: States, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """Images [T, S, S, 3] of an episode of the simulator `lane`: its states [T, D] after 0, 1, 2, … control steps.
        In the thread of `look`; the simulators have to be reset afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class InitStates:
    """The frozen init states of one task and split. Other states under the same indices have another digest."""

    count: int
    digest: str
    states: States | None = None  # None: the simulator makes a state from its index

    @classmethod
    def of(cls, states: States) -> InitStates:
        return cls(count=len(states), digest=hashlib.sha256(states.tobytes()).hexdigest(), states=states)


class DrawnState(NamedTuple):
    """A training state drawn from a simulator's samplers."""

    state: NDArray[np.float64]  # [D]
    seed: int  # of the samplers: it reproduces the state
    attempt: int  # index among all draws of this task


Verdict = Literal["good", "note", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `nightshift env check`. A suite cannot run while anything is "missing"."""

    about: str
    found: str
    verdict: Verdict = "good"
    remedy: str = ""


PerturbationKind = Literal["scene", "action", "gripper", "observation", "instruction"]
"""What a perturbation changes: the simulator's model and init state, actions on their way to the simulator or the
gripper's part of them, what the sensors say, or what the policy is told."""


class Suite(ABC):
    """Tasks that share a simulator, an action space and an observation space.

    Creating a suite imports no simulator: `make_env` and `make_fleet` do, in the process that simulates.
    """

    name: str
    action_space: ActionSpace
    packages: ClassVar[Mapping[str, str]] = {}
    """Distributions that the results depend on, by the name to report them under."""
    cameras: Sequence[str] = ()
    """Observations that are camera images, drawn on demand."""
    control_hz: float = 20
    """Control steps per second of the robot."""
    draws_train_states: ClassVar[bool] = False
    """Whether the stage `states` has to draw the training states, because the suite ships none."""
    redraws: ClassVar[bool] = False
    """Whether its fleets are `RedrawingFleet`s: beside a GPU, demos with images are collected faster then."""
    perturbation_kinds: ClassVar[frozenset[PerturbationKind]] = frozenset({"action", "observation", "instruction"})
    """What envs/perturbations can change here. Those three work around any simulator; a scene needs
    `perturbations.fleet.AlterableFleet`, a gripper actions that end with it, -1 to open and 1 to close."""

    def configured(self, env: config.Env) -> Suite:
        """The suite with these settings; most need none beyond what their methods are given."""
        return self

    @abstractmethod
    def tasks(self) -> list[Task]:
        """In the order of their indices."""

    def benchmarks(self) -> tuple[str, ...]:
        """The published suites that its tasks come from: more than one where it joins them."""
        return (self.name,)

    def benchmark(self, task: Task) -> str:
        """The one of them that has the task. Protocols go by it."""
        return self.name

    @abstractmethod
    def goal(self, task: Task) -> Sequence[Predicate]:
        """The predicates that must hold at the same time."""

    @abstractmethod
    def state_space(self) -> Mapping[str, ArraySpec]:
        """The vectors among the observations of a step, by name."""

    @abstractmethod
    def init_states(self, task: Task, split: Split) -> InitStates:
        """StatesNotDrawn where the training states have yet to be drawn."""

    @abstractmethod
    def make_env(self, task: Task, protocol: protocols.Protocol, cameras: config.Cameras) -> Env: ...

    @abstractmethod
    def make_fleet(
        self,
        task: Task,
        protocol: protocols.Protocol,
        cameras: config.Cameras,
        train_states: States | None = None,
    ) -> Fleet:
        """`train_states` replace those that would be read from the project."""

    def observation_space(self, image_sizes: Mapping[str, int]) -> Mapping[str, ArraySpec]:
        """Every observation a policy can take as input, by name; `image_sizes` are those of `drawing`."""
        images = {camera: ArraySpec((size, size, 3), "uint8") for camera, size in image_sizes.items()}
        return {**self.state_space(), INSTRUCTION: TEXT, **images}

    def drawing(self, protocol: protocols.Protocol, cameras: config.Cameras) -> Drawing:
        """How the cameras are drawn by `protocol`; SimulatorError where that is not possible."""
        unknown = [name for name in cameras.names if name not in self.cameras]
        if unknown:
            has = f"it has {', '.join(self.cameras)}" if self.cameras else "it has none"
            raise SimulatorError(
                f"{self.name} has no camera {', '.join(unknown)}; {has}", "edit env.cameras.names in params.yaml"
            )
        drawn = {name: self._pixels(protocol, cameras.size_of(name)) for name in cameras.names}
        return Drawing(cameras=drawn, shadows=cameras.shadows, rotated=protocol.rotated)

    def _pixels(self, protocol: protocols.Protocol, asked: int | config.Auto) -> Pixels:
        size = protocol.resolution if asked == "auto" else asked
        resolution = self.drawn_resolution(protocol, size)
        if resolution % size:
            raise SimulatorError(
                f"camera images of {self.name} are drawn at {resolution}², which cannot be averaged to {size}²",
                f"set env.cameras.size in params.yaml to auto or to a divisor of {resolution}, for example "
                f"{resolution // 2}",
            )
        return Pixels(resolution, size)

    def flip(self, drawing: Drawing) -> Flip:
        """What makes of a camera image one that a person expects, whatever way round policies see it."""
        return "both" if drawing.rotated else "none"

    def sketch(self, fleet: Fleet, *, films_alone: bool) -> None:  # noqa: B027 - most suites draw only one way
        """Have a fleet draw faster and less smoothly from its first image on, where people alone see its images; or
        `films_alone`, if the camera images are recorded or a policy's."""

    def drawn_resolution(self, protocol: protocols.Protocol, size: int) -> int:
        """Pixels at which images of `size` are drawn. No published protocol has this suite: they are drawn directly."""
        return size

    def check_drawing(self) -> None:  # noqa: B027 - most suites have nothing to check
        """SimulatorError where no images can be drawn on this machine."""

    def check_machine(self, machine: config.Machine) -> None:  # noqa: B027 - most suites play any number
        """ConfigError where these tasks cannot be played with so many processes and requests."""

    def check_run(self, params: config.Params) -> None:  # noqa: B027 - most suites run anyhow
        """ConfigError where these tasks cannot be played as the other sections ask."""

    def begin(self, on_wait: Callable[[], None]) -> None:  # noqa: B027 - most suites need nobody
        """Requests are played from now on: `let_go` no longer counts. Call `on_wait` again and again while a person is
        waited for: who makes no step otherwise counts as hanging."""

    def let_go(self) -> None:  # noqa: B027 - most suites need nobody
        """Wait for no person any more, from any thread: the answers to all requests are no longer wanted."""

    def release(self) -> None:  # noqa: B027 - most suites hold nothing that others wait for
        """Nothing is played until the next request: let go of what one process alone can have at a time."""

    def draw_train_states(
        self, task: Task, protocol: protocols.Protocol, seed: int, drawn: Sequence[DrawnState]
    ) -> Iterator[DrawnState]:
        """An endless iterator that continues `drawn`: the same states whether or not drawing was interrupted."""
        raise NotImplementedError(f"{self.name} ships its training states")

    def settle_steps(self, protocol: protocols.Protocol) -> int:
        """Control steps between restoring an init state and the policy's first action."""
        return 0

    def image_conditions(self, protocol: protocols.Protocol, cameras: config.Cameras) -> dict[str, Any]:
        """What the pixels of `cameras` depend on."""
        return self.drawing(protocol, cameras).conditions()

    def versions(self) -> dict[str, str]:
        """Of everything that a result depends on."""
        return {name: installed(package) for name, package in {**self.packages, "nightshift": "nightshift"}.items()}

    def expert(self, scene: Scene) -> Array | None:
        """The action [A] of the suite's own expert, from whom demos are collected; None leaves it to the scripted one
        (`policies.expert`), which plays an arm in operational space and knows the goals on, in, up, open and reach."""
        return None

    def compile_command(self) -> list[str] | None:
        """The command that compiles, ahead of the simulators, what they would compile; None if that is nothing."""
        return None

    def assets(self) -> Path | None:
        """Where the downloaded assets lie; None if the suite needs none; SimulatorError if they are missing."""
        return None

    def findings(self) -> Iterator[Finding]:
        """Whether the simulator works on this machine."""
        yield from ()


def stored_split(split: Split) -> Literal["train", "eval"]:
    """Which array holds the states of `split`: a validation state is an index into the training states."""
    return "eval" if split == "eval" else "train"


def installed(package: str) -> str:
    """Version of an installed distribution, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
