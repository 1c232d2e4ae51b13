"""Who takes over, by the section `rlpd.interventions` of params.yaml."""

from __future__ import annotations

from collections.abc import Callable

from nightshift import config
from nightshift.errors import ConfigError
from nightshift.interventions.base import Intervention
from nightshift.interventions.devices.base import ByteSource, DeviceIntervention, DeviceState
from nightshift.interventions.scripted import ScriptedIntervention
from nightshift.policies.expert import Expert
from nightshift.types import Array, InterventionSettings, Scene

Decide = Callable[[Scene], Array]
"""The expert's action [A] in a scene."""


def open_intervention(settings: InterventionSettings, expert: Decide | None = None) -> Intervention:
    """A scripted source is for one episode at a time; an input device is open until it is closed."""
    if settings.source == "scripted":
        return ScriptedIntervention(settings, expert or Expert().act)
    source, state = _open_device(settings)
    return DeviceIntervention(source, state, settings.release_seconds)


def check_person(interventions: config.Interventions, machine: config.Machine) -> None:
    """ConfigError if a person would have to follow several episodes at once, or those of other processes."""
    if not interventions.is_by_person:
        return
    wanted = {"workers": 0, "actors": 0, "requests_at_once": 1}
    wrong = [f"machine.{name}: {value}" for name, value in wanted.items() if getattr(machine, name) != value]
    if wrong:
        raise ConfigError(
            f"rlpd.interventions.source is {interventions.source}: a person follows one episode at a time",
            f"set {', '.join(wrong)} in params.yaml",
        )


class InterventionSources:
    """Of one process: a scripted source for every episode, and one input device for all."""

    def __init__(self) -> None:
        self._device: DeviceIntervention | None = None

    def take(self, settings: InterventionSettings, expert: Decide) -> Intervention:
        if self._device is not None:
            return self._device
        opened = open_intervention(settings, expert)
        if isinstance(opened, DeviceIntervention):
            self._device = opened
        return opened

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None


def _open_device(settings: InterventionSettings) -> tuple[ByteSource, DeviceState]:
    """Its modules are imported where it is used: termios is not on every system, and hidapi is optional."""
    match settings.source:
        case "spacemouse":
            from nightshift.interventions.devices.spacemouse import SpaceMouseSource, SpaceMouseState

            return SpaceMouseSource(), SpaceMouseState()
        case "gamepad":
            from nightshift.interventions.devices.gamepad import GamepadSource, GamepadState

            return GamepadSource(), GamepadState()
        case _:
            from nightshift.interventions.devices.keyboard import KeyboardSource, KeyboardState

            return KeyboardSource(), KeyboardState(settings.release_seconds)
