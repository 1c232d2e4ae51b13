"""Progress that a person can watch: a bar on a terminal, a line now and then in a log, and what else listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_console = Console(stderr=True)
_LINE_EVERY_SECONDS = 15.0

Advance = Callable[[str], None]
"""Call after each unit of work, with a few words on how it goes."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Example: Update(what="rloo", done=3, total=12, note="success 43%, kl 0.051", seconds_left=80.0)"""

    what: str
    done: int
    total: int
    note: str
    seconds_left: float
    """At the pace so far."""


Listener = Callable[[Update], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have the listener called after each unit of work of the bars in this block. It must return at once."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def bar(description: str, total: int, done: int = 0) -> Iterator[Advance]:
    watch = _terminal_bar if _console.is_terminal else _log_lines
    with watch(description, total, done) as advance:
        listener = _listener.get()
        yield _telling(listener, advance, description, total, done) if listener else advance


def _telling(listener: Listener, advance: Advance, what: str, total: int, before: int) -> Advance:
    """Advance, and tell the listener."""
    started = time.monotonic()
    done = before

    def tell(note: str) -> None:
        nonlocal done
        done += 1
        advance(note)
        pace = (time.monotonic() - started) / (done - before)
        listener(Update(what=what, done=done, total=total, note=note, seconds_left=pace * (total - done)))

    return tell


@contextlib.contextmanager
def _terminal_bar(description: str, total: int, done: int) -> Iterator[Advance]:
    columns = (
        TextColumn("  {task.description:<9}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=_console, transient=True) as progress:
        task = progress.add_task(description, total=total, completed=done, note="")
        yield lambda note: progress.update(task, advance=1, note=note)


@contextlib.contextmanager
def _log_lines(description: str, total: int, done: int) -> Iterator[Advance]:
    last = time.monotonic()
    count = done

    def advance(note: str) -> None:
        nonlocal last, count
        count += 1
        if count == total or time.monotonic() - last > _LINE_EVERY_SECONDS:
            last = time.monotonic()
            _console.print(f"  {description:<9} {count}/{total}  {note}", highlight=False)

    yield advance
