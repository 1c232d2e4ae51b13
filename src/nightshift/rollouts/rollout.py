"""Playing episodes: the one place in which a controller's actions reach simulators and what follows is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Fleet, Look, RedrawingFleet, Steps, begin_look
from nightshift.errors import ConfigError
from nightshift.rollouts.experts import Decide
from nightshift.types import INSTRUCTION, SIMULATOR_STATE, Array, Latents, Observation, RolloutRequest, Trajectory

Lanes = NDArray[np.int64]
"""Positions of episodes in their group."""


class GroupPlay:
    """The episodes of one request, side by side in one fleet, advanced from decision to decision.

        reset ─▶ see ─▶ decide ─▶ advance ─▶ see ─▶ … ─▶ see ─▶ trajectories

    `reset` and `advance` simulate, in any thread. `see` draws, and `look` before it has it begin: both belong to the
    thread of the GL context. The expert decides by itself in `advance`, before every step.

    An episode ends with success (unless the request plays on), with unstable physics or at the horizon. It keeps its
    row with what it last showed, so that a batch of all rows keeps its shape: no episode depends on when another one
    ends. Each has random streams of its own.
    """

    def __init__(
        self,
        request: RolloutRequest,
        fleet: Fleet,
        observer: Observer,
        horizon: int,
        on_step: Callable[[], None],
        expert: Decide,
    ) -> None:
        """At most `horizon` control steps, with a call of `on_step` after each chunk of them."""
        self.request = request
        self.active = np.ones(request.count, np.bool_)
        self.generators = [np.random.default_rng([request.seed, member, 0]) for member in range(request.count)]
        """For sampling actions, one per episode."""
        self._fleet = fleet
        self._observer = observer
        self._horizon = horizon
        self._on_step = on_step
        self._expert = expert if request.controller == "expert" else None
        self._disturbances = _disturbances(request, fleet.action_space.size)
        self._actions = self._log_probs = np.empty((request.count, 0, fleet.action_space.size), np.float32)
        self._used = 0
        self._recording = _Recording(request)

    @property
    def done(self) -> bool:
        return not self.active.any() or self._recording.steps == self._horizon

    @property
    def awaits_decision(self) -> bool:
        """Whether a policy has to decide before `advance`."""
        return self._is_decision_due and self._expert is None and not self.done

    def reset(self) -> None:
        observation = self._fleet.reset(self.request.split, [self.request.init_state] * self.request.count)
        self._observer.begin(self._fleet, observation, self.request.count)

    def look(self) -> None:
        """Have what `see` needs drawn from now on, where a GPU can. Who leaves this out waits longer in `see`."""
        if self._is_look_due:
            self._observer.look(self._fleet)

    def see(self) -> None:
        """Draw and record what is due: what the next decision is made on, what the last one led to, a film's frame."""
        if self._is_look_due:
            self._observer.see(self._fleet)
        if self._is_decision_due and not self.done:
            self._recording.add_decision(np.flatnonzero(self.active), self._observer.seen)
        if self._is_frame_due or (self.request.frames_every and self.done):
            self._film()

    def abandon(self) -> None:
        """Free what a `look` without `see` holds: nobody plays on."""
        self._observer.abandon()

    def observe(self, lanes: Lanes) -> Observation:
        """What these episodes show, each [len(lanes), …]."""
        return {name: values[lanes] for name, values in self._observer.seen.items()}

    def decide(self, lanes: Lanes, actions: Array, log_probs: Array, latents: Latents) -> None:
        """The next chunk of actions of these episodes, and its log-probs: [len(lanes), C, A] both."""
        self._recording.add_latents(lanes, latents)
        shape = (self.request.count, *actions.shape[1:])
        self._actions, self._log_probs, self._used = np.zeros(shape, np.float32), np.zeros(shape, np.float32), 0
        self._actions[lanes], self._log_probs[lanes] = actions, log_probs

    def advance(self) -> None:
        """Control steps until a decision or a film's frame is due, or all episodes ended."""
        if self._expert is not None:
            self._let_decide(self._expert)
        self._play(self._steps_to_go)

    def trajectories(self, version: int) -> list[Trajectory]:
        """`version`: of the policy that acted."""
        played = self._recording.trajectories(self._observer.seen, self._steps_per_observation, version)
        return [replace(one, beside=self._observer.beside) for one in played] if self._observer.beside else played

    @property
    def _steps_per_observation(self) -> int:
        """Observations are recorded once per decision."""
        return self._actions.shape[1]

    @property
    def _is_decision_due(self) -> bool:
        return self._used == self._actions.shape[1]

    @property
    def _is_look_due(self) -> bool:
        """Whether `see` shows what is now."""
        return self._is_decision_due or self.done

    @property
    def _is_frame_due(self) -> bool:
        every = self.request.frames_every
        return bool(every) and not self.done and self._recording.steps % every == 0

    @property
    def _steps_to_go(self) -> int:
        """Until the actions are used up, a film's frame is due, or the horizon is reached.

        One by one where episodes go on after success: simulators stop there.
        """
        if self.request.until_horizon:
            return 1
        steps, every = self._recording.steps, self.request.frames_every
        film = every - steps % every if every else self._horizon
        return min(self._actions.shape[1] - self._used, self._horizon - steps, film)

    def _let_decide(self, expert: Decide) -> None:
        lanes = np.flatnonzero(self.active)
        actions = np.stack([expert(self._fleet.scene(lane)) for lane in lanes.tolist()])[:, None]
        self.decide(lanes, actions, np.zeros_like(actions), {})

    def _play(self, steps: int) -> None:
        chosen = slice(self._used, self._used + steps)
        self._used += steps
        actions = self._actions[:, chosen]
        self._execute(actions, actions, self._log_probs[:, chosen])

    def _execute(self, actions: Array, taken: Array, log_probs: Array) -> None:
        """Make the steps of the actions `taken`, where the controller chose `actions`; [N, T, A] both."""
        disturbed = taken + np.stack([self._disturbances() for _ in range(taken.shape[1])], axis=1)
        executed = self._fleet.action_space.clip(disturbed)
        after, made = self._fleet.advance(disturbed, self.active)
        self._on_step()
        self._recording.add_steps(made, actions, executed, log_probs)
        self._recording.add_ends(self.active, after)
        self._observer.shows(after, self.active)
        self.active &= ~(after.unstable if self.request.until_horizon else after.success | after.unstable)

    def _film(self) -> None:
        """At the end all episodes but the unstable ones, whose simulations MuJoCo has reset."""
        filmed = ~self._recording.unstable if self.done else self.active
        for lane in np.flatnonzero(filmed).tolist():
            picture = self._fleet.render(lane)
            if picture is not None:
                self._recording.frames[lane].append(picture)


class Observer:
    """What the episodes of a group show to their controller, row by row.

    `names` are the observations that a policy reads; None stands for all state vectors and all cameras, for the expert.
    `beside` are cameras to record that the policy may not read. `states` records the simulators' states, from which
    images can be drawn later.
    Images are drawn once per decision, and only of episodes that go on or have just ended.
    """

    def __init__(
        self, names: Sequence[str] | None, cameras: Sequence[str], beside: Sequence[str] = (), *, states: bool = False
    ) -> None:
        self.beside = () if names is None else tuple(name for name in beside if name not in names)
        names = None if names is None else [*names, *self.beside]
        self.seen: dict[str, NDArray[Any]] = {}
        """Each [N, …]: of an episode that ended, its last observation; if it is unstable, that of its last decision."""
        self._names = names
        self._cameras = [camera for camera in cameras if names is None or camera in names]
        self._records_states = states
        self._shown: Observation = {}
        self._outdated = np.zeros(0, np.bool_)
        """Rows of `seen` that are no longer what the simulators show."""
        self._looking: tuple[Lanes, Look] | None = None
        """Images that are being drawn, and their rows."""

    def begin(self, fleet: Fleet, shown: Observation, count: int) -> None:
        """`shown`: the state vectors after a reset."""
        self._shown, self._outdated = shown, np.ones(count, np.bool_)
        vectors = [name for name in shown if name != INSTRUCTION]
        names = [*vectors, *self._cameras] if self._names is None else self._names
        self.seen = {name: shown[name].copy() for name in names if name in vectors}
        if INSTRUCTION in names:
            self.seen[INSTRUCTION] = np.full(count, fleet.task.language)
        missing = [name for name in names if name not in self.seen and name not in self._cameras]
        if missing:
            raise ConfigError(
                f"the policy sees {', '.join(missing)}, which the simulators of {fleet.task.suite} do not show here",
                "name its cameras in env.cameras.names in params.yaml, or choose another policy",
            )

    def shows(self, after: Steps, stepped: NDArray[np.bool_]) -> None:
        """The simulators have stepped. What an unstable one shows means nothing and may not be finite."""
        self._shown = after.observation
        self._outdated |= stepped
        self._outdated &= ~(stepped & after.unstable)

    def look(self, fleet: Fleet) -> None:
        """Begin to draw what is outdated."""
        lanes = np.flatnonzero(self._outdated)
        if self._cameras and lanes.size:
            self._looking = lanes, begin_look(fleet, lanes, self._cameras)

    def see(self, fleet: Fleet) -> None:
        if self._looking is None:
            self.look(fleet)
        lanes = np.flatnonzero(self._outdated)
        for name in self.seen.keys() & self._shown.keys() - {INSTRUCTION}:
            self.seen[name][lanes] = self._shown[name][lanes]
        if self._looking is not None:
            (drawn, look), self._looking = self._looking, None
            self._put(look(), drawn)
        if self._records_states and lanes.size:
            assert isinstance(fleet, RedrawingFleet), "the suite says that its fleets are"
            self._put({SIMULATOR_STATE: fleet.full_states(lanes)}, lanes)
        self._outdated[:] = False

    def abandon(self) -> None:
        if self._looking is not None:
            (_, look), self._looking = self._looking, None
            with suppress(Exception):  # simulators raise anything
                look()

    def _put(self, values: Mapping[str, NDArray[Any]], lanes: Lanes) -> None:
        """Into these rows of what is seen, whose shape is known when they are first seen."""
        for name, rows in values.items():
            if name not in self.seen:
                self.seen[name] = np.zeros((len(self._outdated), *rows.shape[1:]), rows.dtype)
            self.seen[name][lanes] = rows


class _Recording:
    """What is recorded of a group while it is played."""

    def __init__(self, request: RolloutRequest) -> None:
        self._request = request
        self._decisions: list[tuple[Lanes, Observation]] = []
        self._latents: list[tuple[Lanes, Latents]] = []
        self._chunks: list[tuple[Array, Array, Array]] = []
        self._lengths = np.zeros(request.count, np.int64)
        self.steps = 0
        """Of the longest episode, so far."""
        self._success, self.unstable = np.zeros((2, request.count), np.bool_)
        self._success_steps = np.zeros(request.count, np.int64)
        self.frames: list[list[NDArray[np.uint8]]] = [[] for _ in range(request.count)]

    def add_decision(self, lanes: Lanes, seen: Observation) -> None:
        """Episodes only ever end, so each has its row in the first decisions and in none after them."""
        self._decisions.append((lanes, {name: values[lanes] for name, values in seen.items()}))

    def add_latents(self, lanes: Lanes, latents: Latents) -> None:
        self._latents.append((lanes, latents))

    def add_steps(self, made: NDArray[np.int64], actions: Array, executed: Array, log_probs: Array) -> None:
        """`made` [N] steps of these, [N, T, A] each."""
        self._chunks.append((actions, executed, log_probs))
        self._lengths += made
        self.steps += int(made.max())

    def add_ends(self, active: NDArray[np.bool_], after: Steps) -> None:
        self.unstable |= active & after.unstable
        solved = active & after.success & ~after.unstable
        self._success_steps = np.where(solved & ~self._success, self._lengths, self._success_steps)
        self._success |= solved

    def trajectories(self, final: Observation, chunk: int, version: int) -> list[Trajectory]:
        actions, executed, log_probs = (np.concatenate(column, axis=1) for column in zip(*self._chunks, strict=True))
        found = []
        for lane, length in enumerate(self._lengths.tolist()):
            frames, decisions = self.frames[lane], -(-length // chunk)
            found.append(
                Trajectory(
                    request=self._request,
                    member=lane,
                    observations=_of_lane(self._decisions[:decisions], lane),
                    final={name: np.array(values[lane]) for name, values in final.items()},
                    actions=actions[lane, :length].copy(),
                    executed=executed[lane, :length].copy(),
                    log_probs=log_probs[lane, :length].copy(),
                    chunk=chunk,
                    success=bool(self._success[lane]),
                    unstable=bool(self.unstable[lane]),
                    success_step=int(self._success_steps[lane]) if self._success[lane] else None,
                    version=version,
                    latents=_of_lane(self._latents[:decisions], lane),
                    frames=np.stack(frames) if frames else None,
                )
            )
        return found


def _of_lane(decisions: Sequence[tuple[Lanes, Observation]], lane: int) -> dict[str, NDArray[Any]]:
    """What one episode has in each of these decisions: [decisions, …] by name."""
    rows = [(np.searchsorted(lanes, lane), values) for lanes, values in decisions]
    return {name: np.stack([values[name][row] for row, values in rows]) for name in rows[0][1]}


def _disturbances(request: RolloutRequest, action_dim: int) -> Callable[[], Array]:
    """Noise on the executed actions, [N, A] per step. Recorded actions are without it, so that a clone learns to
    recover from the states that the noise leads to."""
    streams = [np.random.default_rng([request.seed, request.init_state, member]) for member in range(request.count)]
    if not request.disturbance:
        none = np.zeros((request.count, action_dim), np.float32)
        return lambda: none
    scale = np.float32(request.disturbance)
    return lambda: scale * np.stack([stream.standard_normal(action_dim, dtype=np.float32) for stream in streams])
