"""Playing episodes: the one loop in which simulators meet whoever acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Fleet, Steps
from nightshift.policies.base import Policy
from nightshift.policies.expert import Expert
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import Array, Observation, RolloutRequest, Trajectory

SIMULATION, INFERENCE = "simulation", "inference"
"""What the time of playing is spent on; everything else is keeping the record."""

ATTEMPTS = 3
"""An episode whose simulator fails is played again from the same init state, this often in all."""

Tick = Callable[[], None]
"""Called after every control step: whoever plays is alive."""

Act = Callable[[Observation], tuple[Array, Array]]
"""A chunk of actions [N, C, A] for each of N observations, and their log-probs [N, C, A]."""


class Game:
    """Simulators and a clock: how long to play, whom to tell that it goes on, and where the time goes."""

    def __init__(self, fleet: Fleet, horizon: int, tick: Tick, watch: Stopwatch) -> None:
        self.fleet = fleet
        self.horizon = horizon
        self._tick = tick
        self._watch = watch

    def reset(self, request: RolloutRequest, count: int) -> Observation:
        with self._watch.timing(SIMULATION):
            return self.fleet.reset(request.split, [request.init_state] * count)

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        with self._watch.timing(SIMULATION):
            after = self.fleet.step(actions, active)
        self._tick()
        return after

    def decide(self, act: Act, observation: Observation) -> tuple[Array, Array]:
        with self._watch.timing(INFERENCE):
            return act(observation)


def play(game: Game, request: RolloutRequest, policy: Policy | None) -> list[Trajectory]:
    """The group of episodes that `request` asks for, side by side, each with a random stream of its own."""
    played: dict[int, Trajectory] = {}
    for attempt in range(ATTEMPTS):
        members = [member for member in range(request.count) if member not in played or not played[member].valid]
        if members:
            act = _actor(game.fleet, request, members, attempt, policy)
            played |= dict(zip(members, _episodes(game, request, members, act), strict=True))
    return [played[member] for member in range(request.count)]


@dataclass
class _Record:
    """What is written down of one episode while it is played."""

    observations: list[Observation] = field(default_factory=list)
    final: Observation = field(default_factory=dict)
    actions: list[Array] = field(default_factory=list)
    executed: list[Array] = field(default_factory=list)
    log_probs: list[Array] = field(default_factory=list)
    chunk: int = 1
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    success: bool = False
    broken: bool = False


def _episodes(game: Game, request: RolloutRequest, members: Sequence[int], act: Act) -> list[Trajectory]:
    """Until each is solved or broken, or out of time. Those that are done keep their row, so that batches keep their
    shape: what one member does never depends on when another ends."""
    observation = game.reset(request, len(members))
    records = [_Record() for _ in members]
    active = np.ones(len(members), np.bool_)
    pushes = _pushes(request, members, game.fleet.action_space.size)
    plan = _Plan(partial(game.decide, act))
    for step in range(game.horizon):
        actions, log_probs = plan.next(observation)
        pushed = actions + pushes()
        executed = game.fleet.action_space.clip(pushed)
        for lane in np.flatnonzero(active).tolist():
            _film(game.fleet, request, lane, step, records[lane])
            records[lane].observations.append(_row(observation, lane))
            records[lane].actions.append(actions[lane])
            records[lane].executed.append(executed[lane])
            records[lane].log_probs.append(log_probs[lane])
        after = game.step(pushed, active)
        observation = after.observation
        _settle(active, after, records)
        if not active.any():
            break
    for lane, record in enumerate(records):
        record.final = record.final or _row(observation, lane)
        record.chunk = plan.chunk
        _film(game.fleet, request, lane, 0, record)
    return [_trajectory(request, member, record) for member, record in zip(members, records, strict=True)]


class _Plan:
    """Chunks of actions, one action at a time: whoever acts looks again when the chunk is used up."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._actions = self._log_probs = np.empty((0, 0, 0), np.float32)
        self._turn = 0

    @property
    def chunk(self) -> int:
        return self._actions.shape[1]

    def next(self, observation: Observation) -> tuple[Array, Array]:
        """Actions [N, A] and log-probs [N, A]."""
        if self._turn == self.chunk:
            self._actions, self._log_probs = self._act(observation)
            self._turn = 0
        self._turn += 1
        return self._actions[:, self._turn - 1], self._log_probs[:, self._turn - 1]


def _row(observation: Observation, lane: int) -> Observation:
    """What one simulator shows, kept: the fleet overwrites its arrays."""
    return {name: values[lane].copy() for name, values in observation.items()}


def _settle(active: NDArray[np.bool_], after: Steps, records: Sequence[_Record]) -> None:
    """Take those that ended out of the game."""
    for lane in np.flatnonzero(active & (after.success | after.broken)).tolist():
        records[lane].success, records[lane].broken = bool(after.success[lane]), bool(after.broken[lane])
        records[lane].final = _row(after.observation, lane)
        active[lane] = False


def _film(fleet: Fleet, request: RolloutRequest, lane: int, step: int, record: _Record) -> None:
    if request.frames_every and step % request.frames_every == 0:
        picture = fleet.render(lane)
        if picture is not None:
            record.frames.append(picture)


def _trajectory(request: RolloutRequest, member: int, record: _Record) -> Trajectory:
    return Trajectory(
        request=request,
        member=member,
        observations={name: np.stack([o[name] for o in record.observations]) for name in record.observations[0]},
        final=record.final,
        actions=np.stack(record.actions),
        executed=np.stack(record.executed),
        log_probs=np.stack(record.log_probs),
        chunk=record.chunk,
        success=record.success,
        valid=not record.broken,
        frames=np.stack(record.frames) if record.frames else None,
    )


def _actor(fleet: Fleet, request: RolloutRequest, members: Sequence[int], attempt: int, policy: Policy | None) -> Act:
    if request.controller == "expert":
        experts = [Expert() for _ in members]
        return lambda _: _certain(np.stack([one.act(fleet.scene(lane)) for lane, one in enumerate(experts)])[:, None])
    if policy is None:
        raise ValueError(f"controller {request.controller!r} needs a policy")
    if request.controller == "greedy":
        return lambda observation: _certain(policy.act(observation))
    streams = [np.random.default_rng([request.seed, member, attempt]) for member in members]
    return lambda observation: policy.sample(
        observation, _noise(streams, policy.chunk, policy.action_dim), request.temperature
    )


def _certain(actions: Array) -> tuple[Array, Array]:
    """Actions that nobody drew."""
    return actions, np.zeros_like(actions)


def _pushes(request: RolloutRequest, members: Sequence[int], action_dim: int) -> Callable[[], Array]:
    """Of the hand, [N, A] per step. The record keeps what was meant, so who learns from it learns to recover."""
    streams = [np.random.default_rng([request.seed, request.init_state, member]) for member in members]
    still = np.zeros((len(members), action_dim), np.float32)
    return lambda: (
        np.float32(request.disturbance) * _noise(streams, 1, action_dim)[:, 0] if request.disturbance else still
    )


def _noise(streams: Sequence[np.random.Generator], chunk: int, action_dim: int) -> Array:
    return np.stack([stream.standard_normal((chunk, action_dim), dtype=np.float32) for stream in streams])
