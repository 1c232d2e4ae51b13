"""The commands on models and runs, on a real SQLite registry in which three nights have registered versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nightshift import config, files
from nightshift.adapters import mlflow_registration, mlflow_registry, mlflow_tracking, model_versions
from nightshift.adapters.mlflow_tracking import Tracking
from nightshift.adapters.tracking import by_name
from nightshift.cli import compare_command, model_commands
from nightshift.config import CHAMPION
from nightshift.errors import RegistryError
from nightshift.project import paths
from nightshift.telemetry import metric_names
from nightshift.telemetry.console import console
from tests.adapters.test_mlflow_registry import episodes, proposal
from tests.conftest import add_store, edit, git, make_project

Told = Callable[..., str]
MODEL = "nightshift-libero-mini"
RESULTS = ("sssss" + "f" * 5, "s" * 10, "s" * 9 + "f")
"""Of three nights: the first becomes champion, the second replaces it, the third does not."""


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    root = make_project(tmp_path_factory.mktemp("models") / "project")
    add_store(root, migrated_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
        for number, results in enumerate(RESULTS, start=1):
            edit(root, "sft", steps=100 * number)
            register_night(root, number, results)
    return root


def register_night(root: Path, number: int, results: str, grid: str = "grid", code: str = "code") -> None:
    commit = git(root, "rev-parse", "--short=12", "HEAD").strip()
    tags = {
        mlflow_registry.DATASET: f"{number}abcdef0123456789.dir",
        mlflow_registry.DATASET_EPISODES: "8",
        mlflow_registry.COMMIT: commit,
        **({mlflow_registry.STARTED_FROM: str(number - 1)} if number > 1 else {}),
    }
    track = Tracking(root, config.load(root / "params.yaml"), commit, code=f"night {number}")
    with track.stage("evaluate", f"evaluation-{number}", {}) as tracker:
        tracker.artifact(evaluation(root, grid, code, results))
    with track.stage("register", f"night-{number}", {}):
        done = mlflow_registration.register(
            root, proposal(root, MODEL, f"night-{number}", results, tags=tags, grid=grid, code=code)
        )
    values = {metric_names.SUCCESS: results.count("s") / len(results), metric_names.PROMOTED: CHAMPION in done.aliases}
    track.publish(values, {"model.version": done.version}, done.reason)
    track.close("FINISHED")


def evaluation(root: Path, grid: str, code: str, results: str) -> Path:
    """What the stage `evaluate` leaves of these outcomes."""
    with files.new_folder(root / paths.EVALUATION) as folder:
        played = {"digest": grid, "code": code, "suite": "fake"}
        report = {"grid": played, "conditions": {"horizon": len(grid)}, "best": "rloo"}
        files.write_json(folder / paths.EVALUATION_REPORT.name, report)
        files.write_json(folder / paths.EVALUATION_OUTCOMES.name, {"rloo": episodes(results)})
    return root / paths.EVALUATION


@pytest.fixture(autouse=True)
def _inside(nights: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test does to the aliases is undone."""
    monkeypatch.chdir(nights)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{nights / paths.MLFLOW_DATABASE}")
    yield
    client = mlflow_tracking.connect(nights)
    client.set_registered_model_alias(MODEL, CHAMPION, "2")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """What a command prints on a terminal of 80 columns."""
    monkeypatch.setattr(console, "width", 80)

    def run(command: Callable[..., None], *arguments: object) -> str:
        command(*arguments)
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert "…" not in printed, "a column was cut off"
        return printed

    return run


def test_models_shows_at_once_which_version_is_champion_and_why(told: Told) -> None:
    shown = told(model_commands.models)
    rows = [line for line in shown.splitlines() if re.search(r"\d{4}-\d\d-\d\d", line) and "%" in line]
    assert [row.startswith("★") for row in rows] == [False, True, False], "newest first"
    assert re.search(r"★ +2 +rloo +100\.0 % +72\.2 to 100\.0 +10/10 +\d{4}-\d\d-\d\d +champion", rows[1])
    assert "challenger" in rows[0]
    words = " ".join(shown.split())
    assert "version 2 (rloo) becomes champion: of 10 states valid for both it solved 5" in words
    assert "version 3 (rloo) stays challenger" in words


def test_promoting_and_rolling_back_move_the_champion_and_the_gate_respects_both(nights: Path) -> None:
    assert model_versions.promote(nights, MODEL, "challenger") == ("2", "3")
    assert model_versions.find(nights, MODEL, CHAMPION).reason.startswith("version 3 was promoted by hand on 20")
    assert model_versions.rollback(nights, MODEL) == ("3", "2")
    assert model_versions.rollback(nights, MODEL) == ("2", "1")
    with pytest.raises(RegistryError, match="version 1 had no champion before it, so there is nothing to go back to"):
        model_versions.rollback(nights, MODEL)
    again = mlflow_registration.register(nights, proposal(nights, MODEL, "night-3", "s" * 10))
    assert (again.version, again.champion) == ("3", "1")
    assert again.reason.startswith("version 3 (rloo) stays challenger: it was withdrawn by hand on 20")
    model_versions.promote(nights, MODEL, "3")
    assert model_versions.find(nights, MODEL, "3").withdrawn == ""
    assert model_versions.promote(nights, MODEL, "3") == ("3", "3"), "nothing to do"
    model_versions.promote(nights, MODEL, "2")


def test_a_rollback_passes_over_a_version_that_was_withdrawn(nights: Path) -> None:
    for version in ("1", "2", "1"):
        model_versions.promote(nights, MODEL, version)
    assert model_versions.rollback(nights, MODEL) == ("1", "2")
    assert model_versions.rollback(nights, MODEL) == ("2", "3"), "2 has replaced 1 since, and 3 before that"
    with pytest.raises(RegistryError, match="version 3 had no champion before it that was not withdrawn or deleted"):
        model_versions.rollback(nights, MODEL)
    model_versions.promote(nights, MODEL, "2")
    client = mlflow_tracking.connect(nights)
    client.delete_model_version_tag(MODEL, "1", mlflow_registry.WITHDRAWN)
    client.set_model_version_tag(MODEL, "1", mlflow_registry.PREVIOUS, "")


def test_the_commands_say_what_they_did_and_an_unknown_version_which_there_are(nights: Path, told: Told) -> None:
    moved = told(model_commands.promote, "1")
    assert moved == "version 1 of nightshift-libero-mini is champion now in place of version 2\n"
    model_versions.promote(nights, MODEL, "2")
    assert "version 1 of nightshift-libero-mini is champion again; version 2" in " ".join(
        told(model_commands.rollback).split()
    )
    with pytest.raises(RegistryError, match="has no version or alias '9'") as refused:
        model_commands.promote("9")
    assert refused.value.next_step == "choose one of 1, 2, 3, challenger, champion"


def test_lineage_tells_data_code_params_and_the_versions_it_started_from(nights: Path, told: Told) -> None:
    shown = " ".join(told(model_commands.lineage, f"{MODEL}/3").split())
    commit = git(nights, "rev-parse", "--short=12", "HEAD").strip()
    for words in (
        f"{MODEL} version 3 (challenger)",
        "dataset 3abcdef0123456789.dir, 8 episodes",
        f"code {commit}",
        "started from version 2",
        "params changed since it: sft.steps 200 → 300",
        f"{MODEL} version 1",
        "started from scratch",
    ):
        assert words in shown, words


def test_lineage_tells_the_params_of_every_version_also_of_one_from_scratch(told: Told) -> None:
    shown = " ".join(told(model_commands.lineage, f"{MODEL}/1").split())
    assert "params env.suite fake, policy.family gaussian_mlp, algorithms ['rloo'], start scratch, seed 0 " in shown
    assert "params.yaml is the same now but for sft.steps 100 (now 300)" in shown
    newest = " ".join(told(model_commands.lineage, f"{MODEL}/3").split())
    assert "params.yaml is the same now (machine, nightly and notify are not compared) run" in newest


def test_lineage_does_not_count_a_parameter_that_was_added_since(nights: Path) -> None:
    now = by_name(config.load(nights / paths.PARAMS))
    del now["sft.learning_rate"]
    assert model_commands._since(nights, now).startswith("is the same now (")


def test_lineage_of_every_version_is_told_where_params_yaml_is_broken(nights: Path, told: Told) -> None:
    before = (nights / paths.PARAMS).read_text()
    (nights / paths.PARAMS).write_text("sft: [\n")
    try:
        shown = " ".join(told(model_commands.lineage, f"{MODEL}/3").split())
    finally:
        (nights / paths.PARAMS).write_text(before)
    assert shown.count("params.yaml cannot be compared: ") == 3
    assert "started from scratch" in shown


def test_lineage_says_so_where_the_run_with_the_params_is_gone(nights: Path, told: Told) -> None:
    client = mlflow_tracking.connect(nights)
    run = client.get_model_version(MODEL, "1").tags[mlflow_registry.PIPELINE_RUN]
    client.delete_model_version_tag(MODEL, "1", mlflow_registry.PIPELINE_RUN)
    try:
        assert "params unknown: its run is gone" in " ".join(told(model_commands.lineage, f"{MODEL}/1").split())
    finally:
        client.set_model_version_tag(MODEL, "1", mlflow_registry.PIPELINE_RUN, run)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("champion", ("mine", "champion")),
        ("7", ("mine", "7")),
        ("other@challenger", ("other", "challenger")),
        ("other/3", ("other", "3")),
        ("other", ("other", "champion")),
        ("@champion", ("mine", "champion")),
    ],
)
def test_a_version_is_named_as_in_mlflow_or_shorter(what: str, expected: tuple[str, str]) -> None:
    assert model_commands.split_name(what, "mine") == expected


def test_runs_shows_results_versions_and_changed_params_newest_first(told: Told) -> None:
    shown = told(model_commands.runs, 20).splitlines()
    rows = [line for line in shown if "finished" in line]
    assert [row.split("%")[0].split()[-1] for row in rows] == ["90.0", "100.0", "50.0"]
    assert [row.rstrip()[-3:].strip() for row in rows] == ["3", "2 ★", "1 ★"]
    assert any("sft.steps 200 → 300" in line for line in shown)


def test_compare_is_paired_where_the_grids_match(told: Told) -> None:
    shown = told(compare_command.compare, "champion", "1")
    assert "version 2 against version 1 on the same grid" in shown
    assert re.search(r"all +10 +5 +0 +\+50\.0 .* 0\.031", shown)
    assert "params of version 2 that differ: sft.steps 100 → 200" in " ".join(shown.split())


def test_compare_takes_runs_by_the_beginning_of_their_id_or_by_name(nights: Path, told: Told) -> None:
    _, second, _ = model_versions.runs(nights, 20)
    shown = told(compare_command.compare, second.run_id[:8], "1")
    assert f"run {second.run_id[:8]} against version 1 on the same grid" in shown
    assert re.search(r"all +10 +5 +0 +\+50\.0 .* 0\.031", shown)
    assert f"params of run {second.run_id[:8]} that differ: sft.steps 100 → 200" in " ".join(shown.split())
    with pytest.raises(RegistryError, match="there is no version, run or model 'zzz'"):
        compare_command.compare("zzz", "1")


def test_compare_says_what_differs_where_grids_do_and_gives_unpaired_intervals(nights: Path, told: Told) -> None:
    edit(nights, "sft", steps=400)
    register_night(nights, 4, "s" * 20, grid="another")
    newest, *_, oldest = model_versions.runs(nights, 20)
    shown = told(compare_command.compare, newest.run_id, oldest.run_id)
    words = " ".join(shown.split())
    assert "not compared state by state, since they have not played the same grid of init states" in words
    assert "horizon 4 → 7, 10 → 20 init states" in words
    assert re.search(r"all +100\.0 % +50\.0 % +\+50\.0 +\+19\.1 to \+76\.3", shown), shown
    unknown = " ".join(told(compare_command.compare, "4", "champion").split())
    assert "not compared state by state" in unknown
    forget_newest(nights)


def test_compare_does_not_pair_episodes_on_one_grid_that_other_code_played(nights: Path, told: Told) -> None:
    register_night(nights, 5, "s" * 10, code="edited")
    newest, *_, oldest = model_versions.runs(nights, 20)
    version = max(model_versions.versions(nights, MODEL), key=lambda each: int(each.version)).version
    for ours, theirs in ((version, "1"), (newest.run_id, oldest.run_id)):
        words = " ".join(told(compare_command.compare, ours, theirs).split())
        assert "not compared state by state, since their episodes on the same grid were played by other code" in words
        assert "same states" not in words
    assert f"version {version} against run" in told(compare_command.compare, version, newest.run_id)
    forget_newest(nights)


def forget_newest(nights: Path) -> None:
    """The version and the run that a test has added."""
    client = mlflow_tracking.connect(nights)
    client.delete_model_version(
        MODEL, max(model_versions.versions(nights, MODEL), key=lambda v: int(v.version)).version
    )
    client.delete_run(model_versions.runs(nights, 1)[0].run_id)
    client.set_registered_model_alias(MODEL, "challenger", "3")
