"""Many LIBERO simulations in one process, stepped by compiled calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import ActionSpace, Look, States, Steps
from nightshift.envs.libero.env import LiberoEnv, usable_actions
from nightshift.envs.libero.stepping import Addresses, Found, Made
from nightshift.envs.sharing import share
from nightshift.types import Array, Observation, Scene, Split, Task

if TYPE_CHECKING:
    from nightshift.envs.perturbations.base import Perturbation

Lanes = NDArray[np.int64]


class LiberoFleet:
    """Simulations that share one compiled model. Stepping releases the GIL: siblings step in parallel threads, and the
    simulations of one fleet after `share`.

    Example:
        fleet = LIBERO_MINI.make_fleet(task)
        observation = fleet.reset("train", [0, 1, 2, 3])
        observation, success, unstable = fleet.step(np.zeros((4, 7), np.float32), np.ones(4, bool))
        images = fleet.look(np.arange(4), ["wrist"])
    """

    def __init__(self, first: LiberoEnv, *, owner: bool = True, threads: Executor | None = None) -> None:
        """`owner`: whether `close` frees what the simulations of this model share; `threads`: as of `share`."""
        self._lanes = [first]
        self._owner = owner
        self._threads = threads
        self._step_addresses: Addresses = np.empty((0, 0), np.int64)
        self._observation_addresses = self._step_addresses
        self._observation: dict[str, Array] = {}
        self._steps = 0

    @property
    def task(self) -> Task:
        return self._lanes[0].task

    @property
    def action_space(self) -> ActionSpace:
        return self._lanes[0].action_space

    def sibling(self) -> LiberoFleet:
        return LiberoFleet(self._lanes[0].with_new_data(), owner=False, threads=self._threads)

    def altered(self, changes: Sequence[Perturbation], split: Split, init_state: int) -> LiberoFleet:
        return LiberoFleet(self._lanes[0].altered(changes, split, init_state), threads=self._threads)

    def share(self, threads: Executor) -> None:
        self._threads = threads

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        while len(self._lanes) < len(init_states):
            self._lanes.append(self._lanes[0].with_new_data())
        used = list(zip(self._lanes, init_states, strict=False))
        for lane, state in used:
            lane.restore(split, state)
        self._step_addresses = np.stack([lane.step_addresses for lane, _ in used])
        self._observation_addresses = np.stack([lane.observation_addresses for lane, _ in used])
        self._divide(self._settle, len(used))
        for lane, state in used:
            lane.check_settled(split, state)
        rows = [lane.observe() for lane, _ in used]
        self._observation = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        self._steps = 0
        return self._observation

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        return self.advance(actions[:, None], active)[0]

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        """Python runs per compiled call, not per step, but where a simulation may have reached the goal."""
        (lanes,) = active.nonzero()  # a third of the time of np.flatnonzero
        usable = usable_actions(self.task, self._steps + 1, actions[lanes])
        made = np.zeros(len(lanes), np.int64)
        success, unstable = np.zeros((2, len(active)), np.bool_)
        (going,) = (made < usable.shape[1]).nonzero()
        while going.size:
            made[going], possible, unstable[lanes[going]] = self._play(lanes[going], usable[going], made[going])
            stopped = going[possible]
            success[lanes[stopped]] = [self._lanes[lane].is_solved() for lane in lanes[stopped].tolist()]
            going = stopped[~success[lanes[stopped]] & (made[stopped] < usable.shape[1])]
        self._steps += int(made.max(initial=0))
        self._lanes[0].observer.write(self._observation_addresses[lanes], lanes, self._observation)
        steps = np.zeros(len(active), np.int64)
        steps[lanes] = made
        return Steps(self._observation, success, unstable), steps

    def _settle(self, lanes: slice) -> None:
        first, rows = self._lanes[0], self._step_addresses[lanes]
        for action in first.settling:
            first.stepping.step(rows, np.tile(action, (len(rows), 1)))

    def _play(self, lanes: Lanes, actions: NDArray[np.float64], made: Made) -> tuple[Made, *Found]:
        first, addresses = self._lanes[0], (self._step_addresses[lanes], self._observation_addresses[lanes])
        possible, unstable = np.zeros((2, len(lanes)), np.bool_)

        def play(own: slice) -> None:
            rows = addresses[0][own], addresses[1][own]
            possible[own], unstable[own] = first.stepping.play(rows, first.goal, actions[own], made[own])

        self._divide(play, len(lanes))
        return made, possible, unstable

    def _divide(self, work: Callable[[slice], None], count: int) -> None:
        """Each simulation by itself where threads share them, and otherwise all in one compiled call."""
        if self._threads is None:
            work(slice(0, count))
        else:
            share(self._threads, lambda number: work(slice(number, number + 1)), count)

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        return self.begin_look(lanes, cameras)()

    def begin_look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Look:
        return self._lanes[0].begin_images_of([self._lanes[lane] for lane in lanes.tolist()], cameras)

    def full_states(self, lanes: NDArray[np.int64]) -> States:
        return np.stack([self._lanes[lane].full_state() for lane in lanes.tolist()])

    def redraw(self, lane: int, states: States, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """The simulations are alike, so the first draws what any of them has played."""
        return self._lanes[0].images_in(states, cameras)

    def scene(self, lane: int) -> Scene:
        return self._lanes[lane].scene()

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        return self._lanes[lane].render()

    def sketch(self, *, films_alone: bool) -> None:
        """Before the first image is drawn; for siblings, too."""
        self._lanes[0].sketch(films_alone=films_alone)

    def close(self) -> None:
        if self._owner:
            self._owner = False
            self._lanes[0].close()
