"""Images of episodes that were played without them, drawn from the recorded states of the simulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nightshift.envs.base import Fleet, RedrawingFleet
from nightshift.envs.perturbations.fleet import perturbed
from nightshift.types import SIMULATOR_STATE, Observation, Trajectory


def redrawn(fleet: Fleet, episodes: Sequence[Trajectory], cameras: Sequence[str]) -> list[Trajectory]:
    """The episodes of one request with images in the place of states. A decision is a control step in them."""
    request = episodes[0].request
    played = perturbed(fleet, request)
    try:
        if played is not fleet:
            played.reset(request.split, [request.init_state])  # which changes the scene
        assert isinstance(played, RedrawingFleet), "the suite says that its fleets are"
        return [_with_images(played, episode, cameras) for episode in episodes]
    finally:
        if played is not fleet:
            played.close()


def _with_images(fleet: RedrawingFleet, episode: Trajectory, cameras: Sequence[str]) -> Trajectory:
    states = np.stack([*episode.observations[SIMULATOR_STATE], episode.final[SIMULATOR_STATE]])
    images = fleet.redraw(episode.member, states, cameras)
    last = -2 if episode.unstable else -1  # an unstable simulator shows what the last decision was made on
    return replace(
        episode,
        observations={**_vectors(episode.observations), **{camera: images[camera][:-1] for camera in cameras}},
        final={**_vectors(episode.final), **{camera: images[camera][last] for camera in cameras}},
    )


def _vectors(observation: Observation) -> Observation:
    return {name: values for name, values in observation.items() if name != SIMULATOR_STATE}
