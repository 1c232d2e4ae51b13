"""The control step is compiled by one process of a machine; the others load what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.envs.libero import cameras as drawing
from nightshift.envs.libero.compiling import discard_other_code
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import DEFAULT

_COMPILE = """
from nightshift.envs.libero.compiling import compile_control_step
compile_control_step()
from nightshift.envs.libero.chunks import play
from nightshift.envs.libero.goal import judge
from nightshift.envs.libero.observations import _write
from nightshift.envs.libero.osc import advance
stats = [f.stats for f in (advance, _write, judge, play)]
print(*(sum(counts.values()) for s in stats for counts in (s.cache_hits, s.cache_misses)))
"""
COMPILED, LOADED = "0 1 0 1 0 1 0 1\n", "1 0 1 0 1 0 1 0\n"
"""Hits and misses of numba's cache, of the four functions."""


def start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-c", _COMPILE], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_two_processes_that_start_at_once_exactly_one_compiles(tmp_path: Path) -> None:
    both = [start(tmp_path / "cache") for _ in range(2)]
    assert sorted(process.communicate()[0] for process in both) == [COMPILED, LOADED]


def test_what_is_compiled_ahead_is_what_simulations_call() -> None:
    """Other types would be compiled again, by every process for itself."""
    fleet = LIBERO_MINI.make_fleet(LIBERO_MINI.tasks()[0])
    fleet.reset("train", [0, 1])
    fleet.step(np.zeros((2, LIBERO_MINI.action_space.size), np.float32), np.array([True, False]))
    from nightshift.envs.libero.chunks import play
    from nightshift.envs.libero.goal import judge
    from nightshift.envs.libero.observations import _write
    from nightshift.envs.libero.osc import advance

    assert [len(compiled.signatures) for compiled in (advance, _write, judge, play)] == [1, 1, 1, 1]


@pytest.mark.skipif(not drawing.works(), reason="no GL library works here")
def test_what_is_compiled_ahead_is_what_images_need() -> None:
    cameras = config.Cameras(names=("wrist",), size=64, shadows=True)
    fleet = LIBERO_MINI.make_fleet(LIBERO_MINI.tasks()[0], DEFAULT, cameras)
    fleet.reset("train", [0, 1])
    fleet.look(np.arange(2), ["wrist"])
    from nightshift.envs.libero.averaging import average
    from nightshift.envs.libero.pyramids import mark_seen

    assert [len(compiled.signatures) for compiled in (average, mark_seen)] == [1, 1]


def test_code_that_was_compiled_with_other_versions_of_its_callees_is_discarded(tmp_path: Path) -> None:
    """numba itself would load `chunks.play` after a change of osc.py."""
    discard_other_code(tmp_path)
    current = tmp_path / "chunks.play-1.nbi"
    current.touch()
    discard_other_code(tmp_path)
    assert current.exists()
    (tmp_path / "sources.sha256").write_text("of other files")
    discard_other_code(tmp_path)
    assert not current.exists()


def test_nothing_is_compiled_ahead_for_the_fake_suite() -> None:
    assert envs.suite("fake").compile_command() is None
    assert LIBERO_MINI.compile_command() == [sys.executable, "-m", "nightshift.envs.libero.compiling"]
