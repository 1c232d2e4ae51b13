"""Whether LIBERO simulates and renders on this machine, for `nightshift env check`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nightshift.envs.base import Finding
from nightshift.envs.libero.setup import NO_GL, gl_backend, prepare
from nightshift.errors import SimulatorError


def findings() -> Iterator[Finding]:
    try:
        prepare()
    except SimulatorError as error:
        yield Finding(about="simulator", found=error.what, verdict="missing", remedy=error.next_step)
        return
    yield _gl()
    yield _compiled_step()


def _gl() -> Finding:
    from nightshift.envs.libero import cameras

    if cameras.works():
        return Finding(about="GL", found=f"{gl_backend()} renders")
    return Finding(about="GL", found=f"{gl_backend()}: no pictures, no films", verdict="note", remedy=NO_GL)


def _compiled_step() -> Finding:
    """numba caches it once per project, in a folder that begins with the name of osc.py's folder."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    if any(folder.glob(f"{Path(__file__).parent.name}_*/osc.advance-*.nbc")):
        return Finding(about="compiled step", found=f"cached in {folder}")
    return Finding(about="compiled step", found="the first run compiles it, in about 20 s", verdict="note")
