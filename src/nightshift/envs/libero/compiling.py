"""Compiles the control step (osc.py), observations, the judging of goals and what images need once per machine.

    process A   lock ── compile (half a minute) ── write numba's cache ── unlock
    process B     └──────────────── wait ───────────────────────────────── load (a second)

`python -m nightshift.envs.libero.compiling` does it without building a simulation: `nightshift run` starts that beside
Prefect's server, so that simulator processes only load.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from filelock import FileLock

from nightshift import files
from nightshift.envs.libero.setup import use_project_caches

LOCK = "compile.lock"
_COMPILED = ("osc", "observations", "goal", "chunks", "averaging", "pyramids")


@cache
def compile_control_step() -> None:
    """Compile or load the functions for the types that simulations pass, one process at a time."""
    use_project_caches()
    from numba import boolean, float32, float64, int32, int64, types, uint8

    from nightshift.envs.libero.averaging import average
    from nightshift.envs.libero.chunks import play
    from nightshift.envs.libero.goal import judge
    from nightshift.envs.libero.observations import _write
    from nightshift.envs.libero.osc import advance
    from nightshift.envs.libero.pyramids import mark_seen

    vector, matrix = float64[::1], float64[:, ::1]
    indices, joints, rows, shown = int64[::1], int32[::1], int64[:, ::1], float32[:, ::1]
    control = (indices, vector, rows, joints, joints, indices, matrix, indices, matrix, matrix, vector, float64)
    goal, flags = (indices, rows, matrix), (boolean[::1], boolean[::1])
    both = types.Tuple(control), types.Tuple(goal)  # type: ignore[no-untyped-call]
    view = (types.Tuple((matrix, matrix, indices, matrix)), types.Tuple((vector, vector, float64)))  # type: ignore[no-untyped-call]
    mirror = types.Tuple((int64, vector))  # type: ignore[no-untyped-call]
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK):
        assert play.stats.cache_path is not None
        discard_other_code(Path(play.stats.cache_path))
        advance.compile((rows, matrix, int64, *control))
        _write.compile((rows, indices, indices, indices, rows, int64, shown, shown, shown, shown))
        judge.compile((rows, indices, *goal, *flags))
        average.compile((uint8[:, :, :, ::1], int64, uint8[:, :, :, ::1]))
        mark_seen.compile((boolean[::1], *view, mirror))
        play.compile((rows, rows, float64[:, :, ::1], int64, *both, indices, *flags))


def discard_other_code(folder: Path) -> None:
    """Remove what was compiled from other versions of the files that belong together.

    numba compares the file of a function with its cache, but not the files of the functions that it calls.
    """
    sources = [Path(__file__).with_name(f"{module}.py").read_bytes() for module in _COMPILED]
    digest = hashlib.sha256(b"".join(sources)).hexdigest()
    stamp = folder / "sources.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return
    for compiled in folder.glob("*.nb[ic]"):
        compiled.unlink()
    files.write_bytes(stamp, digest.encode())


if __name__ == "__main__":
    compile_control_step()
