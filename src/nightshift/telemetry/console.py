"""The terminal: one place that writes to it."""

from __future__ import annotations

from rich.console import Console

_IN_A_LOG = 100
"""Columns where there is no terminal to ask."""

console = Console(highlight=False)
if not console.is_terminal:
    console.width = _IN_A_LOG
errors = Console(stderr=True, highlight=False, soft_wrap=True)
