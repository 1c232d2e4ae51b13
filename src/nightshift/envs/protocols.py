"""Published LIBERO evaluation protocols. A number that a paper's code fixes is defined here and nowhere else.

Results compare only under one protocol: the same policy scores differently with more steps or another settling phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.errors import SimulatorError
from nightshift.types import GRIPPER_OPEN

Image = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to evaluate on LIBERO's suites."""

    name: str
    max_steps: Mapping[str, int]
    """By suite: control steps until an episode counts as failed."""
    settle_steps: int
    """Control steps between restoring an init state and the first action of the policy."""
    settle_action: tuple[float, ...]  # [A]
    resolution: int
    """Pixels of a camera image, which is square, as it is rendered; a policy resizes it as it needs."""
    rotated: bool
    """Whether camera images are LIBERO's turned by 180°."""
    trials: int
    """Init states per task, each played once."""
    seed: int
    """Of building the scene: it decides the poses of fixtures, which init states do not contain."""


_OPEN_GRIPPER = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, GRIPPER_OPEN)
_NOTHING = (0.0,) * 7

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="openvla-oft",  # also openpi and RIPT on OpenVLA-OFT
            max_steps={
                "libero_spatial": 220,
                "libero_object": 280,
                "libero_goal": 300,
                "libero_10": 520,
                "libero_90": 400,
            },
            settle_steps=10,
            settle_action=_OPEN_GRIPPER,
            resolution=256,
            rotated=True,
            trials=50,
            seed=0,  # openpi: 7
        ),
        Protocol(
            name="simplevla-rl",
            max_steps=dict.fromkeys(("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"), 512),
            settle_steps=10,
            settle_action=_OPEN_GRIPPER,
            resolution=256,
            rotated=True,
            trials=50,  # its batches drop the last 4 of a suite's 500
            seed=0,
        ),
        Protocol(
            name="rlinf",
            max_steps={
                "libero_spatial": 240,
                "libero_object": 240,
                "libero_goal": 320,
                "libero_10": 512,
                "libero_90": 512,
            },
            settle_steps=15,
            settle_action=_NOTHING,
            resolution=256,
            rotated=True,
            trials=50,
            seed=0,  # RLinf adds the rank of the worker, so that the scene depends on the worker
        ),
    )
}
DEFAULT = PROTOCOLS["openvla-oft"]


def find(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise SimulatorError(
            f"there is no protocol {name!r}; there are {', '.join(PROTOCOLS)}", "edit env.protocol in params.yaml"
        )
    return PROTOCOLS[name]


def max_steps(protocol: Protocol, suite: str) -> int:
    if suite not in protocol.max_steps:
        raise SimulatorError(
            f"the protocol {protocol.name} has no number of steps for {suite}, so env.horizon cannot be auto",
            "write a number in env.horizon of params.yaml, for example 80",
        )
    return protocol.max_steps[suite]


def rotate(image: Image) -> Image:
    """LIBERO's camera image [H, W, 3], whose first row is the lowest, turned by 180°."""
    return np.ascontiguousarray(image[::-1, ::-1])


def gripper_to_env(model: float) -> float:
    """A model's gripper value (1 open, 0 closed) as LIBERO takes it: -1 opens, +1 closes, 0 exactly in between."""
    return float(-np.sign(2.0 * model - 1.0))
