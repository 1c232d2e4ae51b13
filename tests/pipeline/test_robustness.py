"""`nightshift robustness` on the fake suite: the grid, resuming, pairing, the page, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift import config, envs, files, policies
from nightshift.cli import app, robustness_command
from nightshift.envs.fake import FakeFleet
from nightshift.envs.perturbations import paraphrases, registry
from nightshift.envs.perturbations.actions import ActionNoise
from nightshift.envs.perturbations.base import Perturbation
from nightshift.errors import Busy, ConfigError, DataError, NightshiftError, RobustnessFell, RolloutError
from nightshift.pipeline import robustness
from nightshift.pipeline.report import page, svg
from nightshift.pipeline.report import robustness as robustness_page
from nightshift.pipeline.report.facts import gather
from nightshift.project import locks, paths, robustness_grid
from nightshift.project.robustness_grid import UNPERTURBED
from nightshift.reports import robustness as report
from nightshift.reports.gate import Robustness
from nightshift.reports.robustness import PerturbedOutcome
from nightshift.statistics.intervals import Rate
from nightshift.telemetry.console import console
from nightshift.types import Array
from tests.browser import browser
from tests.command import Command
from tests.compute_node import Node, forking_python, make_site
from tests.conftest import edit, make_project
from tests.pipeline.test_precheck import SEEING
from tests.robots.parts import served
from tests.rollouts.parts import Reaching
from tests.waiting import wait_until

NAMES = ["action_delay", "action_noise", "sensor_noise"]
WIDTHS = (390, 800, 1280, 1920)
HIDDEN = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
"""Tables of which a part is seen only after scrolling."""
LONG_NAME = "models/" + "a_long_name_" * 8


@pytest.fixture
def reaching(project: Path) -> Path:
    """Two policies that solve the tasks: one that heads straight for the goal, and a slow one."""
    edit(project, "robustness", perturbations=NAMES, strengths=[1.0, 5.0], init_states=6, films=1)
    edit(project, "register", max_perturbation_drop=0.1)
    Reaching.leave(project / "models/good", gain=20.0)
    Reaching.leave(project / "models/slow", gain=6.0)
    return project


def journal_lines(root: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in (root / paths.STATE / "robustness").rglob("*.jsonl"))


def test_the_grid_has_every_perturbation_strength_and_task_with_intervals(reaching: Path) -> None:
    found = robustness.evaluate(reaching, "models/good")
    (player,) = found["policies"]
    assert list(player["perturbations"]) == NAMES
    for cells in player["perturbations"].values():
        assert [cell["strength"] for cell in cells] == [1.0, 5.0]
        for cell in cells:
            assert set(cell["tasks"]) == {"near", "far"}
            overall = cell["overall"]
            assert overall["episodes"] == 12
            assert overall == Rate(overall["successes"], 12).to_json()
    assert player["unperturbed"]["overall"]["rate"] == 1.0
    assert player["perturbations"]["sensor_noise"][1]["overall"]["rate"] < 1.0
    assert files.verify_folder(reaching / paths.ROBUSTNESS, "")
    assert found["films"] and (reaching / paths.ROBUSTNESS / found["films"][0]["file"]).exists()


def test_the_caption_of_a_film_says_what_it_cannot_show(reaching: Path) -> None:
    found = robustness.evaluate(reaching, "models/good")
    (film,) = found["films"]
    params = config.load(reaching / paths.PARAMS)
    shown = {}
    for name in ("action_noise", "sensor_noise", "language_instructions"):
        outcome: PerturbedOutcome = {**outcomes(name, 2.0, "f")[0]}
        request = robustness._again(params, outcome)
        robustness_page.write(reaching, {**found, "films": [{**film, **robustness._unseen(request)}]})
        shown[name] = (reaching / paths.ROBUSTNESS_PAGE).read_text().rpartition("<figcaption>")[2]
    told = paraphrases.read("fake", None)["near"][1]
    assert f"Told: “{told}”" in shown["language_instructions"]
    assert "The film shows the scene as it is; the noise is in what the policy reads" in shown["sensor_noise"]
    assert not [name for name in ("action_noise", "sensor_noise") if "Told" in shown[name]]
    assert "The film shows" not in shown["action_noise"] + shown["language_instructions"]
    assert {"told", "is_of_sensors"} <= film.keys()


def test_a_killed_grid_goes_on_with_the_same_numbers(reaching: Path, tmp_path: Path) -> None:
    edit(reaching, "robustness", perturbations=NAMES, strengths=[1.0, 2.0, 3.0, 4.0, 5.0], init_states=8, films=0)
    whole = make_project(tmp_path / "whole")
    (whole / "params.yaml").write_bytes((reaching / "params.yaml").read_bytes())
    Reaching.leave(whole / "models/good", gain=20.0)
    command = Command(reaching, "robustness", "models/good")
    wait_until(lambda: journal_lines(reaching) > 20 or not command.is_running())
    os.killpg(command.pid, signal.SIGKILL)
    wait_until(lambda: not command.is_running())
    before = journal_lines(reaching)
    (journal,) = (reaching / paths.STATE / "robustness").rglob("*.jsonl")
    with journal.open("a") as stream:
        stream.write('{"key": ["action_n')  # as a kill in the middle of a write leaves it
    resumed = robustness.evaluate(reaching, "models/good")
    os.chdir(whole)  # where models/good is looked for
    assert resumed == robustness.evaluate(whole, "models/good")
    assert before > 20
    assert journal_lines(reaching) == journal_lines(whole) == 256, "what was finished is not played again"


def test_another_policy_json_with_the_same_weights_has_a_journal_of_its_own(reaching: Path) -> None:
    robustness.evaluate(reaching, "models/good")
    before = journal_lines(reaching)
    with files.new_folder(reaching / "models/again") as folder:
        shutil.copy(reaching / "models/good" / policies.WEIGHTS, folder)
        spec = (reaching / "models/good" / policies.SPEC).read_text()
        (folder / policies.SPEC).write_text(f"{spec} ")
    again = robustness.evaluate(reaching, "models/again")
    assert (
        again["policies"][0]["weights"] == robustness.find(reaching, config.load(paths.PARAMS), "models/good").weights
    )
    assert journal_lines(reaching) == 2 * before


@pytest.mark.parametrize("part", ["policies/vision.py", "envs/mini/bddl/lift_cube.bddl", "rollouts/engine.py"])
def test_episodes_of_other_code_or_scenes_are_played_again(reaching: Path, part: str) -> None:
    params = config.load(reaching / paths.PARAMS)
    good = robustness.find(reaching, params, "models/good")
    before = robustness.digest(reaching, params, good), robustness_grid.digest(reaching, params)
    with (reaching / "src/nightshift" / part).open("a") as stream:
        stream.write("\n")
    after = robustness.digest(reaching, params, good), robustness_grid.digest(reaching, params)
    assert before[0] != after[0] and before[1] != after[1]


def test_the_report_says_which_grid_was_asked_for(reaching: Path) -> None:
    edit(reaching, "robustness", init_states=1, films=0)
    found = robustness.evaluate(reaching, "models/good")
    asked = robustness_grid.digest(reaching, config.load(reaching / paths.PARAMS))
    assert found["grid"] == asked
    edit(reaching, "robustness", films=3)
    assert robustness_grid.digest(reaching, config.load(reaching / paths.PARAMS)) == asked, "films change no number"


def test_two_commands_do_not_write_the_same_journal(reaching: Path) -> None:
    (reaching / paths.STATE).mkdir(exist_ok=True)
    lock = locks.acquire(reaching / paths.ROBUSTNESS_LOCK, lambda holder: Busy(holder, ""))
    with pytest.raises(Busy, match=f"process {os.getpid()}"):
        robustness.evaluate(reaching, "models/good")
    locks.release(lock)


def test_a_wider_grid_plays_what_is_new(reaching: Path) -> None:
    robustness.evaluate(reaching, "models/good")
    before = journal_lines(reaching)
    edit(reaching, "robustness", strengths=[1.0, 3.0, 5.0])
    robustness.evaluate(reaching, "models/good")
    assert journal_lines(reaching) - before == len(NAMES) * 12


def test_every_policy_plays_the_same_perturbed_episodes(params: config.Params) -> None:
    chosen = params.model_copy(update={"robustness": params.robustness.model_copy(update={"init_states": 2})})
    one, other = (robustness.grid(chosen, dict.fromkeys(NAMES, (1.0, 5.0))) for _ in range(2))
    assert one == other
    assert len({(r.seed, r.init_state) for r in one}) == 2, "the draws of a state are those of all strengths"
    assert one[0].perturbations == ()


def test_where_none_is_named_each_is_played_in_the_strengths_that_it_has(reaching: Path) -> None:
    edit(reaching, "robustness", perturbations=[], strengths=[0.5, 1.0, 5.0], init_states=1, films=0)
    found = robustness.evaluate(reaching, "models/good")
    cells = found["policies"][0]["perturbations"]
    strengths = {name: [cell["strength"] for cell in own] for name, own in cells.items()}
    assert strengths == {"action_delay": [1.0, 5.0], "action_noise": [0.5, 1.0, 5.0], "sensor_noise": [0.5, 1.0, 5.0]}
    robustness_page.write(reaching, found)
    assert "<td></td>" in (reaching / paths.ROBUSTNESS_PAGE).read_text()


def test_a_named_one_with_fewer_levels_is_played_in_those_that_it_has_beside_others(
    reaching: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_reader(reaching, max_words=12)
    names, strengths = ["sensor_noise", "language_instructions"], [1.0, 2.0, 3.0, 4.0, 5.0]
    edit(reaching, "robustness", perturbations=names, strengths=strengths)
    params = config.load(reaching / paths.PARAMS)
    chosen = robustness.perturbations(params, [robustness.find(reaching, params, "models/reader")])
    assert chosen == {"sensor_noise": strengths, "language_instructions": [1.0, 2.0, 3.0]}
    assert caplog.messages == ["language_instructions has no strength 4, 5: played in 1, 2, 3"]
    caplog.clear()
    edit(reaching, "robustness", strengths=[0.5, 1.0, 1.5])
    params = config.load(reaching / paths.PARAMS)
    chosen = robustness.perturbations(params, [robustness.find(reaching, params, "models/reader")])
    assert chosen == {"sensor_noise": [0.5, 1.0, 1.5], "language_instructions": [1.0]}
    assert caplog.messages == ["language_instructions has no strength 0.5, 1.5: played in 1"]
    edit(reaching, "robustness", strengths=[0.5, 1.5])
    with pytest.raises(ConfigError, match=r"language_instructions has the strength 0\.5, but its strengths are whole"):
        robustness.evaluate(reaching, "models/reader")
    edit(reaching, "robustness", strengths=[4.0, 5.0])
    with pytest.raises(ConfigError, match="paraphrases miss the task near: there are 3, and strength 4"):
        robustness.evaluate(reaching, "models/reader")


def test_two_policies_are_compared_episode_by_episode(reaching: Path) -> None:
    found = robustness.evaluate(reaching, "models/good", "models/slow")
    compared = found["against"]["perturbations"]
    assert set(compared) == {UNPERTURBED, *NAMES}
    pair = compared["action_noise"]["overall"]
    ours, theirs = (
        sum(c["overall"]["successes"] for c in p["perturbations"]["action_noise"]) for p in found["policies"]
    )
    assert pair["won"] - pair["lost"] == ours - theirs
    assert pair["states"] == 24
    read = json.loads((reaching / paths.ROBUSTNESS_REPORT).read_text())
    assert list(report.compared(read)) == ["unperturbed", *sorted(NAMES)]
    same = robustness.evaluate(reaching, "models/good", "models/good")["against"]
    assert all(row["overall"]["gain"] == 0 for row in same["perturbations"].values()) and not same["fallen"]


def outcomes(name: str, strength: float, letters: str) -> list[PerturbedOutcome]:
    """One per letter: s solved, f failed, i invalid."""
    return [
        {
            "perturbation": name,
            "strength": strength,
            "reached": strength,
            "task": "near",
            "init_state": state,
            "success": letter == "s",
            "length": 9,
            "valid": letter != "i",
        }
        for state, letter in enumerate(letters)
    ]


def test_a_perturbation_that_a_scene_had_no_room_for_is_named_in_the_terminal_and_on_the_page(
    reaching: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [*outcomes(UNPERTURBED, 0.0, "ss"), *outcomes("a", 1.0, "sss"), *outcomes("b", 1.0, "ss")]
    played = copy.deepcopy(full)
    for one in played[3:5]:
        one["reached"] = 0.5
    assert report.limited(full) == {}
    found = robustness.evaluate(reaching, "models/good")
    assert found["limited"] == {}
    robustness_command._show(reaching, {**found, "limited": report.limited(played)})
    sentence = "a: the scene did not allow the whole strength in 2 episodes of near"
    assert sentence in capsys.readouterr().out.replace("\n", " ")
    assert sentence in (reaching / paths.ROBUSTNESS_PAGE).read_text()


def large(found: dict[str, Any], strengths: Sequence[float]) -> dict[str, Any]:
    """A report of one policy with a long name that solves all episodes, under all perturbations."""
    names = registry.names()
    cells = [(UNPERTURBED, 0.0), *((name, strength) for name in names for strength in strengths)]
    played = [one for name, strength in cells for one in outcomes(name, strength, "s" * 40)]
    return {
        **found,
        "strengths": strengths,
        "perturbations": {name: {"summary": "", "source": ""} for name in names},
        "policies": [{"name": LONG_NAME, "weights": "", **report.summary(played)}],
        "films": [],
        "tasks": ["near"],
    }


@pytest.mark.parametrize(("width", "blocks"), [(80, 2), (200, 1), (60, 4)])
def test_no_number_is_cut_in_a_narrow_terminal(
    reaching: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, blocks: int
) -> None:
    strengths = [0.5 * number for number in range(11)]
    found = large(robustness.evaluate(reaching, "models/good"), strengths)
    monkeypatch.setattr(console, "width", width)
    robustness_command._show(reaching, found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == LONG_NAME
    rows = [line.split() for line in lines if line.startswith("language_instructions")]
    assert len(rows) == blocks
    values = [value for row in rows for value in row[1:]]
    assert values == ["100"] * len(strengths) + ["100.0", "%", "(91.2", "to", "100.0)"]
    header = [value for line in lines if line.startswith("perturbation ") for value in line.split()[1:]]
    assert header == [f"{strength:g}" for strength in strengths] + ["lowest,", "95", "%", "interval"]


def test_a_drop_under_one_perturbation_beyond_the_margin_is_a_fall() -> None:
    before = [*outcomes(UNPERTURBED, 0.0, "ssss"), *outcomes("a", 1.0, "ssss"), *outcomes("b", 1.0, "ssss")]
    after = [*outcomes(UNPERTURBED, 0.0, "ssss"), *outcomes("a", 1.0, "sssf"), *outcomes("b", 1.0, "sffi")]
    policies_ = [{"weights": "new"}, {"weights": "old"}]
    found = Robustness.of({"policies": policies_, "against": {"perturbations": report.comparison(after, before)}})
    assert found and (found.ours, found.theirs) == ("new", "old")
    assert found.fallen(0.25) == {"b": pytest.approx(2 / 3)}
    assert found.fallen(0.2) == {"a": 0.25, "b": pytest.approx(2 / 3)}
    assert found.fallen(1.0) == {}
    assert Robustness.of({"policies": policies_[:1], "against": None}) is None


def test_episodes_without_a_perturbation_are_no_comparison_under_perturbations() -> None:
    before, after = outcomes(UNPERTURBED, 0.0, "ssss"), outcomes(UNPERTURBED, 0.0, "sfff")
    both = [{"weights": "new"}, {"weights": "old"}]
    calm = {"policies": both, "against": {"perturbations": report.comparison(after, before)}}
    assert Robustness.of(calm) is None
    noisy = report.comparison([*after, *outcomes("a", 1.0, "ss")], [*before, *outcomes("a", 1.0, "ss")])
    found = Robustness.of({"policies": both, "against": {"perturbations": noisy}})
    assert found and found.fallen(0.1) == {}


def test_a_cell_without_a_valid_episode_is_empty_in_tables_and_on_the_page(
    reaching: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = robustness.evaluate(reaching, "models/good")
    played = [
        *outcomes(UNPERTURBED, 0.0, "ssss"),
        *outcomes("action_noise", 1.0, "iiii"),
        *outcomes("action_noise", 5.0, "ssff"),
    ]
    for task in ("near", "far"):
        played += [{**one, "task": task} for one in outcomes("sensor_noise", 1.0, "ii" if task == "far" else "sf")]
    (player,) = found["policies"]
    found |= {"tasks": ["near"], "policies": [player | report.summary(played)]}
    assert json.loads(json.dumps(found))["policies"][0]["perturbations"]["action_noise"][0]["overall"]["rate"] is None
    robustness_command._show(reaching, found)
    printed = capsys.readouterr().out
    assert "6 episodes were lost to the simulator; – stands where none was valid" in printed and " – " in printed
    written = (reaching / paths.ROBUSTNESS_PAGE).read_text()
    assert written.count('title="no valid episode">–</td>') == 1
    assert "6 episodes were lost to the simulator; – stands where none was valid." in written
    assert "50 % under the worst, action_noise" in written
    assert "Success under action_noise: strength 0: 100 %; strength 5: 50 %" in written


class Failing:
    """Makes the simulator fail where a condition on strength and init state holds, and counts how often it did."""

    def __init__(self, where: Callable[[float, int], bool]) -> None:
        self.where = where
        self.failures = 0

    def break_(self, monkeypatch: pytest.MonkeyPatch, perturbation: type[Perturbation]) -> None:
        change = perturbation.change_actions

        def failing(one: Perturbation, actions: Array, steps: NDArray[np.int64]) -> Array:
            if self.where(one.strength, one.key.init_state):
                self.failures += 1
                raise MemoryError("no room for the contacts")
            return change(one, actions, steps)

        monkeypatch.setattr(perturbation, "change_actions", failing)


def test_episodes_that_fail_every_time_are_counted_and_lock_nothing(
    reaching: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(lambda strength, state: strength == 5.0 and state < 3)
    failing.break_(monkeypatch, ActionNoise)
    first = robustness.evaluate(reaching, "models/good")
    assert first["policies"][0]["invalid"] == 6
    assert "the simulator failed on near, state 0, under action_noise 5" in caplog.messages
    assert robustness.evaluate(reaching, "models/good") == first
    assert failing.failures == 12, "two tries each, and none in the second call"
    edit(reaching, "robustness", strengths=[1.0, 3.0, 5.0])
    wider = robustness.evaluate(reaching, "models/good", "models/slow")
    assert [player["invalid"] for player in wider["policies"]] == [6, 6]


def test_after_a_repair_episodes_that_were_lost_are_played_again_if_that_is_asked_for_and_no_others(
    reaching: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(lambda strength, state: strength == 5.0 and state < 3)
    failing.break_(monkeypatch, ActionNoise)
    whole = robustness.evaluate(reaching, "models/good")
    before = journal_lines(reaching)
    failing.where = lambda *_: False
    assert robustness.evaluate(reaching, "models/good") == whole
    repaired = robustness.evaluate(reaching, "models/good", retry_lost=True)
    assert repaired["policies"][0]["invalid"] == 0
    assert journal_lines(reaching) == before + 6


def test_a_cell_in_which_the_simulator_always_fails_is_empty_in_the_report(
    reaching: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(lambda strength, _: strength == 5.0).break_(monkeypatch, ActionNoise)
    (player,) = robustness.evaluate(reaching, "models/good")["policies"]
    rates = [[cell["overall"]["rate"] is None for cell in player["perturbations"][name]] for name in NAMES]
    assert rates == [[False, False], [False, True], [False, False]]


def test_a_broken_perturbation_is_named_and_the_others_are_not_played_again(
    reaching: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(lambda *_: True)
    failing.break_(monkeypatch, ActionNoise)
    with pytest.raises(RolloutError, match=r"failed in every episode under action_noise\n.*name the others"):
        robustness.evaluate(reaching, "models/good")
    before = journal_lines(reaching)
    edit(reaching, "robustness", perturbations=["action_delay", "sensor_noise"])
    robustness.evaluate(reaching, "models/good")
    assert journal_lines(reaching) == before
    failing.where = lambda *_: False  # as after a repair
    edit(reaching, "robustness", perturbations=NAMES)
    assert robustness.evaluate(reaching, "models/good")["policies"][0]["invalid"] == 0


def test_a_simulator_that_fails_without_a_perturbation_ends_the_grid_early_every_time(
    reaching: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room for the contacts")

    monkeypatch.setattr(FakeFleet, "step", fail)
    for _ in range(2):
        with pytest.raises(RolloutError, match="failed on 3 of 12 episodes without a perturbation"):
            robustness.evaluate(reaching, "models/good")
    assert journal_lines(reaching) == 4


@pytest.mark.parametrize(
    ("calm", "perturbed", "words"),
    [
        ("ssss", "iiii", r"failed in every episode under a\n.* name the others"),
        ("iiii", "ssss", r"failed in every episode without a perturbation\n.*machine.workers 0[^,]*$"),
        ("iiii", "iiii", r"failed in every episode without a perturbation and under a\n.*[^,]*$"),
    ],
)
def test_nothing_valid_of_a_whole_perturbation_is_an_error_that_names_it(calm: str, perturbed: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        report.summary([*outcomes(UNPERTURBED, 0.0, calm), *outcomes("a", 1.0, perturbed)])


def test_two_policies_without_a_common_state_under_a_perturbation_are_not_compared() -> None:
    ours, theirs = ([*outcomes(UNPERTURBED, 0.0, "ssss"), *outcomes("a", 1.0, letters)] for letters in ("ssii", "iiss"))
    with pytest.raises(RolloutError, match="on no init state did both policies have a valid episode under a"):
        report.comparison(ours, theirs)


def test_the_film_shows_a_state_that_is_solved_without_the_perturbation() -> None:
    played = [
        *outcomes(UNPERTURBED, 0.0, "fsss"),
        *outcomes("a", 1.0, "fssf"),
        *outcomes("a", 5.0, "ffff"),
        *outcomes("b", 1.0, "fsfs"),
        *outcomes("c", 1.0, "fsss"),
    ]
    chosen = report.typical_failures(played, 3)
    assert [(one["perturbation"], one["strength"], one["init_state"]) for one in chosen] == [
        ("a", 5.0, 1),
        ("b", 1.0, 2),
    ]


def test_the_command_fails_where_the_policy_fell_and_says_under_what(
    reaching: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fast one overshoots where its actions arrive late; the slow one does not get there through noise."""
    robustness_command.evaluate("models/good", "models/good")
    assert "fell" not in capsys.readouterr().out
    assert (reaching / paths.ROBUSTNESS_PAGE).exists()
    for ours, theirs, name in (("good", "slow", "action_delay"), ("slow", "good", "action_noise")):
        with pytest.raises(
            RobustnessFell, match=rf"models/{ours} is lower than models/{theirs} by [0-9.]+ points under {name}"
        ):
            robustness_command.evaluate(f"models/{ours}", f"models/{theirs}")
        assert "fell" in capsys.readouterr().out


def test_without_a_margin_a_comparison_is_shown_and_nothing_fails(reaching: Path) -> None:
    edit(reaching, "register", max_perturbation_drop=None)
    robustness_command.evaluate("models/good", "models/slow")
    assert robustness.evaluate(reaching, "models/good", "models/slow")["against"]["fallen"] == {}


def test_the_list_says_what_the_suite_can_do(reaching: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robustness_command.listing()
    printed = capsys.readouterr().out
    assert "camera_viewpoints  fake cannot do it" in printed
    assert "action_noise  fake can do it" in printed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"perturbations": ["object_sizes"]}, "fake cannot do object_sizes"),
        ({"perturbations": ["action_delay"], "strengths": [0.5]}, "its strengths are whole numbers"),
        ({"perturbations": ["language_instructions"], "strengths": [5.0]}, "paraphrases miss the task near"),
        ({"init_states": 5000}, "5000 are asked for\n.*lower robustness.init_states"),
        ({"strengths": [6.0]}, "less than or equal to 5"),
        ({"strengths": [2.0, 1.0]}, "strengths should ascend"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_is(reaching: Path, changes: dict[str, Any], words: str) -> None:
    edit(reaching, "robustness", **changes)
    with pytest.raises(NightshiftError, match=words):
        robustness.evaluate(reaching, "models/good")
    assert not (reaching / paths.STATE / "robustness").exists()


def test_a_suite_that_can_do_no_perturbation_plays_nothing(reaching: Path) -> None:
    """A real robot would be moved through a grid of unperturbed episodes."""
    edit(reaching, "robustness", perturbations=[])
    params = config.load(reaching / paths.PARAMS)
    good = robustness.find(reaching, params, "models/good")
    with (
        served(params.env) as robot,
        pytest.raises(ConfigError, match="no perturbation can be played here: robot can do none"),
    ):
        robustness.perturbations(params.model_copy(update={"env": robot}), [good])


@pytest.mark.parametrize(
    ("observed", "name", "is_noticed"),
    [
        (("wrist", "instruction"), "camera_viewpoints", False),
        (("wrist", "instruction"), "field_of_view", False),
        (("wrist", "instruction"), "light_conditions", True),
        (("wrist", "instruction"), "object_colors", True),
        (("agentview", "egocentric"), "camera_viewpoints", True),
        (("agentview", "egocentric"), "language_instructions", False),
    ],
)
def test_a_camera_that_a_policy_does_not_read_is_not_noticed(
    params: config.Params, observed: tuple[str, ...], name: str, is_noticed: bool
) -> None:
    env = params.env.model_copy(update={"suite": "libero_mini"})
    assert (name in registry.reaching(env, observed)) == is_noticed


def test_a_named_perturbation_that_no_policy_can_notice_is_refused(reaching: Path) -> None:
    edit(reaching, "robustness", perturbations=["action_noise", "language_instructions"], strengths=[1.0])
    with pytest.raises(
        ConfigError,
        match=r"^language_instructions in robustness.perturbations cannot be noticed: models/good reads "
        r"\w+.*; models/slow reads .*\n.*leave it out, or name any of action_delay, action_noise, sensor_noise$",
    ):
        robustness.evaluate(reaching, "models/good", "models/slow")
    assert not (reaching / paths.STATE / "robustness").exists()


def leave_reader(root: Path, max_words: int) -> None:
    """models/reader, which reads so many words."""
    edit(root, "env", **SEEING["env"])
    edit(root, "robustness", perturbations=[], strengths=[1.0, 2.0, 3.0], init_states=1, films=0)
    env = config.load(root / paths.PARAMS).env
    shapes = {name: spec.shape for name, spec in envs.observation_space(env).items()}
    chosen = config.Params.model_validate(
        {**config.read_yaml(root / paths.PARAMS), "policy": {**SEEING["policy"], "max_words": max_words}}
    )
    with files.new_folder(root / "models/reader") as folder:
        policies.save(policies.fresh(chosen.policy, shapes, envs.suite(env.suite).action_space.size), folder)


def test_a_policy_that_cannot_read_a_paraphrase_is_refused_before_anything_is_played(reaching: Path) -> None:
    leave_reader(reaching, max_words=10)
    with pytest.raises(ConfigError, match=r"models/reader cannot read a paraphrase: the instruction .* has 11 words"):
        robustness.evaluate(reaching, "models/reader")
    assert not (reaching / paths.STATE / "robustness").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [("near: [go there]\n", "miss the task far"), ("near: go there\n", "is not a list"), (None, "words.yaml")],
)
def test_paraphrases_that_cannot_be_used_are_not_left_out_in_silence(
    reaching: Path, content: str | None, words: str
) -> None:
    leave_reader(reaching, max_words=12)
    if content is not None:
        (reaching / "words.yaml").write_text(content)
    edit(reaching, "robustness", paraphrases=str(reaching / "words.yaml"))
    with pytest.raises(ConfigError, match=words):
        robustness.evaluate(reaching, "models/reader")


def test_a_folder_without_a_policy_is_refused_by_what_it_is(reaching: Path) -> None:
    params = config.load(reaching / paths.PARAMS)
    with files.new_folder(reaching / "models/rloo") as folder:
        files.write_json(folder / paths.SKIPPED, {"skipped": "not in algorithms"})
    with pytest.raises(DataError, match=r"models/rloo holds no policy: its stage was skipped \(not in algorithms\)\n"):
        robustness.find(reaching, params, "models/rloo")
    with files.new_folder(reaching / "data/demos") as folder:
        files.write_json(folder / "episodes.json", [])
    with pytest.raises(DataError, match=r"data/demos holds no policy: it has no policy\.safetensors.*\n.*models/sft"):
        robustness.find(reaching, params, "data/demos")


def test_a_policy_that_cannot_play_here_is_refused(reaching: Path) -> None:
    edit(reaching, "env", suite="libero_mini", tasks=["lift_cube"])
    edit(reaching, "robustness", perturbations=["action_noise"])
    with pytest.raises(ConfigError, match="models/good cannot play here"):
        robustness.evaluate(reaching, "models/good")


def test_the_page_has_curves_a_heat_map_and_films_and_fits_every_screen(reaching: Path, tmp_path: Path) -> None:
    found = robustness.evaluate(reaching, "models/good", "models/slow")
    robustness_page.write(reaching, found)
    written = (reaching / paths.ROBUSTNESS_PAGE).read_text()
    assert written.count('class="band sampled"') == written.count('class="band greedy"') == len(NAMES)
    assert written.count('class="cell"') == 2 * 3 * 2 * len(NAMES), "policies, rows of all and of two tasks, strengths"
    assert "<video" in written
    overall = found["policies"][1]["perturbations"]["sensor_noise"][1]["overall"]
    interval = f"{100 * overall['low']:.0f}–{100 * overall['high']:.0f}"
    assert f"{100 * overall['rate']:.0f}<small>{interval}</small></td>" in written, "without a pointer, too"
    with browser() as tab:
        for width in WIDTHS:
            tab.open(reaching / paths.ROBUSTNESS_PAGE, width)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert tab.evaluate(HIDDEN) == 0, width
            assert (tab.complaints(), tab.requests()) == ([], [])
            films = tab.evaluate("[...document.querySelectorAll('video')].map(v => v.videoWidth > 0 && !v.error)")
            assert films == [True]


def test_five_strengths_and_a_long_name_of_a_policy_are_seen_whole_on_every_screen(reaching: Path) -> None:
    found = large(robustness.evaluate(reaching, "models/good"), [1.0, 2.0, 3.0, 4.0, 5.0])
    robustness_page.write(reaching, {**found, "policies": 2 * found["policies"]})
    beyond = (
        "[...document.querySelectorAll('caption, .keys li')].filter(e => e.getBoundingClientRect().right > innerWidth)"
    )
    with browser() as tab:
        for width in WIDTHS:
            tab.open(reaching / paths.ROBUSTNESS_PAGE, width)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert (tab.evaluate(HIDDEN), tab.evaluate(f"{beyond}.length")) == (0, 0), width


def test_the_ticks_of_a_curve_are_the_strengths_that_were_played() -> None:
    points = [(strength, Rate(1, 2)) for strength in (0.0, 0.25, 0.5)]
    chart = svg.strength_curve(points, [], "")
    assert [re.search(f'class="tick"[^>]*>{tick}</text>', chart) is not None for tick in ("0", "0.25", "0.5")] == [
        True
    ] * 3


def test_a_curve_that_goes_on_where_the_first_policy_lost_all_episodes_stays_in_its_chart() -> None:
    points, other = [[(strength, Rate(1, 2)) for strength in found] for found in ((0.0, 1.0), (0.0, 1.0, 5.0))]
    across = [float(x) for x in re.findall(r'c?x="([0-9.]+)%"', svg.strength_curve(points, other, ""))]
    assert across and max(across) <= svg.RIGHT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a compute node that cannot write pages either, and on which nightshift is not installed."""
    return make_site(tmp_path_factory.mktemp("node") / "site", "nightshift", "__editable__", "jinja2")


@pytest.fixture(scope="module")
def python(site: Path) -> Iterator[str]:
    with forking_python(site) as address:
        yield address


@pytest.fixture
def node(reaching: Path, tmp_path: Path, site: Path, python: str) -> Node:
    """A compute node with the project's files and policies."""
    shutil.copytree(reaching, tmp_path / "node", ignore=shutil.ignore_patterns(".git", ".venv"))
    return Node(tmp_path / "node", site, python)


def test_a_compute_node_plays_the_grid_and_the_page_is_made_at_home_with_stills_where_it_could_not_encode(
    node: Node, reaching: Path
) -> None:
    ended = node.run("robustness", "models/good")
    assert ended.returncode == 0, ended.stderr
    assert "robustness.films is 1, and av is not installed here: failures are shown as stills" in ended.stderr
    assert "the page needs jinja2: nightshift robustness --page makes it" in " ".join(ended.stdout.split())
    assert (node.root / paths.ROBUSTNESS_REPORT).exists() and not (node.root / paths.ROBUSTNESS_PAGE).exists()
    shutil.copytree(node.root / paths.ROBUSTNESS, reaching / paths.ROBUSTNESS)
    robustness_command.page()
    written = (reaching / paths.ROBUSTNESS_PAGE).read_text()
    assert "<video" not in written and written.count('class="stills"') == 1
    with browser() as tab:
        for width in WIDTHS:
            tab.open(reaching / paths.ROBUSTNESS_PAGE, width)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert (tab.complaints(), tab.requests()) == ([], [])
            assert tab.evaluate("document.querySelector('.stills').getBoundingClientRect().height > 40"), width


def test_a_compute_node_has_no_registry(node: Node) -> None:
    refused = node.run("robustness")
    assert refused.returncode == 1
    assert "champion is no folder here but a name of the registry, and mlflow is not installed here" in refused.stderr
    assert "name the folder of a policy" in refused.stderr


@pytest.mark.parametrize(
    ("option", "given", "sentence"),
    [
        ("page", {"policy": "models/good"}, "--page plays nothing, so it would ignore POLICY"),
        (
            "page",
            {"policy": "3", "against": "champion"},
            "--page plays nothing, so it would ignore POLICY and --against",
        ),
        ("listing", {"against": "champion"}, "--list plays nothing, so it would ignore --against"),
        ("listing", {"page": True}, "--list plays nothing, so it would ignore --page"),
        ("page", {"retry_lost": True}, "--page plays nothing, so it would ignore --retry-lost"),
    ],
)
def test_a_policy_that_would_be_ignored_is_refused_by_name(option: str, given: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"policy": "", "against": "", "retry_lost": False, "listing": False, "page": False}
    arguments |= {option: True} | given
    with pytest.raises(ConfigError, match=f"^{sentence}\n"):
        app.robustness(**arguments)


def test_a_report_that_was_not_brought_back_whole_is_refused(reaching: Path) -> None:
    with pytest.raises(DataError, match="not complete"):
        robustness_command.page()
    robustness.evaluate(reaching, "models/good")
    (reaching / paths.ROBUSTNESS_REPORT).write_text("{}")
    with pytest.raises(DataError, match=r"robustness.json is damaged"):
        robustness_command.page()


def test_the_report_of_a_run_shows_the_robustness_of_its_own_weights_alone(reaching: Path) -> None:
    assert 'id="robustness"' not in page.render(gather(reaching))
    Reaching.leave(reaching / paths.RLOO_POLICY, gain=20.0)
    robustness.evaluate(reaching, str(paths.RLOO_POLICY))
    shown = page.render(gather(reaching))
    assert 'id="robustness"' in shown and "action_noise" in shown
    Reaching.leave(reaching / paths.RLOO_POLICY, gain=19.0)  # the next night
    assert 'id="robustness"' not in page.render(gather(reaching))
