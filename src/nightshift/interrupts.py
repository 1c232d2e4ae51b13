"""Ctrl-C, SIGTERM and a closed terminal: all three stop a process the same way, and some work they wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_STOP = 15.0
"""A process that was told to stop saves and ends by itself; one that is still there after this is ended."""
_SECONDS_UNTIL_AGAIN = 0.1
_RAISED_BY_PREFECT = "TerminationSignal"
"""By its handler of SIGTERM, which replaces ours while a flow runs."""
_RAISED_BY_PYDANTIC = "PydanticSerializationError"


def handle() -> None:
    """Have each of the signals raise KeyboardInterrupt in the main thread."""
    for number in _SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
            continue
        signal.signal(number, _interrupt)  # also SIGINT: a shell's background job starts with it ignored
    sys.unraisablehook = _send_again


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _send_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Python drops what a handler raises in the middle of a destructor or a weak reference's callback, and the signal
    would be lost with it: send it again when that is over. In exit handlers it would cut off one after the other."""
    signalled = unraisable.exc_type is KeyboardInterrupt or unraisable.exc_type.__name__ == _RAISED_BY_PREFECT
    if not signalled or not threading.main_thread().is_alive():
        sys.__unraisablehook__(unraisable)
        return
    again = threading.Timer(_SECONDS_UNTIL_AGAIN, os.kill, (os.getpid(), signal.SIGTERM))
    again.daemon = True
    again.start()


def caused(error: BaseException) -> bool:
    """Whether a signal is behind the error: pydantic turns what a handler raises in a serializer into an error of its
    own, and where it serializes to JSON only the text of that still names it. The text of any other error may quote a
    process that was stopped, which is no reason to be stopped too."""
    return any(
        _raised_by_a_handler(each) or (type(each).__name__ == _RAISED_BY_PYDANTIC and _names_one(str(each)))
        for each in chain(error)
    )


def chain(error: BaseException) -> list[BaseException]:
    """The error and those that it came from. Some are their own cause: `raise error from error`."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def _raised_by_a_handler(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code == signal.SIGTERM  # as Ray's handler exits while it starts
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == _RAISED_BY_PREFECT


def _names_one(text: str) -> bool:
    return any(name in text for name in (KeyboardInterrupt.__name__, SystemExit.__name__, _RAISED_BY_PREFECT))


def end_with(parent: int) -> None:
    """Stop this process when its parent is gone, however that ended: as SIGTERM does, and after a while for certain."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_STOP)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Signals that come in the block are handled after it. For short work that leaves something half-done when its
    handler raises: an exception in the middle of a transaction keeps a SQLite database locked."""
    if threading.current_thread() is not threading.main_thread():  # only there do handlers run
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    mine = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in mine:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
