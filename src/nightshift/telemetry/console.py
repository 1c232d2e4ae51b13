"""The terminal: one place that writes to it."""

from __future__ import annotations

import logging

from rich.console import Console

_IN_A_LOG = 100
"""Columns where there is no terminal to ask."""

console = Console(highlight=False)
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
