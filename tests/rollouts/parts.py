"""Simulators with cameras on the fake suite, and a plain loop that plays one group, to compare with."""

from __future__ import annotations

from nightshift import config

NO_CAMERAS = config.Cameras(names=(), size=16, shadows=False)
