"""Bytes of input devices in their published formats, and what a person's intervention with one is."""

from __future__ import annotations

import os
import queue
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nightshift import config
from nightshift.errors import ConfigError, DeviceError
from nightshift.interventions.base import Moment
from nightshift.interventions.devices import gamepad
from nightshift.interventions.devices.base import CONTROL_SECONDS, DeviceIntervention, DeviceState
from nightshift.interventions.devices.gamepad import GamepadSource, GamepadState
from nightshift.interventions.devices.keyboard import KeyboardSource, KeyboardState
from nightshift.interventions.devices.spacemouse import SpaceMouseSource, SpaceMouseState
from nightshift.interventions.opening import _open_device, check_device, check_person
from nightshift.types import InterventionSource, Scene, Task
from tests.conftest import REPOSITORY
from tests.waiting import wait_until

TASK = Task(suite="fake", name="near", language="", index=0, suite_size=1)
PARAMS = config.load(REPOSITORY / "params.yaml")


def fed(state: DeviceState, *data: bytes) -> list[float]:
    for one in data:
        state.feed(one, 1.0)
    return [round(value, 3) for value in state.command(1.0).tolist()]


def test_a_spacemouse_of_today_sends_all_six_axes_in_report_1() -> None:
    """Little-endian int16; 350 is the end of an axis. Bytes 1 and 2 are the cap to the right, 3 and 4 to its owner, 5
    and 6 down; then roll, pitch, yaw."""
    report = bytes([1, 0x5E, 0x01, 0xA2, 0xFE, 0xAF, 0x00, 0x23, 0x00, 0xDD, 0xFF, 0x46, 0x00])
    assert fed(SpaceMouseState(), report) == [-1.0, 1.0, -0.5, -0.1, 0.1, 0.2]


def test_an_older_spacemouse_sends_rotations_in_report_2() -> None:
    moved, turned = bytes([1, 0, 0, 0xAF, 0x00, 0, 0]), bytes([2, 0, 0, 0, 0, 0xA2, 0xFE])
    assert fed(SpaceMouseState(), moved) == [0.5, 0, 0, 0, 0, 0]
    assert fed(SpaceMouseState(), moved, turned) == [0.5, 0, 0, 0, 0, -1.0]


def test_a_spacemouse_beyond_its_range_is_at_its_end_and_trembling_is_rest() -> None:
    state = SpaceMouseState()
    assert fed(state, bytes([1, 0xF4, 0x01, 0x05, 0x00, 0, 0])) == [0, 1.0, 0, 0, 0, 0]
    assert fed(state, bytes([1, *[0] * 12])) == [0] * 6


def test_the_left_button_of_a_spacemouse_toggles_the_gripper_once_per_press() -> None:
    state = SpaceMouseState()
    for report in (bytes([3, 1]), bytes([3, 1]), bytes([3, 3]), bytes([3, 0]), bytes([3, 1])):
        state.feed(report, 2.0)
    assert state.toggles == 2


def js_event(value: int, kind: int, number: int) -> bytes:
    return struct.pack("<IhBB", 4242, value, kind, number)


def test_the_bytes_of_the_kernels_joystick_events_are_sticks_and_buttons() -> None:
    golden = bytes([0x92, 0x10, 0, 0, 0x01, 0x80, 2, 1])  # axis 1 at -32767: the left stick pushed away
    assert golden == js_event(-32767, 2, 1)
    assert fed(GamepadState(), golden) == [-1.0, 0, 0, 0, 0, 0]
    state = GamepadState()
    assert fed(state, js_event(32767, 2, 0) + js_event(-16384, 2, 4), js_event(1, 1, 5)) == [0, 1.0, 0.5, 1.0, 0, 0]
    assert fed(state, js_event(0, 1, 5), js_event(2000, 2, 0)) == [0, 0, 0.5, 0, 0, 0]


def test_what_a_gamepad_says_when_it_is_opened_is_not_a_persons_input() -> None:
    state = GamepadState()
    assert fed(state, js_event(-32767, 0x82, 2), js_event(1, 0x81, 0)) == [0] * 6
    assert (state.toggles, state.seconds_since_input(5.0)) == (0, np.inf)


def test_a_stick_that_is_held_sends_nothing_and_is_input_all_the_same() -> None:
    state = GamepadState()
    fed(state, js_event(32767, 2, 0))
    assert state.seconds_since_input(100.0) == 0.0
    fed(state, js_event(0, 2, 0))
    assert state.seconds_since_input(100.0) == 99.0


def test_keys_move_for_a_moment_and_other_characters_do_nothing() -> None:
    state = KeyboardState(release_seconds=0.3)
    assert fed(state, b"wr") == [-1.0, 0, 1.0, 0, 0, 0]
    state.feed(b"d", 1.2)
    assert state.command(1.35).tolist() == [0, 1.0, 0, 0, 0, 0]
    assert not state.command(1.6).any()
    state.feed(b"\x1b[A\xff", 9.0)
    assert state.seconds_since_input(9.0) == pytest.approx(7.8)
    for part in (b"\x1b", b"[", b"1;5", b"C"):  # an arrow whose bytes come one by one, and contain the letter c
        state.feed(part, 9.0)
    assert not state.command(9.0).any()
    state.feed(b"\x1bw", 9.0)  # the key Esc, then another one
    assert state.command(9.0).tolist() == [-1.0, 0, 0, 0, 0, 0]
    state.feed(b" ", 9.0)
    assert (state.toggles, state.seconds_since_input(9.0)) == (1, 0.0)


class Wire:
    """A device: what is put there is read; None is a cable that is pulled."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[bytes | None] = queue.Queue()
        self.is_closed = False

    def read(self) -> bytes:
        try:
            data = self.waiting.get(timeout=0.01)
        except queue.Empty:
            return b""
        self.waiting.task_done()
        if data is None:
            raise OSError("gone")
        return data

    def close(self) -> None:
        self.is_closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def no_scene() -> Scene:
    raise AssertionError("a person sees the robot")


def moment(gripper: float = -1.0) -> Moment:
    return Moment(
        step=0,
        observation={},
        scene=no_scene,
        picture=lambda: None,
        policy_action=np.full(7, gripper, np.float32),
    )


def test_a_person_intervenes_while_input_comes_and_lets_go_soon_after_the_last() -> None:
    wire, clock, state = Wire(), Clock(), SpaceMouseState()
    with DeviceIntervention(wire, state, 0.3, clock=clock, sleep=clock.sleep) as person:
        person.begin(TASK)
        assert person.override(moment()) is None
        wire.waiting.put(bytes([1, 0x5E, 0x01, 0, 0, 0, 0]))
        wait_until(lambda: state.seconds_since_input(clock.now) < 1)
        action = person.override(moment())
        assert action is not None
        assert action.tolist() == [0, 1, 0, 0, 0, 0, -1]
        clock.now += 0.31
        assert person.override(moment()) is None, "no report came for longer than release_seconds"
    assert wire.is_closed


def test_a_device_that_is_unplugged_while_its_stick_is_held_lets_go() -> None:
    wire, clock, state = Wire(), Clock(), GamepadState()
    with DeviceIntervention(wire, state, 0.3, clock=clock, sleep=clock.sleep) as person:
        wire.waiting.put(js_event(32767, 2, 0))
        wait_until(lambda: bool(state.command(0).any()))
        clock.now += 1000
        assert person.override(moment()) is not None
        wire.waiting.put(None)
        wait_until(lambda: person.override(moment()) is None)


def test_the_gripper_stays_as_the_policy_had_it_until_the_button_is_pressed() -> None:
    wire, clock, state = Wire(), Clock(), GamepadState()
    with DeviceIntervention(wire, state, 0.3, clock=clock, sleep=clock.sleep) as person:
        wire.waiting.put(js_event(32767, 2, 0))
        wait_until(lambda: bool(state.command(0).any()))

        def gripper(policy: float) -> float:
            action = person.override(moment(policy))
            assert action is not None
            return float(action[-1])

        assert [gripper(0.7), gripper(-0.9)] == [1.0, 1.0], "no command before: what the policy wanted first"
        wire.waiting.put(js_event(1, 1, 0))
        wait_until(lambda: state.toggles == 1)
        assert [gripper(0.7), gripper(0.7)] == [-1.0, -1.0]


def test_a_takeover_keeps_the_gripper_of_the_last_action_though_the_policy_would_now_open_it() -> None:
    wire, clock, state = Wire(), Clock(), SpaceMouseState()
    with DeviceIntervention(wire, state, 0.3, clock=clock, sleep=clock.sleep) as person:
        for executed in (1.0, -1.0):
            person.begin(TASK)
            clock.now += 1.0
            assert person.override(moment(-executed)) is None
            assert person.override(moment(executed)) is None
            wire.waiting.put(bytes([1, 0x5E, 0x01, 0, 0, 0, 0]))
            wait_until(lambda: state.seconds_since_input(clock.now) < 0.3)
            held = [person.override(moment(policy)) for policy in (-executed, executed, -executed)]
            assert [None if action is None else float(action[-1]) for action in held] == [executed] * 3


def test_a_report_that_cannot_be_read_ends_the_intervention_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    wire, clock, state = Wire(), Clock(), GamepadState()
    with DeviceIntervention(wire, state, 0.3, clock=clock, sleep=clock.sleep) as person:
        wire.waiting.put(js_event(32767, 2, 0))
        wait_until(lambda: bool(state.command(0).any()))
        assert person.override(moment()) is not None, "the stick is held"
        wire.waiting.put(b"\x00")
        wait_until(lambda: person.override(moment()) is None)
    assert "input device" in caplog.text


def test_a_simulator_waits_for_the_person() -> None:
    clock = Clock()
    with DeviceIntervention(Wire(), SpaceMouseState(), 0.3, clock=clock, sleep=clock.sleep) as person:
        person.begin(TASK)
        for _ in range(5):
            person.override(moment())
        assert clock.slept == pytest.approx(4 * CONTROL_SECONDS)
        clock.now += 10.0  # a long update
        before = clock.slept
        for _ in range(5):
            person.override(moment())
        assert clock.slept - before >= 3 * CONTROL_SECONDS - 1e-9, "lost time is not made up for"


def test_a_missing_device_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="the gamepad cannot be opened"):
        GamepadSource(tmp_path / "js0")
    with pytest.raises(DeviceError, match="from a terminal"):
        KeyboardSource()
    with pytest.raises(DeviceError, match="SpaceMouse"):
        SpaceMouseSource()


def test_a_gamepads_device_file_is_read_and_its_end_is_an_unplugged_device(tmp_path: Path) -> None:
    (tmp_path / "js0").write_bytes(js_event(1, 1, 0))
    source = GamepadSource(tmp_path / "js0")
    assert source.read() == js_event(1, 1, 0)
    with pytest.raises(OSError, match="gone"):
        source.read()
    source.close()


def test_the_end_of_a_terminal_is_an_unplugged_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, ours = os.openpty()
    with open(ours) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        source = KeyboardSource()
        os.write(terminal, b"w")
        assert source.read() == b"w"
        os.close(terminal)
        with pytest.raises(OSError, match=r"gone|error"):
            source.read()


def test_a_person_cannot_follow_other_processes_or_several_episodes() -> None:
    by_person = PARAMS.rlpd.interventions.model_copy(update={"source": "gamepad"})
    alone = PARAMS.machine.model_copy(update={"workers": 0, "actors": 0, "requests_at_once": 1})
    check_person(by_person, alone)
    check_person(PARAMS.rlpd.interventions, PARAMS.machine)
    with pytest.raises(ConfigError, match="one episode at a time") as raised:
        check_person(by_person, alone.model_copy(update={"actors": 2}))
    assert raised.value.next_step == "set machine.actors: 0 in params.yaml"


CAP = bytes([1, 0x5E, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
"""The cap of a SpaceMouse, pushed to the right."""
SPACEMOUSE = {"path": b"/dev/hidraw3", "vendor_id": 0x256F, "product_string": "SpaceMouse Compact"}
OTHERS = [
    {"path": b"/dev/hidraw0", "vendor_id": 0x046D, "product_string": "G502 Mouse"},
    {"path": b"/dev/hidraw1", "vendor_id": 0x1234, "product_string": "Space Keyboard"},
    {"path": b"/dev/hidraw2", "vendor_id": 0x256F, "product_string": None},
]


class HidDevice:
    """As hidapi's: a report is a list of numbers, an empty one if none came in time."""

    def __init__(self, hid: Hid) -> None:
        self._hid = hid

    def open_path(self, path: bytes) -> None:
        if self._hid.refuses:
            raise OSError("open failed")
        self._hid.opened.append(path)

    def read(self, max_length: int, timeout_ms: int) -> list[int]:
        assert timeout_ms > 0, "0 waits for ever"
        if not self._hid.reports:
            raise OSError("read error")
        return list(self._hid.reports.pop(0)[:max_length])

    def close(self) -> None:
        self._hid.closed += 1


class Hid(ModuleType):
    """In the place of hidapi's module, which is optional."""

    def __init__(self, *connected: dict[str, Any]) -> None:
        super().__init__("hid")
        self.connected = connected
        self.reports: list[bytes] = []
        self.opened: list[bytes] = []
        self.closed = 0
        self.refuses = False

    def enumerate(self) -> list[dict[str, Any]]:
        return list(self.connected)

    def device(self) -> HidDevice:
        return HidDevice(self)


def with_hidapi(monkeypatch: pytest.MonkeyPatch, *connected: dict[str, Any]) -> Hid:
    hid = Hid(*connected)
    monkeypatch.setitem(sys.modules, "hid", hid)
    return hid


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What this process reads its keys from; the other end of it."""
    other, ours = os.openpty()
    with open(ours) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield other
    os.close(other)


def test_the_first_spacemouse_among_other_devices_is_read_report_by_report(monkeypatch: pytest.MonkeyPatch) -> None:
    hid = with_hidapi(monkeypatch, *OTHERS, SPACEMOUSE, {**SPACEMOUSE, "path": b"/dev/hidraw4"})
    hid.reports = [CAP, b""]
    source = SpaceMouseSource()
    assert hid.opened == [b"/dev/hidraw3"]
    assert source.read() == CAP, "all of the longest report"
    assert source.read() == b""
    with pytest.raises(OSError, match="read error"):
        source.read()
    source.close()
    assert hid.closed == 1


def test_logitechs_spacenavigator_is_a_spacemouse(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"path": b"/dev/hidraw5", "vendor_id": 0x046D, "product_string": "SpaceNavigator"}
    hid = with_hidapi(monkeypatch, *OTHERS, older)
    SpaceMouseSource().close()
    assert hid.opened == [b"/dev/hidraw5"]


def test_every_source_opens_its_own_device_and_reads_it_in_its_own_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: int
) -> None:
    with_hidapi(monkeypatch, SPACEMOUSE).reports = [CAP]
    (tmp_path / "js0").write_bytes(js_event(-32767, 2, 1))
    monkeypatch.setattr(gamepad, "DEVICE", tmp_path / "js0")
    expected: dict[InterventionSource, list[float]] = {
        "spacemouse": [0, 1.0, 0, 0, 0, 0],
        "gamepad": [-1.0, 0, 0, 0, 0, 0],
        "keyboard": [0, 0, 1.0, 0, 0, 0],
    }
    for name, command in expected.items():
        source, state = _open_device(name, 0.3)
        os.write(terminal, b"r")  # what was typed before counts for nothing
        assert fed(state, source.read()) == command, name
        source.close()


def interventions(source: str) -> config.Interventions:
    return PARAMS.rlpd.interventions.model_copy(update={"source": source})


@pytest.mark.parametrize("source", ["none", "scripted", "browser"])
def test_where_nobody_has_an_input_device_none_is_looked_for(source: str) -> None:
    check_device(interventions(source), in_run=True)


def test_a_run_without_a_terminal_is_refused_the_keyboard_and_a_plan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (sys.stdin, None):
        monkeypatch.setattr("sys.stdin", stdin)
        check_device(interventions("keyboard"), in_run=False)
        with pytest.raises(DeviceError, match="this process has none") as refused:
            check_device(interventions("keyboard"), in_run=True)
        assert "run nightshift in a terminal" in refused.value.next_step


def test_a_terminal_is_left_as_it_was(terminal: int) -> None:
    before = termios.tcgetattr(sys.stdin)
    check_device(interventions("keyboard"), in_run=True)
    assert termios.tcgetattr(sys.stdin) == before


@pytest.mark.parametrize("in_run", [False, True])
def test_a_gamepad_that_is_not_connected_is_missed_before_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_run: bool
) -> None:
    monkeypatch.setattr(gamepad, "DEVICE", tmp_path / "js0")
    with pytest.raises(DeviceError, match="the gamepad cannot be opened") as refused:
        check_device(interventions("gamepad"), in_run=in_run)
    assert "connect it" in refused.value.next_step
    (tmp_path / "js0").touch()
    check_device(interventions("gamepad"), in_run=in_run)


@pytest.mark.parametrize("in_run", [False, True])
def test_a_spacemouse_that_is_not_connected_and_a_missing_hidapi_are_missed_before_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, in_run: bool
) -> None:
    monkeypatch.setitem(sys.modules, "hid", None)  # as if it were not installed
    with pytest.raises(DeviceError, match="hidapi, which is not installed here") as refused:
        check_device(interventions("spacemouse"), in_run=in_run)
    assert "pip install -e '.[teleop]'" in refused.value.next_step
    with_hidapi(monkeypatch, *OTHERS)
    with pytest.raises(DeviceError, match="no SpaceMouse is connected"):
        check_device(interventions("spacemouse"), in_run=in_run)
    hid = with_hidapi(monkeypatch, *OTHERS, SPACEMOUSE)
    check_device(interventions("spacemouse"), in_run=in_run)
    assert len(hid.opened) == hid.closed == in_run


def test_a_spacemouse_that_cannot_be_opened_is_refused_in_a_run_and_not_while_another_process_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_hidapi(monkeypatch, SPACEMOUSE).refuses = True
    check_device(interventions("spacemouse"), in_run=False)
    with pytest.raises(DeviceError, match="the SpaceMouse /dev/hidraw3 cannot be opened: open failed") as refused:
        check_device(interventions("spacemouse"), in_run=True)
    assert "udev" in refused.value.next_step
