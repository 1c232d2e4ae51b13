"""Makes LIBERO and robosuite importable without prompts, output, downloads or writes outside the project.

LIBERO asks on stdin when its config file is missing, robosuite logs to /tmp and insists on a GL library, numba
and matplotlib write caches to the home folder. `prepare` settles all of that before the first import.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.util
import io
import os
import sys
import types
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nightshift import files
from nightshift.errors import SimulatorError
from nightshift.project.paths import DVC_YAML, LIBERO_CONFIG

INSTALL = "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0"
NO_GL = "apt-get install libosmesa6 (or libegl1 with a GPU's driver), or set MUJOCO_GL to egl or osmesa"


def config_folder() -> Path:
    """For LIBERO's config file and the caches of its libraries: the project's, or the user's on a node without one."""
    if DVC_YAML.is_file():
        return LIBERO_CONFIG.absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nightshift"


@cache
def prepare() -> None:
    """Run once per process, before anything imports libero, robosuite or mujoco's renderer."""
    folder = config_folder()
    _write_config(folder / "config.yaml", package_folder("libero") / "libero")
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    use_project_caches()
    os.environ.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))
    os.environ.setdefault("MUJOCO_GL", gl_backend())
    _preload_robosuite_macros(package_folder("robosuite"))
    try:
        with quiet():
            import libero.libero.envs  # noqa: F401 - importable only after the lines above
    except ImportError as error:
        raise SimulatorError(f"the simulator cannot be imported: {error}", "pip install -e .") from error


def use_project_caches() -> None:
    """Call it before numba is imported."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(config_folder() / "numba"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """LIBERO prints and warns on import and on construction; nothing of it concerns the user."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trim_memory() -> None:
    """Compiling the robot's meshes leaves about 100 MB of freed memory in glibc; return it to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def package_folder(name: str) -> Path:
    """Where an installed package lies, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SimulatorError(f"the simulator package {name!r} is not installed", INSTALL)
    return Path(next(iter(spec.submodule_search_locations)))


def _write_config(path: Path, package: Path) -> None:
    entries = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": path.parent / "datasets",
        "assets": path.parent / "assets",
    }
    text = "".join(f"{key}: {str(value)!r}\n" for key, value in entries.items())
    if not path.exists() or path.read_text() != text:
        files.write_bytes(path, text.encode())


def gl_backend() -> str:
    """MUJOCO_GL if set; else what is there, egl before osmesa on a machine with a GPU; "disable" if nothing is."""
    if chosen := os.environ.get("MUJOCO_GL"):
        return chosen
    has_gpu = Path("/dev/nvidia0").exists() or Path("/dev/dri").exists()
    order = ("egl", "osmesa") if has_gpu else ("osmesa", "egl")
    library = {"egl": "EGL", "osmesa": "OSMesa"}
    return next((name for name in order if ctypes.util.find_library(library[name])), "disable")


def _preload_robosuite_macros(package: Path) -> None:
    """robosuite reads its settings while it is imported: put ours in place first.

    Without them it warns about a missing private macro file, appends to /tmp/robosuite.log and requires EGL.
    """
    if "robosuite" in sys.modules:
        return
    sys.modules["robosuite.macros_private"] = types.ModuleType("robosuite.macros_private")
    spec = importlib.util.spec_from_file_location("robosuite.macros", package / "macros.py")
    if spec is None or spec.loader is None:
        raise SimulatorError(f"robosuite at {package} has no macros.py", "pip install --no-deps robosuite==1.4.0")
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    vars(macros).update(FILE_LOGGING_LEVEL=None, CONSOLE_LOGGING_LEVEL="ERROR", MUJOCO_GPU_RENDERING=False)
    sys.modules["robosuite.macros"] = macros
