"""`nightshift env …` as a person sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nightshift.cli import env_commands
from nightshift.envs.libero.setup import prepare
from nightshift.envs.libero.suites import ASSETS_VARIABLE, BENCHMARK_SUITES, LIBERO_10, LIBERO_GOAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.project import paths
from tests.conftest import edit

prepare()  # here and not in a test's folder, so that the numba cache is kept

MIDDLE_DRAWER = "open_the_middle_drawer_of_the_cabinet"


@pytest.fixture(autouse=True)
def _in_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without assets, wherever the test runs."""
    monkeypatch.setenv(ASSETS_VARIABLE, str(project / "nowhere"))


def select(project: Path, **changes: object) -> None:
    edit(project, "env", **{"suite": "libero_mini", "tasks": [], "horizon": 80, **changes})


def unwrapped(printed: str) -> str:
    """Without the line breaks and columns of a narrow terminal."""
    return " ".join(printed.split())


def test_list_names_every_task_of_every_suite_and_whether_it_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    env_commands.list_tasks("")
    printed = capsys.readouterr().out
    for suite in (LIBERO_MINI, *BENCHMARK_SUITES):
        assert all(task.name in printed and task.language in printed for task in suite.tasks())
    assert "libero_goal  10 tasks, assets missing" in printed
    assert "libero_mini  6 tasks, built in" in printed


def test_show_tells_what_a_task_of_any_suite_is_without_its_assets(capsys: pytest.CaptureFixture[str]) -> None:
    env_commands.show(MIDDLE_DRAWER, "")
    printed = capsys.readouterr().out
    for words in (
        "task 0 of libero_goal",
        "open the middle drawer of the cabinet",
        "wooden_cabinet_1_middle_region open",
        "50 for evaluation",
        "none for training yet: nightshift stage states",
        "300 by openvla-oft",
        "320 by rlinf",
        "none: there are no LIBERO simulation assets",
    ):
        assert words in printed


def test_show_writes_a_picture_and_prints_where(capsys: pytest.CaptureFixture[str]) -> None:
    env_commands.show("lift_cube", "libero_mini")
    printed = capsys.readouterr().out
    path = paths.PICTURES / "libero_mini" / "lift_cube.png"
    if "no GL library works" in printed:
        pytest.skip("no GL library works here")
    assert str(path) in printed
    with Image.open(path) as picture:
        assert picture.size == (512, 256)


def test_a_task_that_is_not_there_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(SimulatorError, match="did you mean lift_cube"):
        env_commands.show("lift_cub", "")
    with pytest.raises(SimulatorError, match="no task 'lift_cube' in suite libero_goal"):
        env_commands.show("lift_cube", "libero_goal")


def test_check_passes_where_the_selected_suite_needs_no_assets(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    select(project)
    env_commands.check()
    printed = capsys.readouterr().out
    assert "hf download lerobot/libero-assets" in printed
    assert "libero_mini, which params.yaml selects, can run here" in printed


def test_check_fails_where_the_selected_suite_lacks_its_assets(project: Path) -> None:
    select(project, suite="libero_goal", horizon="auto")
    with pytest.raises(SimulatorError, match="cannot run here: assets"):
        env_commands.check()


def test_check_fails_for_a_horizon_that_no_protocol_has(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    select(project, horizon="auto")
    with pytest.raises(SimulatorError, match=r"cannot run here: params\.yaml"):
        env_commands.check()
    assert "write a number in env.horizon" in capsys.readouterr().out


def test_check_refuses_a_policy_input_that_the_suite_does_not_have(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    select(project)
    edit(project, "policy", inputs=["proprio", "smell"])
    with pytest.raises(SimulatorError, match=r"cannot run here: params\.yaml"):
        env_commands.check()
    printed = unwrapped(capsys.readouterr().out)
    assert "policy.inputs has smell, and the observations are proprio, state" in printed


def test_check_of_an_unknown_suite_says_which_there_are(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    select(project, suite="libero_maxi")
    with pytest.raises(SimulatorError, match=r"cannot run here: params\.yaml"):
        env_commands.check()
    assert "there is no suite 'libero_maxi'; there are libero_mini" in unwrapped(capsys.readouterr().out)


def test_check_finds_the_compiled_step_once_a_simulation_has_stepped(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
    env.reset("eval", 0)
    env.step(np.zeros(env.action_space.size, np.float32))
    select(project)
    env_commands.check()
    assert "cached in" in unwrapped(capsys.readouterr().out)


def test_check_names_a_package_that_is_missing_or_another_version(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    select(project)
    (project / env_commands.REQUIREMENTS).write_text("mujoco==3.2.0  # older\nno-such-simulator==1.0\n")
    with pytest.raises(SimulatorError, match="no-such-simulator"):
        env_commands.check()
    printed = capsys.readouterr().out
    assert "results here are of 3.2.0" in printed
    assert "pip install --no-deps -r requirements-simulator.txt" in printed


def test_every_predicate_that_libero_uses_has_words() -> None:
    suites = (LIBERO_MINI, LIBERO_GOAL, LIBERO_10)
    used = {predicate[0] for suite in suites for task in suite.tasks() for predicate in suite.goal(task)}
    assert used <= set(env_commands.GOALS)
    assert env_commands.in_words(("on", "cube_1", "plate_1")) == "cube_1 on plate_1"
    assert env_commands.in_words(("stacked", "a", "b")) == "stacked(a, b)"
