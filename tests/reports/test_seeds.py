"""scripts/seeds.py on the files that finished runs leave."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift import config, files
from nightshift.pipeline.receipt import Receipt, stale
from nightshift.pipeline.run import Session, fingerprint
from nightshift.project import checksums, graph, paths
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired
from scripts import seeds
from tests.conftest import git, make_project

SCRIPT = Path(seeds.__file__)
STAGES = [stage for stage in graph.load(seeds.PROJECT) if stage != "register"]
RECIPE = {"sft": {"steps": 7}}


def finished_run(folder: Path, seed: int, before: int, won: int, lost: int) -> None:
    """What stages on a node leave, with results that were not computed."""
    seeds.prepare(folder, seed, RECIPE, node=True)
    gain = Paired(states=200, won=won, lost=lost).to_json()
    candidates = [
        {"name": "sft", "overall": Rate(before, 200).to_json(), "gain": None},
        {"name": "rloo", "overall": Rate(before + won - lost, 200).to_json(), "gain": gain},
    ]
    for stage in STAGES:
        for out in graph.load(folder)[stage].outs:
            files.write_json(folder / out if out.suffix else folder / out / "made", stage)
    files.write_json(folder / paths.EVALUATION_REPORT, {"candidates": candidates})
    files.write_json(folder / paths.RLOO_HISTORY, {"iterations": [], "validation": [], "kept": 8})
    session = Session(folder)
    for stage in STAGES:
        files.write_json(folder / paths.stage_receipt(stage), receipt(stage, session).model_dump(mode="json"))


def receipt(stage: str, session: Session) -> Receipt:
    return Receipt(
        stage=stage,
        fingerprint=fingerprint(stage, session),
        params={},
        versions={},
        inputs={},
        outputs={path.as_posix(): checksums.md5(session.root, path) for path in session.graph[stage].outs},
        commit="unknown",
        host="node",
        seconds=1.0,
        skipped=False,
    )


def test_every_finished_seed_is_a_row_and_the_mean_gain_has_an_interval_over_seeds(tmp_path: Path) -> None:
    finished_run(tmp_path / "3", 3, 100, won=40, lost=0)
    finished_run(tmp_path / "4", 4, 150, won=22, lost=2)
    files.write_json(tmp_path / "recipe.yaml", RECIPE)
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path),
        "3",
        "4",
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "--node",
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert told[2].startswith("| 3 | 50.0 % (43.1 to 56.9) | rloo | 70.0 % (63.3 to 75.9) | 40, 0 | +20.0 (")
    assert told[3].endswith("| 8 |")
    assert told[-1] == "Mean gain of rloo over 2 seeds, in points: +15.0 (-48.5 to +78.5)"


def test_every_training_stage_has_its_rows_and_a_clone_alone_has_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = {"name": "sft", "overall": Rate(100, 200).to_json(), "gain": None}
    gain = Paired(states=200, won=40, lost=0).to_json()
    others = [{"name": name, "overall": Rate(140, 200).to_json(), "gain": gain} for name in ("rloo", "another")]
    files.write_json(tmp_path / "0" / paths.EVALUATION_REPORT, {"candidates": [clone]})
    files.write_json(tmp_path / "1" / paths.EVALUATION_REPORT, {"candidates": [clone, *others]})
    seeds.report({seed: tmp_path / str(seed) for seed in (0, 1)})
    _, _, first, second, third = capsys.readouterr().out.splitlines()
    assert first == "| 0 | 50.0 % (43.1 to 56.9) | – | – | – | – | – |"
    assert [line.split(" | ")[2] for line in (second, third)] == ["rloo", "another"]


def test_a_policy_that_training_left_as_it_was_has_no_gain_in_its_row() -> None:
    clone = {"name": "sft", "overall": Rate(100, 200).to_json(), "gain": None}
    none = Paired(states=200, won=0, lost=0).to_json()
    kept = {"name": "rloo", "overall": clone["overall"], "gain": none, "same_policy_as": "sft"}
    assert seeds.row(0, clone, kept, 0).endswith("| rloo | 50.0 % (43.1 to 56.9) | – | the same policy | 0 |\n")
    as_good = {**kept, "same_policy_as": None}
    assert "| 0, 0 | +0.0 (" in seeds.row(0, clone, as_good, 4)


@pytest.mark.parametrize(
    ("recipe", "concerned"),
    [
        (RECIPE, []),
        ({"sft": {"steps": 8}}, ["sft", "rloo", "rlpd", "evaluate"]),
        ({**RECIPE, "evaluate": {"init_states": 3}}, ["opponent", "evaluate"]),
        ({**RECIPE, "algorithms": []}, ["choose", "rloo", "rlpd", "evaluate"]),
    ],
)
def test_after_a_change_of_the_recipe_the_stages_that_it_concerns_run_again(
    tmp_path: Path, recipe: dict[str, Any], concerned: list[str]
) -> None:
    finished_run(tmp_path / "0", 0, 100, won=40, lost=0)
    seeds.prepare(tmp_path / "0", 0, recipe, node=True)
    assert stale(Session(tmp_path / "0")) == concerned


def test_a_training_stage_stands_if_choosing_again_chooses_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "0"
    finished_run(folder, 0, 100, won=40, lost=0)
    (folder / paths.stage_receipt("choose")).unlink()
    ran: list[list[str]] = []

    def run_stages(folder: Path, stages: list[str], *_: object) -> None:
        ran.append(stages)
        for stage in stages:
            files.write_json(
                folder / paths.stage_receipt(stage), receipt(stage, Session(folder)).model_dump(mode="json")
            )

    monkeypatch.setattr(seeds, "run_stages", run_stages)
    seeds.run(folder, 0, RECIPE, seeds.Processes(), node=True)
    assert ran == [["choose"]]


def test_only_stages_up_to_the_given_one_run(tmp_path: Path) -> None:
    assert seeds.up_to("sft", ["collect", "sft", "rloo", "evaluate"], seeds.PROJECT) == ["collect", "sft"]
    assert seeds.up_to("states", ["sft", "rloo"], seeds.PROJECT) == []
    assert seeds.up_to(None, STAGES, seeds.PROJECT) == STAGES
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), "0", "--node", "--until", "states"]
    environment = {**os.environ, "PYTHONPATH": f"{seeds.PROJECT / 'src'}:{seeds.PROJECT}"}
    subprocess.run(command, env=environment, check=True)
    ran = {path.stem for path in (tmp_path / "runs/0" / paths.stage_receipt("states")).parent.iterdir()}
    assert ran == {"states"}


def test_a_copy_without_the_stage_to_stop_at_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages:\n  collect: {cmd: nightshift stage collect}\n")
    with pytest.raises(seeds.Failed, match=r"has no stage sft: its code is older; name another folder"):
        seeds.up_to("sft", ["collect"], tmp_path)


def test_until_is_refused_where_dvc_knows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        seeds.arguments(["runs", "0", "--until", "sft"])
    assert "--until needs --node" in capsys.readouterr().err


def test_a_stage_whose_output_or_receipt_is_missing_runs_again(tmp_path: Path) -> None:
    finished_run(tmp_path / "0", 0, 100, won=40, lost=0)
    (tmp_path / "0" / paths.stage_receipt("evaluate")).unlink()
    assert stale(Session(tmp_path / "0")) == ["evaluate"]
    shutil.rmtree(tmp_path / "0" / paths.SFT_POLICY)
    assert stale(Session(tmp_path / "0")) == ["sft", "rloo", "rlpd", "evaluate"]


def test_a_copy_has_the_inputs_of_the_project_so_that_its_results_can_be_adopted(tmp_path: Path) -> None:
    seeds.prepare(tmp_path / "0", 0, {}, node=True)
    stages = graph.load(seeds.PROJECT)
    brought = [*graph.code({stage: stages[stage] for stage in STAGES}), paths.IMPORTS]
    (tmp_path / "0" / "src/nightshift/policies/__pycache__").mkdir(exist_ok=True)
    (tmp_path / "0" / "src/nightshift/policies/__pycache__/base.pyc").touch()
    sums = {path: checksums.md5(tmp_path / "0", path) for path in brought}
    assert sums == {path: checksums.md5(seeds.PROJECT, path) for path in brought}
    assert checksums.MISSING not in sums.values()


def test_results_of_another_node_can_be_there_before_the_copy(tmp_path: Path) -> None:
    finished_run(tmp_path / "first", 0, 100, won=40, lost=0)
    for path in ("data", "models", "reports", ".state"):
        shutil.copytree(tmp_path / "first" / path, tmp_path / "second" / path)
    seeds.prepare(tmp_path / "second", 0, RECIPE, node=True)
    assert stale(Session(tmp_path / "second")) == []


def test_a_copy_that_was_interrupted_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", interrupt)
        seeds.prepare(tmp_path / "0", 0, {}, node=True)
    seeds.prepare(tmp_path / "0", 0, {}, node=True)
    assert (tmp_path / "0/src/nightshift/stages/states.py").exists()


def test_a_copy_says_which_commit_its_code_is_of_when_the_project_around_it_has_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project")
    for name in ("flows", "tasks"):
        (project / name).mkdir()
    monkeypatch.setattr(seeds, "PROJECT", project)
    before = git(project, "rev-parse", "--short=12", "HEAD").strip()
    seeds.prepare(project / ".state/seeds/0", 0, {}, node=True)
    git(project, "commit", "-q", "--allow-empty", "-m", "more")
    assert Session(project / ".state/seeds/0").commit == before


def test_sums_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path / "0", 0, 100, won=40, lost=0)
    summed: list[Path] = []

    def md5(root: Path, path: Path) -> str:
        summed.append(path)
        return str(whole(root, path))

    whole = checksums.md5
    monkeypatch.setattr(checksums, "md5", md5)
    seeds.run(tmp_path / "0", 0, RECIPE, seeds.Processes(), node=True)
    assert summed.count(paths.DEMOS) == 1


def test_a_stage_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "0/log"
    files.write_bytes(log, b"an earlier line\n" * 1000)
    command = [sys.executable, str(SCRIPT), str(tmp_path), "0", "--node", "--set", "env.tasks=[no_such_task]"]
    environment = {**os.environ, "PYTHONPATH": f"{seeds.PROJECT / 'src'}:{seeds.PROJECT}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "error: libero_mini has no task no_such_task" in ended.stderr
    assert ended.stderr.rstrip().endswith(f"ended with 1; all that it wrote is in {log}")
    assert ended.stderr.count("an earlier line") < seeds.LINES_SHOWN


def test_a_seed_that_fails_keeps_no_other_from_running_and_is_told_after_the_table(tmp_path: Path) -> None:
    for seed in (2, 3):
        finished_run(tmp_path / str(seed), seed, 100, won=40, lost=0)
    files.write_json(tmp_path / "recipe.yaml", RECIPE)
    files.write_bytes(tmp_path / "1" / paths.DVC_YAML, b"<<<<<<< HEAD")
    recipe = ["--recipe", str(tmp_path / "recipe.yaml"), "--node"]
    command = [sys.executable, str(SCRIPT), str(tmp_path), "1", "2", "3", *recipe]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert [line[:8] for line in ended.stdout.splitlines()[2:5]] == ["| 1 | fa", "| 2 | 50", "| 3 | 50"]
    assert ended.stderr.startswith("seed 1: ")
    assert "Traceback" not in ended.stderr


STAGE = """
import signal, sys, time
from pathlib import Path
def end(*_):
    with open("ended", "a") as ended:
        ended.write("told ")
    time.sleep(0.2)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
Path("began").touch()
time.sleep(60)
"""
RUN = f"""
import sys
from scripts import seeds
def run(folder, seed, recipe, processes, *, node, until):
    folder.mkdir(parents=True)
    processes.call([sys.executable, "-c", {STAGE!r}], folder, {{}}, None)
seeds.run = run
seeds.main()
"""


def test_a_signal_reaches_the_stages_that_run_and_is_the_end_of_those_that_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "runs"), "0", "1", "2", "--jobs", "2"]
    process = subprocess.Popen(command, cwd=seeds.PROJECT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(list(tmp_path.glob("runs/*/began"))) < 2:
        time.sleep(0.01)
    process.terminate()
    while process.poll() is None and len(list(tmp_path.glob("runs/*/ended"))) < 2:
        time.sleep(0.01)
    process.terminate()
    _, told = process.communicate(timeout=60)
    ended = {path.parent.name: path.read_text() for path in tmp_path.glob("runs/*/ended")}
    assert ended == {"0": "told ", "1": "told "}, (
        "each is told once: a second signal would cut off what the first began"
    )
    assert not (tmp_path / "runs/2").exists()
    assert (process.returncode, told) == (130, "stopped; the same command goes on\n")


def test_settings_of_the_command_line_come_after_the_recipe() -> None:
    recipe = {"sft": {"steps": 7, "batch_size": 8}}
    found = seeds.with_settings(recipe, ["sft.steps=9", "env.tasks=[lift_cube]", "rlpd.actor.learning_rate=3.0e-4"])
    assert found == {
        "sft": {"steps": 9, "batch_size": 8},
        "env": {"tasks": ["lift_cube"]},
        "rlpd": {"actor": {"learning_rate": 3e-4}},
    }


def documented_commands() -> list[str]:
    """The calls of the script in docs, with lines that go on joined."""
    texts = [page.read_text().replace("\\\n", " ") for page in sorted((seeds.PROJECT / "docs").glob("*.md"))]
    return [line for text in texts for line in re.findall(r"^(?:python )?scripts/seeds\.py .*", text, re.MULTILINE)]


def test_there_are_documented_commands() -> None:
    assert len(documented_commands()) > 5


@pytest.mark.parametrize("command", documented_commands())
def test_every_setting_of_a_documented_command_is_in_valid_params(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(seeds.PROJECT)
    words = shlex.split(command)
    chosen = seeds.arguments(words[words.index("scripts/seeds.py") + 1 :])
    content = config.merged(yaml.safe_load(paths.PARAMS.read_text()), seeds.chosen_recipe(chosen))
    (tmp_path / paths.PARAMS).write_text(yaml.safe_dump(content))
    params = config.load(tmp_path / paths.PARAMS).model_dump(mode="json", by_alias=True)
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        assert reduce(getitem, name.split("."), params) == yaml.safe_load(value), name
