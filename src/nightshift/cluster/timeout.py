"""When a process that plays or learns counts as stuck."""

from __future__ import annotations

TIMEOUT_SECONDS = 300.0
"""A process without progress for this long hangs. Building and compiling a simulator takes a tenth of it."""
