"""Who takes over, by the section `rlpd.interventions` of params.yaml."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nightshift import access, config
from nightshift.errors import ConfigError
from nightshift.interventions.base import Intervention, PageSettings
from nightshift.interventions.devices.base import ByteSource, DeviceIntervention, DeviceState
from nightshift.interventions.scripted import ScriptedIntervention
from nightshift.project import ports
from nightshift.types import Array, InterventionSettings, InterventionSource, Scene

if TYPE_CHECKING:
    from nightshift.interventions.browser import BrowserIntervention

Decide = Callable[[Scene], Array]
"""The expert's action [A] in a scene."""


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
    if interventions.source == "browser":
        access.check_host(machine.page_address[0], access.token_of_user(), "machine.page:")


def check_page(interventions: config.Interventions, machine: config.Machine) -> None:
    """ConfigError if the page cannot be served, unless it is: by a run of this project."""
    if interventions.source == "browser" and not served_page(interventions, machine):
        from nightshift.teleop.server import listen

        listen(*machine.page_address, "change machine.page in params.yaml").close()


def check_device(interventions: config.Interventions, *, in_run: bool) -> None:
    """DeviceError if the input device of a person is not there, or, in the process that will run, cannot be opened.

    Elsewhere a missing terminal means nothing, and a SpaceMouse that cannot be opened may be in use by a run."""
    match interventions.source:
        case "keyboard" | "gamepad" | "spacemouse" if in_run:
            source, _ = _open_device(interventions.source, interventions.release_seconds)
            source.close()
        case "gamepad":
            from nightshift.interventions.devices import gamepad

            gamepad.GamepadSource(gamepad.DEVICE).close()
        case "spacemouse":
            from nightshift.interventions.devices import spacemouse

            spacemouse.find()


def served_page(interventions: config.Interventions, machine: config.Machine) -> str:
    """In words, that a run of this project serves the page now, and which process it is; empty if none does."""
    process = ports.holder(machine.page_address[1]) if interventions.source == "browser" else ""
    return f"the page of this project's run (process {process})" if process else ""


class InterventionSources:
    """Of one process: a scripted source for every episode, and one input device or web page for all."""

    def __init__(self, env: config.Env, page: PageSettings) -> None:
        self._env = env
        self._page = page
        self._person: DeviceIntervention | BrowserIntervention | None = None
        self._is_let_go = threading.Event()

    def take(self, settings: InterventionSettings, expert: Decide | None = None) -> Intervention:
        if settings.source == "scripted":
            from nightshift.policies.expert import Expert  # its skills, which a check of params need not wait for

            return ScriptedIntervention(settings, expert or Expert().act)
        if self._person is None:
            self._person = self._open(settings)
        return self._person

    def before_reset(self) -> None:
        """Returns when an episode without interventions may begin: a person at the page may have stopped the robot."""
        if self._person is not None:
            self._person.before_reset()

    def begin(self) -> None:
        """`let_go` no longer counts."""
        self._is_let_go.clear()

    def let_go(self) -> None:
        """Whoever waits for a person waits no longer; from any thread."""
        self._is_let_go.set()

    def close(self) -> None:
        if self._person is not None:
            self._person.close()
            self._person = None

    def _open(self, settings: InterventionSettings) -> DeviceIntervention | BrowserIntervention:
        if settings.source != "browser":
            device = _open_device(settings.source, settings.release_seconds)
            return DeviceIntervention(*device, settings.release_seconds)
        from nightshift.interventions.browser import BrowserIntervention

        return BrowserIntervention(self._env, self._page, access.token_of_user(), is_let_go=self._is_let_go.is_set)


def _open_device(source: InterventionSource, release_seconds: float) -> tuple[ByteSource, DeviceState]:
    """Its modules are imported where it is used: termios is not on every system, and hidapi is optional."""
    match source:
        case "spacemouse":
            from nightshift.interventions.devices.spacemouse import SpaceMouseSource, SpaceMouseState

            return SpaceMouseSource(), SpaceMouseState()
        case "gamepad":
            from nightshift.interventions.devices import gamepad

            return gamepad.GamepadSource(gamepad.DEVICE), gamepad.GamepadState()
        case _:
            from nightshift.interventions.devices.keyboard import KeyboardSource, KeyboardState

            return KeyboardSource(), KeyboardState(release_seconds)
