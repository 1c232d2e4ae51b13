"""`nightshift run --from-stage` and `--force-stage`."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.errors import ProjectError
from nightshift.pipeline import run
from nightshift.pipeline.run import FORCED, Choice, Session, StageResult, ensure
from nightshift.project import paths
from tests.conftest import add_store, edit, nightshift


def statuses(root: Path, choice: Choice, *stages: str) -> dict[str, StageResult]:
    with Session(root, choice) as session:
        return {stage: ensure(stage, session) for stage in stages}


def test_a_forced_stage_runs_although_it_is_fresh_and_stages_before_the_first_are_taken_as_they_are(
    project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    statuses(project, Choice(), "states", "choose")
    forced = statuses(project, Choice.of(project, "", ["choose"]), "states", "choose")
    assert {stage: result.status for stage, result in forced.items()} == {"states": "cached", "choose": "ran"}
    assert forced["choose"].reasons == (FORCED,)
    edit(project, "states", per_task=7)
    later = Choice(first="collect", before=("states",))
    assert statuses(project, later, "states")["states"].status == "cached"
    assert statuses(project, Choice(), "states")["states"].status == "ran"
    with pytest.raises(ProjectError, match="data/demos, which collect makes, is not there"):
        Choice.of(project, "dataset", [])


def test_forcing_a_stage_asks_the_registry_for_the_champion_that_it_uses(
    project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    statuses(project, Choice(), "opponent")
    forced = Choice.of(project, "", ["evaluate"])
    assert statuses(project, forced, "opponent")["opponent"].reasons == ("asked again, since evaluate is forced",)
    assert forced.selected(["opponent", "evaluate", "register"], []) == ["opponent", "evaluate"]


def test_plan_shows_that_the_registry_will_be_asked(
    project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    statuses(project, Choice(), "opponent")
    shown = {status.name: status for status in run.statuses(project)}
    assert shown["opponent"].reasons == ("asked again, since evaluate is stale",)
    assert shown["start"].skipped


def test_a_stage_that_does_not_exist_is_refused(project: Path) -> None:
    for option in ("--from-stage", "--force-stage"):
        done = nightshift(project, "run", option, "colect")
        assert done.returncode == 1
        assert "there is no stage 'colect'" in done.stderr
