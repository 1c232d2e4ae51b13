"""Signals that come in the middle of a write are handled after it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from nightshift.interrupts import deferred


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
