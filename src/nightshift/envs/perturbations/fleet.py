"""Perturbations around simulators: a fleet in whose episodes the world differs from the suite's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import ActionSpace, Fleet, Look, RedrawingFleet, States, Steps, begin_look
from nightshift.envs.perturbations import registry
from nightshift.envs.perturbations.base import Perturbation
from nightshift.errors import SimulatorError
from nightshift.types import Array, Observation, RolloutRequest, Scene, Split, Task


@runtime_checkable
class AlterableFleet(Protocol):
    """A fleet whose scene can be changed."""

    def altered(self, changes: Sequence[Perturbation], split: Split, init_state: int) -> Fleet:
        """Other simulators of this task, with a model of their own that `changes` have changed, for one init state.

        In any thread; to be closed when they are no longer used.
        """
        ...


def perturbed(fleet: Fleet, request: RolloutRequest) -> Fleet:
    """The fleet as the request asks for it; itself if nothing is perturbed."""
    perturbations = registry.drawn(request)
    if not perturbations:
        return fleet
    changes = [one for one in perturbations if one.kind == "scene"]
    if changes and not isinstance(fleet, AlterableFleet):
        names = ", ".join(one.name for one in changes)
        raise SimulatorError(f"{fleet.task.suite} cannot do {names}: its scene cannot be changed", "leave them out")
    return PerturbedFleet(fleet, perturbations)


class PerturbedFleet:
    """Changes what goes in and out of a fleet. For the episodes of one request: its perturbations have drawn.

    The scene is changed by the first reset, which takes up to 0.3 s, in the thread that resets.
    """

    def __init__(self, fleet: Fleet, perturbations: Sequence[Perturbation]) -> None:
        self._origin = fleet
        self._fleet = fleet
        """The origin, or simulators whose scene differs from it."""
        self._perturbations = perturbations
        self._steps = np.zeros(0, np.int64)
        """Control steps of each simulator since the reset."""

    @property
    def reached(self) -> dict[str, float]:
        """The strength of each perturbation that the scene had no room for, as far as it went; after a reset."""
        return {one.name: one.reached for one in self._perturbations if one.reached < one.strength}

    @property
    def has_own_scene(self) -> bool:
        """Then the fleet that it was made from simulates nothing. What draws is still its own."""
        return any(one.kind == "scene" for one in self._perturbations)

    @property
    def task(self) -> Task:
        told = reduce(lambda words, one: one.change_instruction(words), self._perturbations, self._fleet.task.language)
        return replace(self._fleet.task, language=told)

    @property
    def action_space(self) -> ActionSpace:
        return self._fleet.action_space

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        self._steps = np.zeros(len(init_states), np.int64)
        changes = [one for one in self._perturbations if one.kind == "scene"]
        if changes and self._fleet is self._origin:
            assert isinstance(self._origin, AlterableFleet), "refused by `perturbed`"
            self._fleet = self._origin.altered(changes, split, init_states[0])
        return self._sensed(self._fleet.reset(split, init_states))

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        return self.advance(actions[:, None], active)[0]

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        sent = reduce(lambda chosen, one: one.change_actions(chosen, self._steps), self._perturbations, actions)
        after, made = self._fleet.advance(sent, active)
        self._steps = self._steps + made
        return after._replace(observation=self._sensed(after.observation)), made

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        return self.begin_look(lanes, cameras)()

    def begin_look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Look:
        images = begin_look(self._fleet, lanes, cameras)
        return lambda: self._seen(images(), lanes, self._steps[lanes])

    def full_states(self, lanes: NDArray[np.int64]) -> States:
        return self._redrawing.full_states(lanes)

    def redraw(self, lane: int, states: States, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """After a reset, which changes the scene."""
        images = self._redrawing.redraw(lane, states, cameras)
        return self._seen(images, np.full(len(states), lane), np.arange(len(states)))

    def sibling(self) -> Fleet:
        return PerturbedFleet(self._origin.sibling(), [type(one)(one.spec, one.key) for one in self._perturbations])

    def scene(self, lane: int) -> Scene:
        return self._fleet.scene(lane)

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        return self._fleet.render(lane)

    def close(self) -> None:
        """The fleet that it was made from stays open."""
        if self._fleet is not self._origin:
            self._fleet.close()

    @property
    def _redrawing(self) -> RedrawingFleet:
        assert isinstance(self._fleet, RedrawingFleet), "the suite says that its fleets are"
        return self._fleet

    def _seen(
        self, images: Mapping[str, NDArray[np.uint8]], lanes: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> Mapping[str, NDArray[np.uint8]]:
        return reduce(lambda seen, one: one.change_images(seen, lanes, steps), self._perturbations, images)

    def _sensed(self, observation: Observation) -> Observation:
        return reduce(lambda seen, one: one.change_observation(seen, self._steps), self._perturbations, observation)
