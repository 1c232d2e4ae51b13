"""LiberoEnv: determinism, refusals, and the manners of importing LIBERO."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nightshift.envs import versions
from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.suites import ASSETS_VARIABLE, BENCHMARK_SUITES, LIBERO_GOAL, LIBERO_OBJECT
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.types import Array, Observation

SOURCE = Path(__file__).parents[2] / "src"
LIFT, STACK = 0, 4
ACTION_DIM = LIBERO_MINI.action_space.size


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    made = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[STACK])
    yield made
    made.close()


def random_actions(seed: int, count: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, ACTION_DIM).astype(np.float32) for _ in range(count)]


def play(env: LiberoEnv, init_state: int, actions: list[Array]) -> list[Observation]:
    return [env.reset("train", init_state), *(env.step(action).observation for action in actions)]


def assert_identical(one: list[Observation], other: list[Observation]) -> None:
    for before, after in zip(one, other, strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def in_fresh_process(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", ASSETS_VARIABLE)}
    for name in ("LIBERO_CONFIG_PATH", "NUMBA_CACHE_DIR", "MPLCONFIGDIR"):
        kept.pop(name, None)
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "dvc.yaml").touch()
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env={**kept, "HOME": str(home), "PYTHONPATH": str(SOURCE), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_reset_and_replay_is_bit_identical(env: LiberoEnv) -> None:
    actions = random_actions(0, 25)
    first = play(env, 3, actions)
    play(env, 4, random_actions(1, 13))
    assert_identical(first, play(env, 3, actions))


def test_a_new_environment_replays_an_old_ones_steps_bit_identically(env: LiberoEnv) -> None:
    actions = random_actions(2, 15)
    play(env, 9, random_actions(3, 5))
    assert_identical(play(env, 5, actions), play(LIBERO_MINI.make_env(env.task), 5, actions))


def test_building_an_environment_leaves_numpys_global_generator_alone() -> None:
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    LIBERO_MINI.make_env(LIBERO_MINI.tasks()[LIFT]).reset("train", 0)
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_observations_have_the_same_shapes_for_every_task() -> None:
    for task in LIBERO_MINI.tasks():
        observation = dict(LIBERO_MINI.make_env(task).reset("eval", 0))
        instruction = observation.pop("instruction")
        assert {name: (value.shape, value.dtype.name) for name, value in observation.items()} == {
            "egocentric": ((13,), "float32"),
            "objects": ((25,), "float32"),
            "proprio": ((8,), "float32"),
            "state": ((8,), "float32"),
            "task": ((6,), "float32"),
        }
        assert str(instruction) == task.language


def test_actions_beyond_the_range_act_like_clipped_ones(env: LiberoEnv) -> None:
    wild = [3 * action for action in random_actions(6, 5)]
    assert_identical(play(env, 1, wild), play(env, 1, [np.clip(action, -1, 1) for action in wild]))


def test_stepping_past_any_horizon_is_allowed(env: LiberoEnv) -> None:
    """The reference goes through robosuite's own step, which counts and refuses one after the end."""
    reference = LIBERO_MINI.make_env(env.task, compiled=False)
    reference.reset("train", 0)
    reference._domain.timestep = 2**31
    for _ in range(2):
        assert not reference.step(np.zeros(ACTION_DIM, np.float32)).success


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_action_is_refused_with_task_and_step(env: LiberoEnv, bad: float) -> None:
    env.reset("train", 0)
    env.step(np.zeros(ACTION_DIM, np.float32))
    with pytest.raises(SimulatorError, match="stack_red_on_blue, step 2"):
        env.step(np.full(ACTION_DIM, bad, np.float32))


def test_action_of_the_wrong_shape_is_refused(env: LiberoEnv) -> None:
    env.reset("train", 0)
    with pytest.raises(SimulatorError, match="7 finite numbers"):
        env.step(np.zeros(6, np.float32))


def test_init_state_out_of_range_is_refused_with_the_range(env: LiberoEnv) -> None:
    with pytest.raises(SimulatorError, match="from 0 to 249"):
        env.reset("eval", 250)
    with pytest.raises(SimulatorError, match="no train init state -1"):
        env.reset("train", -1)


def test_exploding_physics_is_reported_with_task_and_step(env: LiberoEnv) -> None:
    env.reset("train", 0)
    env._data.qvel[:] = 1e12
    with pytest.raises(SimulatorError, match="stack_red_on_blue, step 1: the physics became unstable"):
        env.step(np.zeros(ACTION_DIM, np.float32))
    env.reset("train", 0)
    env.step(np.zeros(ACTION_DIM, np.float32))


def test_unknown_task_is_refused_with_the_available_ones(env: LiberoEnv) -> None:
    wrong = type(env.task)(suite="libero_mini", name="fly", language="", index=0, suite_size=6)
    with pytest.raises(SimulatorError, match="lift_cube"):
        LIBERO_MINI.make_env(wrong)


def test_versions_name_what_the_physics_depends_on() -> None:
    found = versions("libero_mini")
    assert set(found) == {"mujoco", "robosuite", "libero", "nightshift"}
    assert found["mujoco"].startswith("3.3.")


def test_a_picture_is_256_square_or_none(env: LiberoEnv) -> None:
    env.reset("train", 0)
    picture = env.render()
    assert picture is None or (picture.shape == (256, 256, 3) and picture.std() > 10)


def test_real_suites_have_liberos_tasks_in_liberos_order() -> None:
    sizes = {suite.name: len(suite.tasks()) for suite in BENCHMARK_SUITES}
    assert sizes == {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
    assert LIBERO_GOAL.tasks()[0].name == "open_the_middle_drawer_of_the_cabinet"


def test_missing_assets_error_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SimulatorError) as caught:
        LIBERO_OBJECT.make_env(LIBERO_OBJECT.tasks()[0])
    assert ASSETS_VARIABLE in str(caught.value)
    assert "hf download lerobot/libero-assets" in str(caught.value)


def test_assets_folder_without_assets_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(tmp_path))
    with pytest.raises(SimulatorError, match=str(tmp_path)):
        LIBERO_OBJECT.make_env(LIBERO_OBJECT.tasks()[0])


@pytest.mark.slow
@pytest.mark.usefixtures("env")
def test_importing_libero_never_prompts_and_writes_only_under_state(tmp_path: Path) -> None:
    compiled = tmp_path / "project" / ".state" / "libero" / "numba"  # as after the first run: compiling takes long
    shutil.copytree(os.environ["NUMBA_CACHE_DIR"], compiled)
    code = (
        "from nightshift.envs.mini.suite import LIBERO_MINI\n"
        "env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])\n"
        "env.reset('train', 0)\n"
        "from nightshift.envs.libero.suites import LIBERO_10\n"
        "LIBERO_10.tasks()\n"
        "import os\n"
        "assert os.environ['NUMBA_CACHE_DIR'] == os.path.abspath('.state/libero/numba')\n"
    )
    log = Path("/tmp/robosuite.log")
    before = log.stat().st_mtime if log.exists() else None
    result = in_fresh_process(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("", "")
    assert list((tmp_path / "home").rglob("*")) == []
    assert {path.name for path in (tmp_path / "project").iterdir()} == {".state", "dvc.yaml"}
    assert (log.stat().st_mtime if log.exists() else None) == before


@pytest.mark.slow
@pytest.mark.usefixtures("env")
def test_stepping_works_and_rendering_gives_none_without_a_gl_library(tmp_path: Path) -> None:
    code = (
        "import ctypes.util\n"
        "find = ctypes.util.find_library\n"
        "ctypes.util.find_library = lambda name: None if name in ('EGL', 'OSMesa', 'GL') else find(name)\n"
        "import numpy as np\n"
        "from nightshift.envs.mini.suite import LIBERO_MINI\n"
        "env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])\n"
        "env.reset('train', 0)\n"
        "env.step(np.zeros(7, np.float32))\n"
        "assert env.render() is None\n"
    )
    result = in_fresh_process(code, tmp_path, NUMBA_CACHE_DIR=os.environ["NUMBA_CACHE_DIR"])  # compiling takes seconds
    assert (result.returncode, result.stderr) == (0, "")


def test_missing_simulator_package_error_says_how_to_install_it(tmp_path: Path) -> None:
    code = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'libero' else find(name, *rest)\n"
        "from nightshift.envs.mini.suite import LIBERO_MINI\n"
        "LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])\n"
    )
    assert "pip install --no-deps hf-libero" in in_fresh_process(code, tmp_path).stderr


def test_missing_dependency_of_the_simulator_is_named(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['easydict'] = None\n"
        "from nightshift.envs.mini.suite import LIBERO_MINI\n"
        "LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])\n"
    )
    message = in_fresh_process(code, tmp_path).stderr
    assert "SimulatorError: the simulator cannot be imported: import of easydict" in message


def test_unwritable_state_folder_is_a_project_error(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".state").write_text("a file where the folder should be")
    code = "from nightshift.envs.libero.setup import prepare\nprepare()\n"
    assert "ProjectError" in in_fresh_process(code, tmp_path).stderr
