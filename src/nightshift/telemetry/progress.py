"""Progress that a person can watch: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_console = Console(stderr=True)
_LINE_EVERY_SECONDS = 15.0

Advance = Callable[[str], None]
"""Call after each unit of work, with a few words on how it goes."""


@contextlib.contextmanager
def bar(description: str, total: int, done: int = 0) -> Iterator[Advance]:
    watch = _terminal_bar if _console.is_terminal else _log_lines
    with watch(description, total, done) as advance:
        yield advance


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
