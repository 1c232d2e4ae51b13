"""Who takes over, by the section `rlpd.interventions` of params.yaml."""

from __future__ import annotations

from collections.abc import Callable

from nightshift.interventions.base import Intervention
from nightshift.interventions.scripted import ScriptedIntervention
from nightshift.policies.expert import Expert
from nightshift.types import Array, InterventionSettings, Scene


def open_intervention(settings: InterventionSettings, expert: Callable[[Scene], Array] = Expert().act) -> Intervention:
    """A scripted source is for one episode at a time."""
    return ScriptedIntervention(settings, expert)


class InterventionSources:
    """Of one process: a scripted source for every episode."""

    def take(self, settings: InterventionSettings, expert: Callable[[Scene], Array]) -> Intervention:
        return open_intervention(settings, expert)

    def close(self) -> None: ...
