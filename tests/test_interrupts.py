"""Signals that come in the middle of a write are handled after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

from nightshift import interrupts
from nightshift.errors import RolloutError
from nightshift.interrupts import deferred

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", STOPPING)
def test_sigterm_and_a_closed_terminal_stop_a_command_as_ctrl_c_does(number: signal.Signals) -> None:
    interrupts.handle()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.usefixtures("_handlers")
def test_a_command_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.handle()
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


class TerminationSignal(BaseException):
    """As Prefect's handler raises it."""


def as_prefect_does(_: int, __: FrameType | None) -> None:
    raise TerminationSignal


class SignalledWhenDropped:
    """Python ignores what is raised in its destructor."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("prefect", [False, True], ids=["ours", "Prefect's"])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], prefect: bool
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    interrupts.handle()
    if prefect:
        signal.signal(signal.SIGTERM, as_prefect_does)
    with pytest.raises(TerminationSignal if prefect else KeyboardInterrupt):
        dropped = SignalledWhenDropped()
        del dropped
        time.sleep(60)
    assert capfd.readouterr().err == "", "no traceback"


SIGNALLED_IN_A_SERIALIZER = """
import os, signal
from nightshift.cli import app
from pydantic import BaseModel, model_serializer

class Signalled(BaseModel):
    @model_serializer
    def serialize(self):
        os.kill(os.getpid(), signal.SIGTERM)

app.app = lambda: Signalled().{dump}()
app.main()
"""


@pytest.mark.parametrize("dump", ["model_dump", "model_dump_json"])
def test_a_signal_that_pydantic_turns_into_an_error_stops_a_command_as_any_other(dump: str) -> None:
    code = SIGNALLED_IN_A_SERIALIZER.format(dump=dump)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped; run again to resume\n")


class Exits(BaseModel):
    """As Ray's handler of SIGTERM does."""

    @model_serializer
    def serialize(self) -> None:
        sys.exit(signal.SIGTERM)


@pytest.mark.parametrize("dump", ["model_dump", "model_dump_json"])
def test_an_exit_by_a_signal_that_pydantic_turns_into_an_error_is_seen(dump: str) -> None:
    with pytest.raises(PydanticSerializationError) as raised:
        getattr(Exits(), dump)()
    assert interrupts.caused(raised.value)


def worker_was_stopped() -> Exception:
    return RolloutError("a worker ended: KeyboardInterrupt", "look at its log")


def a_library_gave_up() -> Exception:
    error = ValueError("cannot parse")
    error.__context__ = SystemExit(2)
    return error


def test_an_error_that_is_its_own_cause_has_no_signal_behind_it() -> None:
    error = ValueError("no port")
    error.__cause__ = error
    assert not interrupts.caused(error)


@pytest.mark.parametrize("error", [ValueError("the disk is full"), worker_was_stopped(), a_library_gave_up()], ids=str)
def test_an_error_that_a_signal_did_not_cause_is_none_of_one(error: Exception) -> None:
    assert not interrupts.caused(error)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_in_the_block_is_handled_once_after_it(number: signal.Signals) -> None:
    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    done: list[str] = []

    @deferred()
    def write() -> None:
        done.append("begun")
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        done.append("written")

    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
        assert done == ["begun", "written"]
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


def test_other_threads_run_as_they_are() -> None:
    done: list[bool] = []

    @deferred()
    def write() -> None:
        done.append(True)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert done == [True]


SIGNALLED_AT_EXIT = """
import atexit, os, signal, time
from nightshift import interrupts

def cut_off():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)

def clean_up():
    time.sleep(1)
    print("cleaned up")

interrupts.handle()
atexit.register(clean_up)
atexit.register(cut_off)
"""


def test_a_signal_in_an_exit_handler_does_not_cut_off_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_AT_EXIT], capture_output=True, text=True, check=True)
    assert done.stdout == "cleaned up\n"
