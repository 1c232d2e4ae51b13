"""Imported last by the process that others are forked from: a garbage collection in a fork would copy all that was
imported."""

from __future__ import annotations

import gc

gc.freeze()
