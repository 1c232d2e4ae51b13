"""libero_40: the four suites that papers report, as one."""

from typing import Any

import pytest

from nightshift import config, envs
from nightshift.cli import env_commands
from nightshift.envs.libero.suites import LIBERO_10, LIBERO_40, LIBERO_GOAL, LIBERO_OBJECT, LIBERO_SPATIAL
from nightshift.envs.perturbations import paraphrases
from tests.envs.test_suites import check, needs_assets

PARTS = (LIBERO_SPATIAL, LIBERO_OBJECT, LIBERO_GOAL, LIBERO_10)


def selected(**changes: Any) -> config.Env:
    chosen = {"suite": "libero_40", "tasks": (), "protocol": "openvla-oft", "horizon": "auto"}
    cameras = {"names": ("agentview",), "size": "auto", "shadows": True}
    return config.Env.model_validate({**chosen, "cameras": cameras, **changes})


def test_it_has_the_tasks_of_the_four_suites_in_their_order() -> None:
    theirs = [(task.name, task.language) for part in PARTS for task in part.tasks()]
    assert [(task.name, task.language) for task in LIBERO_40.tasks()] == theirs
    assert [task.index for task in LIBERO_40.tasks()] == list(range(40))
    assert len({name for name, _ in theirs}) == 40, "a name alone says which task is meant"


def test_a_task_has_the_description_and_the_evaluation_states_of_its_own_suite() -> None:
    joint = {task.name: task for task in LIBERO_40.tasks()}
    for part in PARTS:
        for task in part.tasks():
            assert LIBERO_40.bddl_file(task.name) == part.bddl_file(task.name)
            assert envs.init_states_digest(joint[task.name], "eval") == envs.init_states_digest(task, "eval")


def test_an_episode_is_as_long_as_in_the_suite_that_its_task_comes_from() -> None:
    published = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520}
    assert envs.horizons(selected()) == published
    for task in LIBERO_40.tasks():
        assert envs.horizon(selected(), task) == published[LIBERO_40.benchmark(task)]
    assert envs.conditions(selected(), ())["horizon"] == published
    assert envs.conditions(selected(horizon=90), ())["horizon"] == 90
    one = selected(tasks=("open_the_middle_drawer_of_the_cabinet",))
    assert envs.conditions(one, ())["horizon"] == 300


def test_its_paraphrases_are_those_of_the_four_suites() -> None:
    found = paraphrases.read("libero_40", None)
    assert found == {task: told for part in PARTS for task, told in paraphrases.read(part.name, None).items()}
    paraphrases.check(found, LIBERO_40.tasks(), 1)


def test_the_command_line_finds_a_task_in_its_own_suite_and_lists_the_joint_one_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env_commands.show("open_the_middle_drawer_of_the_cabinet", "")
    assert "task 0 of libero_goal" in capsys.readouterr().out
    env_commands.list_tasks("")
    printed = capsys.readouterr().out
    assert "those of libero_spatial, libero_object, libero_goal, libero_10" in " ".join(printed.split())
    assert printed.count("open_the_middle_drawer_of_the_cabinet") == 1
    env_commands.list_tasks("libero_40")
    assert capsys.readouterr().out.count("open_the_middle_drawer_of_the_cabinet") == 1


@needs_assets
def test_a_task_builds_resets_and_steps() -> None:
    check(LIBERO_40, LIBERO_40.tasks()[-1], (0,))
