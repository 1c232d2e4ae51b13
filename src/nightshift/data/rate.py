"""How many steps of an episode a second has: the rate of control, which LeRobot calls frames per second."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from nightshift.data.episode import Episode

FPS = "fps"
"""Metadata key, where the source says it."""
USUAL = 20
"""Steps per second of the simulators, and of an export of episodes that do not say theirs."""


def is_rate(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def known(episode: Episode) -> float | None:
    """Steps per second; None if the episode does not say."""
    said = episode.metadata.get(FPS)
    return float(said) if is_rate(said) else None
