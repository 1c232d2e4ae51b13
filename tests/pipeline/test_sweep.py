"""Trials with other numbers, each in a clone that shares the cache of a finished project."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nightshift import config, files
from nightshift.errors import Busy, ConfigError
from nightshift.pipeline import gc, sweep
from nightshift.project import graph, packages, paths, repository
from nightshift.statistics.intervals import Rate
from tests.cli.test_data_commands import demo_file, take
from tests.command import dvc
from tests.conftest import REPOSITORY, git


def test_choices_are_yaml_and_1e_3_is_a_number() -> None:
    assert sweep.parse(["sft.steps=100,200", "sft.learning_rate=1e-3", "policy.hidden=[8],[16, 16]"]) == {
        "sft.steps": [100, 200],
        "sft.learning_rate": [0.001],
        "policy.hidden": [[8], [16, 16]],
    }
    for wrong in ("sft.steps", "sft.steps=", "sft.steps=[1"):
        with pytest.raises(ConfigError, match="is no choice of values"):
            sweep.parse([wrong])
    with pytest.raises(ConfigError, match=r"sft\.steps is given twice"):
        sweep.parse(["sft.steps=100", "sft.steps=200"])


def test_a_grid_has_every_combination_and_a_sample_some_of_them_the_same_ones_for_a_seed(project: Path) -> None:
    choices = {"sft.steps": [1, 2, 3], "seed": [0, 1]}
    assert [trial.values for trial in sweep.trials(project, choices, 0, seed=0)] == [
        {"sft.steps": steps, "seed": seed} for steps in (1, 2, 3) for seed in (0, 1)
    ]
    drawn = [trial.values for trial in sweep.trials(project, choices, 3, seed=5)]
    assert len(drawn) == 3
    assert drawn == [trial.values for trial in sweep.trials(project, choices, 3, seed=5)]
    assert sweep.trials(project, choices, 3, seed=5)[0].title.startswith("sft.steps=")


def test_an_unknown_name_is_refused_before_anything_runs_with_the_nearest_one(project: Path) -> None:
    for name in ("sft.speed", "nothing.at.all", "seed.inner"):
        with pytest.raises(ConfigError, match=f"there is no parameter {name}"):
            sweep.trials(project, {name: [1]}, 0, seed=0)
    with pytest.raises(ConfigError, match=r"did you mean register\.weights\?"):
        sweep.trials(project, {"register.weight": ["whole"]}, 0, seed=0)
    with pytest.raises(ConfigError, match=r"sft\.steps"):
        sweep.trials(project, {"sft.steps": [-1]}, 0, seed=0)
    assert not (project / paths.SWEEPS).exists()


def test_a_parameter_that_params_yaml_leaves_out_can_be_varied(project: Path) -> None:
    written = yaml.safe_load((project / paths.PARAMS).read_text())
    assert "randomisation" not in written["env"] and "max_perturbation_drop" not in written["register"]
    choices: dict[str, list[Any]] = {
        "register.max_perturbation_drop": [None, 0.1],
        "env.randomisation.perturbations": [["object_sizes"]],
        "env.randomisation.strength": [0.5, 1.0],
    }
    found = [sweep.params_of(project, trial) for trial in sweep.trials(project, choices, 0, seed=0)]
    assert [(params["register"]["max_perturbation_drop"], params["env"]["randomisation"]) for params in found] == [
        (drop, {"perturbations": ["object_sizes"], "strength": strength})
        for drop in (None, 0.1)
        for strength in (0.5, 1.0)
    ]
    whole = {"env.randomisation": [None, {"perturbations": ["object_sizes"], "strength": 1.0}]}
    assert len(sweep.trials(project, whole, 0, seed=0)) == 2
    with pytest.raises(ConfigError, match=r"env\.randomisation\.perturbations: missing"):
        sweep.trials(project, {"env.randomisation.strength": [0.5]}, 0, seed=0)


def test_what_params_yaml_writes_as_a_word_cannot_be_varied_as_a_section(project: Path) -> None:
    params = config.merged(
        yaml.safe_load((project / paths.PARAMS).read_text()),
        yaml.safe_load((REPOSITORY / "recipes" / "mini_openvla_oft.yaml").read_text()),
    )
    (project / paths.PARAMS).write_text(yaml.safe_dump(params))
    with pytest.raises(ConfigError, match="variant is 'rlinf', which has no attention"):
        sweep.trials(project, {"policy.variant.attention": ["causal"]}, 0, seed=0)


def test_a_trial_has_the_code_of_the_present_commit_and_the_imports_of_the_project(
    project: Path, tmp_path: Path
) -> None:
    (before,) = sweep.trials(project, {"seed": [1]}, 0, seed=0)
    take(demo_file(tmp_path / "goal.hdf5", count=2), "goal")
    sweep._prepare(project, before)
    assert (before.folder / paths.IMPORTS / "goal").is_dir()
    (project / "src/nightshift/new.py").write_text("ANSWER = 1\n")
    assert sweep.uncommitted(project).endswith("1 changed files are not in it")
    git(project, "add", "src")
    git(project, "commit", "-qm", "more")
    assert sweep.uncommitted(project) == ""
    (project / paths.IMPORTS / "goal.dvc").unlink()
    (after,) = sweep.trials(project, {"seed": [1]}, 0, seed=0)
    sweep._prepare(project, after)
    assert (after.folder / "src/nightshift/new.py").exists()
    sweep._prepare(project, before)
    assert not (before.folder / paths.IMPORTS / "goal").exists()


def test_a_clone_that_was_cut_off_is_made_again_at_the_commit_of_its_trial(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trial,) = sweep.trials(project, {"seed": [1]}, 0, seed=0)

    def cut_off(_: Path, *arguments: str) -> str:
        """What a power cut leaves of `git clone`."""
        (Path(arguments[-1]) / "src").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(repository, "git", cut_off)
        sweep._prepare(project, trial)
    (trial.folder.parent / f".{trial.folder.name}.partial-cut").mkdir()
    (project / "src/nightshift/new.py").write_text("ANSWER = 1\n")
    git(project, "add", "src")
    git(project, "commit", "-qm", "more")
    sweep._prepare(project, trial)
    assert git(trial.folder, "rev-parse", "--short=12", "HEAD").strip() == trial.folder.parent.name
    assert not (trial.folder / "src/nightshift/new.py").exists()
    assert (trial.folder / ".venv").resolve() == (project / ".venv").resolve()
    assert [path.name for path in trial.folder.parent.iterdir()] == [trial.folder.name]


def test_a_clone_that_another_trial_finished_is_unfinished_again_and_gc_keeps_its_sweep(project: Path) -> None:
    (first,) = sweep.trials(project, {"seed": [1]}, 0, seed=0)
    (second,) = sweep.trials(project, {"seed": [2]}, 0, seed=0)
    sweep._prepare(project, first)
    files.write_json(first.folder / paths.TRIAL, {"title": first.title})
    sweep._prepare(project, first)
    assert (first.folder / paths.TRIAL).exists(), "what it resumes to is known"
    sweep._prepare(project, second)
    git(project, "commit", "--allow-empty", "-qm", "more")
    assert second.folder == first.folder
    (found,) = gc.collect(project, dry_run=False, everything=False)
    assert found.kept_for == gc.UNFINISHED
    assert second.folder.exists()


@pytest.mark.parametrize("by", ["signal", "close"])
def test_stopping_a_sweep_ends_the_trials_that_run_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    chosen = [sweep.Trial(number=n, values={"seed": n}, folder=tmp_path / str(n)) for n in (1, 2, 3)]
    for trial in chosen:
        package = trial.folder / "src/nightshift/pipeline"
        package.mkdir(parents=True)
        ends = "raise SystemExit('done')" if by == "close" and trial.number == 1 else "time.sleep(600)"
        (package / "sweep.py").write_text(f"import time\nopen('begun', 'w').close()\n{ends}\n")
    monkeypatch.setattr(sweep, "_prepare", lambda root, trial: None)
    outcomes = sweep.run(tmp_path, chosen, jobs=1)
    if by == "signal":
        threading.Thread(target=interrupt_after, args=(tmp_path / "1/begun",)).start()
        with pytest.raises(KeyboardInterrupt), contextlib.closing(outcomes):
            next(outcomes)
    else:
        with contextlib.closing(outcomes):
            assert next(outcomes).error == "done"
            wait_for(tmp_path / "2/begun")
    assert not (tmp_path / "3/begun").exists()


def stub(folder: Path, program: str) -> None:
    """A trial that does only this."""
    package = folder / "src/nightshift/pipeline"
    package.mkdir(parents=True)
    (package / "sweep.py").write_text(f"import json, os, pathlib, time\nopen('begun', 'w').close()\n{program}\n")


MEETS = """
assert "RAY_ADDRESS" not in os.environ, "a trial runs on its node alone"
while not all(pathlib.Path("..", name, "begun").exists() for name in ("1", "2")):
    time.sleep(0.05)
pathlib.Path("reports/evaluation").mkdir(parents=True)
report = {"best": "sft", "candidates": [{"name": "sft", "overall": {"successes": 3, "episodes": 4}}]}
pathlib.Path("reports/evaluation/evaluation.json").write_text(json.dumps(report))
pathlib.Path(".state").mkdir()
pathlib.Path(".state/trial.json").write_text('{"run_id": "0123"}')
"""
"""Ends when another trial runs at the same time."""


def on_cluster(project: Path, monkeypatch: pytest.MonkeyPatch, programs: list[str]) -> list[sweep.Trial]:
    monkeypatch.setattr(sweep, "_prepare", lambda root, trial: None)
    trials = [
        sweep.Trial(number=n, values={"seed": n}, folder=project / "trials" / str(n))
        for n in range(1, len(programs) + 1)
    ]
    for trial, program in zip(trials, programs, strict=True):
        stub(trial.folder, program)
    return trials


@pytest.mark.usefixtures("shared_ray")
def test_on_a_cluster_trials_run_side_by_side_as_many_as_there_is_room_for(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = on_cluster(project, monkeypatch, [MEETS, MEETS, "raise SystemExit('it failed')"])
    outcomes = list(sweep.run(project, chosen, jobs=0))
    assert [outcome.success for outcome in outcomes] == [Rate(3, 4), Rate(3, 4), None]
    assert outcomes[2].error == "it failed"


@pytest.mark.usefixtures("shared_ray")
def test_stopping_a_sweep_on_a_cluster_ends_its_trials_and_a_second_sweep_is_refused_until_then(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "open('process', 'w').write(str(os.getpid()))\nos.rename('process', 'ready')\ntime.sleep(600)"
    chosen = on_cluster(project, monkeypatch, ["raise SystemExit('done')", waits])
    with contextlib.closing(sweep.run(project, chosen, jobs=0)) as outcomes:
        assert next(outcomes).error == "done"
        wait_for(chosen[1].folder / "ready")
        with pytest.raises(Busy, match=f"another sweep \\(process {os.getpid()}\\) is running"):
            next(sweep.run(project, chosen, jobs=0))
    assert not psutil.pid_exists(int((chosen[1].folder / "ready").read_text()))


def interrupt_after(path: Path) -> None:
    wait_for(path)
    os.kill(os.getpid(), signal.SIGINT)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_an_experiment_of_dvc_runs_a_stage_with_another_number(project: Path) -> None:
    packages.record(project, graph.load(project))  # as `make setup` does
    for name, value in (("user.name", "test"), ("user.email", "test@localhost")):
        git(project, "config", name, value)
    dvc(project, "repro", "states")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "states")
    assert "Running stage 'states'" in dvc(project, "exp", "run", "-S", "states.validation_share=0.5", "states")
    assert config.load(project / paths.PARAMS).states.validation_share == 0.5
    made_with = config.read_yaml(project / paths.DVC_LOCK)["stages"]["states"]["params"][str(paths.PARAMS)]
    assert made_with["states"]["validation_share"] == 0.5
