"""Playing episodes: the one loop in which a controller acts in simulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Fleet, Steps
from nightshift.policies.base import Policy
from nightshift.policies.expert import Expert
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import Array, Observation, RolloutRequest, Trajectory

SIMULATION, INFERENCE = "simulation", "inference"
"""What the time of an episode is spent on; the rest is recording."""

Act = Callable[[Observation], tuple[Array, Array]]
"""A chunk of actions [N, C, A] for each of N observations, and their log-probs [N, C, A]."""


class EpisodeRunner:
    """Plays groups of episodes in one fleet of simulators, for at most `horizon` control steps each.

    `on_step` is called after every control step, and `stopwatch` gets the time spent in simulation and in inference.
    """

    def __init__(self, fleet: Fleet, horizon: int, on_step: Callable[[], None], stopwatch: Stopwatch) -> None:
        self._fleet = fleet
        self._horizon = horizon
        self._on_step = on_step
        self._stopwatch = stopwatch

    def play(self, request: RolloutRequest, policy: Policy | None) -> list[Trajectory]:
        """The group of episodes that `request` asks for, side by side, each with a random stream of its own.

        An episode ends with success, with unstable physics or at the horizon. Ended episodes keep their row, so that
        the batch keeps its shape: no episode depends on when another one ends.
        """
        observation = self._reset(request)
        records = [_Record() for _ in range(request.count)]
        active = np.ones(request.count, np.bool_)
        disturbances = _disturbances(request, self._fleet.action_space.size)
        queue = _ActionChunkQueue(self._timed(_controller(self._fleet, request, policy)))
        for step in range(self._horizon):
            actions, log_probs = queue.next(observation)
            disturbed = actions + disturbances()
            executed = self._fleet.action_space.clip(disturbed)
            for lane in np.flatnonzero(active).tolist():
                self._record_frame(request, lane, step, records[lane])
                records[lane].append(_row(observation, lane), actions[lane], executed[lane], log_probs[lane])
            after = self._step(disturbed, active)
            observation = after.observation
            _record_ends(active, after, records)
            if not active.any():
                break
        for lane, record in enumerate(records):
            record.final = record.final or _row(observation, lane)
            if not record.unstable:  # MuJoCo has reset an unstable simulation
                self._record_frame(request, lane, 0, record)
        return [record.trajectory(request, member, queue.chunk) for member, record in enumerate(records)]

    def _reset(self, request: RolloutRequest) -> Observation:
        with self._stopwatch.timing(SIMULATION):
            return self._fleet.reset(request.split, [request.init_state] * request.count)

    def _step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        with self._stopwatch.timing(SIMULATION):
            after = self._fleet.step(actions, active)
        self._on_step()
        return after

    def _timed(self, act: Act) -> Act:
        def timed(observation: Observation) -> tuple[Array, Array]:
            with self._stopwatch.timing(INFERENCE):
                return act(observation)

        return timed

    def _record_frame(self, request: RolloutRequest, lane: int, step: int, record: _Record) -> None:
        if request.frames_every and step % request.frames_every == 0:
            picture = self._fleet.render(lane)
            if picture is not None:
                record.frames.append(picture)


@dataclass
class _Record:
    """What is recorded of one episode while it is played."""

    observations: list[Observation] = field(default_factory=list)
    final: Observation = field(default_factory=dict)
    actions: list[Array] = field(default_factory=list)
    executed: list[Array] = field(default_factory=list)
    log_probs: list[Array] = field(default_factory=list)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    success: bool = False
    unstable: bool = False

    def append(self, observation: Observation, action: Array, executed: Array, log_probs: Array) -> None:
        self.observations.append(observation)
        self.actions.append(action)
        self.executed.append(executed)
        self.log_probs.append(log_probs)

    def trajectory(self, request: RolloutRequest, member: int, chunk: int) -> Trajectory:
        return Trajectory(
            request=request,
            member=member,
            observations={name: np.stack([o[name] for o in self.observations]) for name in self.observations[0]},
            final=self.final,
            actions=np.stack(self.actions),
            executed=np.stack(self.executed),
            log_probs=np.stack(self.log_probs),
            chunk=chunk,
            success=self.success,
            unstable=self.unstable,
            frames=np.stack(self.frames) if self.frames else None,
        )


class _ActionChunkQueue:
    """Hands out chunks of actions one action at a time, and asks for the next chunk when one is used up."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._actions = self._log_probs = np.empty((0, 0, 0), np.float32)
        self._used = 0

    @property
    def chunk(self) -> int:
        """Actions per chunk."""
        return self._actions.shape[1]

    def next(self, observation: Observation) -> tuple[Array, Array]:
        """Actions [N, A] and log-probs [N, A]."""
        if self._used == self.chunk:
            self._actions, self._log_probs = self._act(observation)
            self._used = 0
        self._used += 1
        return self._actions[:, self._used - 1], self._log_probs[:, self._used - 1]


def _row(observation: Observation, lane: int) -> Observation:
    """A copy of one simulator's observation: the fleet overwrites its arrays."""
    return {name: values[lane].copy() for name, values in observation.items()}


def _record_ends(active: NDArray[np.bool_], after: Steps, records: Sequence[_Record]) -> None:
    """Record how episodes ended, and clear their `active` flag.

    What an unstable simulation shows means nothing and may not be finite: the observation before it is the final one.
    """
    for lane in np.flatnonzero(active & (after.success | after.unstable)).tolist():
        record = records[lane]
        record.unstable = bool(after.unstable[lane])
        record.success = bool(after.success[lane]) and not record.unstable
        record.final = record.observations[-1] if record.unstable else _row(after.observation, lane)
        active[lane] = False


def _controller(fleet: Fleet, request: RolloutRequest, policy: Policy | None) -> Act:
    if request.controller == "expert":
        experts = [Expert() for _ in range(request.count)]
        return lambda _: _deterministic(
            np.stack([expert.act(fleet.scene(lane)) for lane, expert in enumerate(experts)])[:, None]
        )
    if policy is None:
        raise ValueError(f"controller {request.controller!r} needs a policy")
    if request.controller == "greedy":
        return lambda observation: _deterministic(policy.act(observation))
    streams = [np.random.default_rng([request.seed, member, 0]) for member in range(request.count)]
    return lambda observation: policy.sample(
        observation, _noise(streams, policy.chunk, policy.action_dim), request.temperature
    )


def _deterministic(actions: Array) -> tuple[Array, Array]:
    """Actions that were not sampled, with log-probs of zero."""
    return actions, np.zeros_like(actions)


def _disturbances(request: RolloutRequest, action_dim: int) -> Callable[[], Array]:
    """Noise on the executed actions, [N, A] per step. Recorded actions are without it, so that a clone learns to
    recover from the states that the noise leads to."""
    streams = [np.random.default_rng([request.seed, request.init_state, member]) for member in range(request.count)]
    if not request.disturbance:
        none = np.zeros((request.count, action_dim), np.float32)
        return lambda: none
    return lambda: np.float32(request.disturbance) * _noise(streams, 1, action_dim)[:, 0]


def _noise(streams: Sequence[np.random.Generator], chunk: int, action_dim: int) -> Array:
    return np.stack([stream.standard_normal((chunk, action_dim), dtype=np.float32) for stream in streams])
