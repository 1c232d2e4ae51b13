"""Compiled code is kept in this checkout: each of the tests' projects would compile the control step for itself, which
takes twenty seconds of CPU time. numba reads the variable when it is imported."""

import os
from pathlib import Path

from nightshift.project import paths

os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent.parent / paths.LIBERO_CONFIG / "numba"))
