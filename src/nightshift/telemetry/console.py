"""The terminal: one place that writes to it."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from rich.console import Console

_IN_A_LOG = 100
"""Columns where there is no terminal to ask."""

PIPE_CLOSED = 141
"""Exit code of a command whose reader (`| head`) has seen enough, as a shell gives it to any tool."""


def end_quietly() -> NoReturn:
    """Nobody reads standard output any more. Python's last flush goes to nowhere, so it does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(PIPE_CLOSED)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        end_quietly()


console = _Output(highlight=False)
if not console.is_terminal:
    console.width = _IN_A_LOG
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        errors.print(f"{record.levelname.lower()}: {self.format(record)}", markup=False)


_warnings = _Warnings(logging.WARNING)


def show_warnings() -> None:
    """Print our own log's warnings, a line each: Prefect's handlers would drop them where we silence its output."""
    logging.getLogger("nightshift").addHandler(_warnings)
