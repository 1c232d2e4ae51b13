"""What the sources of experience for off-policy learning have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nightshift.data.episode import Episode
from nightshift.errors import ConfigError, RolloutError

SOURCE = "source"
"""Key in the state of a source: the setting that it comes from."""
_LOST_ROUNDS = 10


def first_valid(play_round: Callable[[], list[Episode]]) -> list[Episode]:
    """The episodes of the next round in which the simulator did not fail in all of them."""
    for _ in range(_LOST_ROUNDS):
        episodes = play_round()
        if episodes:
            return episodes
    raise RolloutError(
        f"the simulator failed in every episode of {_LOST_ROUNDS} rounds in a row", "see the warnings above"
    )


def check_source(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Actors and the simulators of the stage keep their episodes in different places."""
    if saved[SOURCE] != present[SOURCE]:
        raise ConfigError(
            f"this training began with {saved[SOURCE]}, and params.yaml now has {present[SOURCE]}",
            f"set {saved[SOURCE]} in params.yaml and run again: it resumes",
        )
