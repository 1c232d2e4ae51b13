"""Whether the champion can be the start of training: the precheck asks before the first stage, the stages again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nightshift.errors import ConfigError, NightshiftError, RegistryError

if TYPE_CHECKING:
    from nightshift.policies.base import Policy


def no_champion(model: str) -> RegistryError:
    return RegistryError(
        f"start in params.yaml is champion, and {model} has none here",
        "start: scratch; the first version that passes the gate becomes champion",
    )


def cannot_be_loaded(error: NightshiftError) -> ConfigError:
    return ConfigError(
        f"start in params.yaml is champion, which cannot be loaded here: {error.what}",
        f"start: scratch, or {error.next_step}" if error.next_step else "start: scratch",
    )


def check_same_network(champion: Policy, fresh: Policy) -> None:
    """ConfigError if the champion's weights do not fit the policy that params.yaml describes."""
    if json.dumps(champion.architecture, sort_keys=True) != json.dumps(fresh.architecture, sort_keys=True):
        raise ConfigError(
            "start in params.yaml is champion, which is another network than policy there describes",
            "start: scratch, or policy as the champion was trained with: nightshift lineage champion",
        )
