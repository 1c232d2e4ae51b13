"""Simulators with cameras on the fake suite, a policy that sees, and a plain loop to compare episodes with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nightshift import config, envs, files, policies
from nightshift.envs.base import Fleet, Look, Steps
from nightshift.envs.sequential_fleet import step_by_step
from nightshift.policies.base import Policy, Shapes
from nightshift.policies.expert import Expert
from nightshift.policies.gaussian_mlp import STATE, GaussianMlp
from nightshift.types import INSTRUCTION, Array, Observation, RolloutRequest, Split, Task, Trajectory

NO_CAMERAS = config.Cameras(names=(), size=16, shadows=False)
CAMERAS = config.Cameras(names=("agentview", "wrist"), size=4, shadows=False)
INPUTS = {"objects": 3, "task": 2}


def policy(chunk: int = 1) -> GaussianMlp:
    """With weights that do not depend on torch's random numbers."""
    made = GaussianMlp(inputs=INPUTS, hidden=[8], chunk=chunk, action_dim=7)
    for parameter in made.parameters():
        spread = torch.linspace(-0.5, 0.5, parameter.numel()).sin() if parameter.dim() > 1 else 0.0
        parameter.data.copy_(torch.as_tensor(spread).expand(parameter.numel()).reshape(parameter.shape))
    return made


class Reaching:
    """Weights that go to the goal: the action is the offset from it."""

    @staticmethod
    def leave(folder: Path, gain: float) -> None:
        made = policies.build({**policy().spec, "hidden": []})
        for parameter in made.parameters():
            torch.nn.init.zeros_(parameter)
        weights = next(one for one in made.parameters() if one.dim() == 2)
        for axis in range(3):
            weights.data[axis, axis] = gain
        with files.new_folder(folder) as target:
            policies.save(made, target)


def run_out_of_memory(*_: Any) -> Any:
    """As a GPU does."""
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class SeeingMlp(GaussianMlp):
    """Sees a camera, a state vector and the instruction: mean colours, the vector and the number of letters."""

    def __init__(self, *, chunk: int) -> None:
        super().__init__(inputs={"objects": 3, "colours": 3, "letters": 1}, hidden=[8], chunk=chunk, action_dim=7)

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"family": "seeing", "chunk": self.chunk}

    @property
    def shapes(self) -> Shapes:
        return {"objects": (3,), "agentview": (8, 8, 3), INSTRUCTION: ()}

    def inputs(self, observations: Observation) -> dict[str, torch.Tensor]:
        colours = observations["agentview"].mean((1, 2)).astype(np.float32) / 255
        letters = np.array([[len(text)] for text in observations[INSTRUCTION]], np.float32)
        return {STATE: torch.from_numpy(np.concatenate([observations["objects"], colours, letters], axis=1))}


@dataclass
class Seeing:
    """Makes fleets of the fake suite whose images tell the number of steps a simulator has made."""

    before_step: Callable[[int], None] = lambda state: None
    """Called in the thread that simulates, with the init state."""
    before_look: Callable[[], None] = lambda: None
    """Called in the thread that draws."""
    looks: list[tuple[int, list[int]]] = field(default_factory=list)
    """Init state and lanes of every drawing."""
    fetched: list[tuple[int, int]] = field(default_factory=list)
    """Init state of every drawing of which the images were fetched, and the number of drawings until then."""
    drawn: set[str] = field(default_factory=set)
    """Cameras."""
    begun: list[int] = field(default_factory=list)
    """Init states in the order in which they were reset."""
    fleets: list[SeeingFleet] = field(default_factory=list)
    made_as: type[SeeingFleet] | None = None
    drawing_thread: int = 0

    def __call__(self, task: Task, env: config.Env) -> SeeingFleet:
        fleet = envs.make_fleet(task, env.model_copy(update={"cameras": NO_CAMERAS}))
        made = (self.made_as or SeeingFleet)(fleet, env.cameras, self)
        self.fleets.append(made)
        return made


class SeeingFleet:
    """Draws in one thread only, which all siblings share, as a GL context does."""

    def __init__(self, fleet: Fleet, cameras: config.Cameras, parts: Seeing) -> None:
        self._fleet = fleet
        self._cameras = cameras
        self._parts = parts
        self.steps = np.zeros(0, np.int64)
        self.state = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        self.steps, self.state = np.zeros(len(init_states), np.int64), init_states[0]
        self._parts.begun.append(self.state)
        return self._fleet.reset(split, init_states)

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        self._parts.before_step(self.state)
        self.steps += active
        return self._fleet.step(actions, active)

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        return step_by_step(self, actions, active)

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        self._check_thread()
        self._parts.before_look()
        self._parts.looks.append((self.state, lanes.tolist()))
        self._parts.drawn.update(cameras)
        positions = {camera: self._cameras.names.index(camera) for camera in cameras}
        return {
            camera: np.stack([self._image(lane, 100 * position) for lane in lanes.tolist()])
            for camera, position in positions.items()
        }

    def redraw(self, lane: int, states: NDArray[np.float64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """As the states of an episode are numbered by its steps."""
        self.steps = np.arange(len(states))
        return self.look(self.steps, cameras)

    def render(self, lane: int) -> NDArray[np.uint8]:
        self._check_thread()
        return self._image(lane, 0)

    def sibling(self) -> SeeingFleet:
        made = type(self)(self._fleet.sibling(), self._cameras, self._parts)
        self._parts.fleets.append(made)
        return made

    def _image(self, lane: int, brightness: int) -> NDArray[np.uint8]:
        size = self._cameras.size
        assert isinstance(size, int)
        return np.full((size, size, 3), brightness + self.steps[lane], np.uint8)

    def _check_thread(self) -> None:
        self._parts.drawing_thread = self._parts.drawing_thread or threading.get_ident()
        assert self._parts.drawing_thread == threading.get_ident(), "drawn in two threads"


class QueueingSeeingFleet(SeeingFleet):
    """Draws while its caller does something else, as a GPU does, but waits for nothing."""

    def begin_look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Look:
        images, state = self.look(lanes, cameras), self.state

        def fetch() -> Mapping[str, NDArray[np.uint8]]:
            self._check_thread()
            self._parts.fetched.append((state, len(self._parts.looks)))
            return images

        return fetch


def plain_loop(fleet: Fleet, request: RolloutRequest, policy: Policy, horizon: int) -> list[dict[str, Any]]:
    """The episodes of a request as a reader would write them down: step by step, all lanes in one batch."""
    observation = fleet.reset(request.split, [request.init_state] * request.count)
    lanes = range(request.count)
    records: list[dict[str, Any]] = [
        {"observations": [], "actions": [], "executed": [], "log_probs": [], "success": False} for _ in lanes
    ]
    generators = [np.random.default_rng([request.seed, lane, 0]) for lane in lanes]
    noise = [np.random.default_rng([request.seed, request.init_state, lane]) for lane in lanes]
    experts = [Expert() for _ in lanes]
    active = np.ones(request.count, np.bool_)
    for step in range(horizon):
        chunk = 1 if request.controller == "expert" else policy.chunk
        if step % chunk == 0:
            for lane in np.flatnonzero(active):
                records[lane]["observations"].append({name: v[lane].copy() for name, v in observation.items()})
            actions, log_probs = _act(fleet, request, policy, observation, experts, generators)
        now = actions[:, step % chunk]
        drawn = np.stack([stream.standard_normal(now.shape[1], dtype=np.float32) for stream in noise])
        disturbed: Array = (now + np.float32(request.disturbance) * drawn).astype(np.float32, copy=False)
        for lane in np.flatnonzero(active):
            records[lane]["actions"].append(now[lane])
            records[lane]["executed"].append(np.clip(disturbed[lane], -1, 1))
            records[lane]["log_probs"].append(log_probs[lane, step % chunk])
        observation, success, _ = fleet.step(disturbed, active)
        for lane in np.flatnonzero(active):
            records[lane]["final"] = {name: values[lane].copy() for name, values in observation.items()}
            records[lane]["success"] = bool(success[lane])
        active = active & ~success
        if not active.any():
            break
    return records


def _act(
    fleet: Fleet,
    request: RolloutRequest,
    policy: Policy,
    observation: Observation,
    experts: Sequence[Expert],
    generators: Sequence[np.random.Generator],
) -> tuple[Array, Array]:
    if request.controller == "expert":
        actions = np.stack([expert.act(fleet.scene(lane)) for lane, expert in enumerate(experts)])[:, None]
        return actions, np.zeros_like(actions)
    if request.controller == "greedy":
        actions = policy.act(observation)
        return actions, np.zeros_like(actions)
    with torch.inference_mode():
        sampled, log_probs = policy.sample(policy.inputs(observation), generators, request.temperature)
    return sampled.numpy(), log_probs.numpy()


def assert_same(one: Trajectory, other: Trajectory) -> None:
    """Bit for bit."""
    assert (one.request, one.member, one.chunk) == (other.request, other.member, other.chunk)
    assert (one.success, one.unstable, one.valid, one.version) == (
        other.success,
        other.unstable,
        other.valid,
        other.version,
    )
    for name in ("actions", "executed", "log_probs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    for name in ("observations", "final"):
        assert set(getattr(one, name)) == set(getattr(other, name))
        for key, values in getattr(one, name).items():
            np.testing.assert_array_equal(values, getattr(other, name)[key], strict=True)
