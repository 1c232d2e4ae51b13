"""Images that are drawn after an episode was played: the pixels of one that was drawn while it was played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs.base import Fleet
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.redrawn import redrawn
from nightshift.types import SIMULATOR_STATE, PerturbationSpec, RolloutRequest, Trajectory
from tests.rollouts.parts import assert_same

REQUEST = RolloutRequest(task="lift_cube", split="eval", init_state=0, controller="expert", seed=3, disturbance=0.15)
PERTURBATIONS = tuple(
    PerturbationSpec(name=name, strength=2.0)
    for name in ("camera_viewpoints", "background_textures", "confounding_objects", "sensor_noise")
)


@pytest.mark.usefixtures("forked_processes")
def test_pixels_of_a_simulator_are_the_same_with_and_without_perturbations() -> None:
    cameras = config.Cameras(names=("agentview", "wrist"), size=32, shadows=False)
    env = config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=5, cameras=cameras)
    requests = [REQUEST, replace(REQUEST, init_state=1, perturbations=PERTURBATIONS)]
    by_processes = EngineSettings(device=torch.device("cpu"), threads=2, requests_at_once=2)
    with closing(LocalPool(env)) as pool:
        drawn_meanwhile = dict(pool.run(requests))
    with closing(LocalPool(env, by_processes)) as pool:
        drawn_later = dict(pool.run(requests))
    for index, (one,) in drawn_meanwhile.items():
        (other,) = drawn_later[index]
        assert one.observations["wrist"].shape == (5, 32, 32, 3)
        assert_same(one, other)


@pytest.mark.parametrize(("unstable", "final"), [(False, 3), (True, 2)])
def test_the_last_image_is_of_what_was_seen_last(*, unstable: bool, final: int) -> None:
    states = np.arange(6.0).reshape(3, 2)
    episode = replace(
        Trajectory.lost(REQUEST, member=0),
        observations={"proprio": np.zeros((3, 4)), SIMULATOR_STATE: states},
        final={"proprio": np.zeros(4), SIMULATOR_STATE: states[2]},
        unstable=unstable,
    )
    (drawn,) = redrawn(cast(Fleet, _Numbering()), [episode], ["agentview"])
    assert drawn.observations.keys() == drawn.final.keys() == {"proprio", "agentview"}
    np.testing.assert_array_equal(drawn.observations["agentview"], [0, 1, 2])
    assert drawn.final["agentview"] == final


class _Numbering:
    """Its images are the numbers of the states."""

    def full_states(self, lanes: NDArray[np.int64]) -> NDArray[np.float64]:
        raise AssertionError("drawing reads no state of the simulators")

    def redraw(self, lane: int, states: NDArray[np.float64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        return {camera: np.arange(len(states), dtype=np.uint8) for camera in cameras}
