"""The report of a run: what it says, that it is kept, and that a real browser shows it on every screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_reports, mlflow_tracking, model_versions
from nightshift.cli import report_commands
from nightshift.envs.fake import FAKE
from nightshift.errors import DataError, DeviceError, ProjectError, RolloutError
from nightshift.pipeline.job import Job
from nightshift.pipeline.report import nights, page, record, svg, templating, writing
from nightshift.pipeline.report.facts import Facts, gather
from nightshift.pipeline.report.record import Failure, RunRecord
from nightshift.pipeline.run import Session, StageResult, ensure, run_stage
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths, quiet_nights
from nightshift.reports.gate import Verdict
from nightshift.rollouts.local import LocalPool
from nightshift.stages import evaluate, register
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired
from nightshift.telemetry import interventions, usage
from nightshift.types import RolloutRequest, Trajectory
from tests.browser import Page, browser
from tests.conftest import add_store, edit, git, leave_skipped, make_project
from tests.rollouts.parts import Seeing

STARTED = datetime(2026, 1, 31, 2, 0, tzinfo=UTC)
HISTORY = {
    "algorithm": "grpo",
    "iterations": [{"rollout/success": 0.1 * i, "update/kl": 0.02 * i} for i in range(1, 7)],
    "validation": [{"iteration": i, "successes": 4 + i, "episodes": 10} for i in (0, 3, 6)],
    "kept": 6,
    "kl_limit": 0.06,
}
WIDTHS = (390, 1280, 1920)


class Solving(LocalPool):
    """The fake simulator with pictures; candidate number k solves the init states that `solved[k]` names."""

    def __init__(self, env: config.Env, *solved: set[int]) -> None:
        super().__init__(env, make_fleet=Seeing())
        self._solved = solved
        self._played = 0

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        solved = self._solved[self._played % len(self._solved)]
        self._played += 1
        for index, trajectories in super().run(requests, policy):
            yield index, [replace(t, success=requests[index].init_state in solved) for t in trajectories]


def leave(name: str, seed: int, history: object = None) -> None:
    """As a training stage does, with weights of its own."""
    import torch

    torch.manual_seed(seed)
    with files.new_folder(paths.MODELS / name) as folder:
        policies.save(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[4], chunk=1, action_dim=7), folder)
        if history:
            files.write_json(folder / paths.HISTORY, history)


def night(root: Path, seed: int, *solved: set[int]) -> None:
    """Evaluate and register a clone and a trained policy, in one parent run, as a night does."""
    leave("sft", seed)
    leave("rloo", seed + 1, HISTORY)
    leave_skipped("rlpd")
    params = config.load(root / paths.PARAMS)
    pool = Solving(params.env, *solved)
    with Session(root) as session:

        @contextmanager
        def job(stage: str) -> Iterator[Job]:
            fingerprint = f"{stage}-{seed}"
            with session.tracking.stage(stage, fingerprint, {}) as tracker:
                yield Job(
                    stage=stage,
                    fingerprint=fingerprint,
                    state=root / ".state" / fingerprint,
                    tracker=tracker,
                    pool=lambda env: pool,
                    machine=params.machine,
                    commit="0123456789ab",
                )

        with job("evaluate") as evaluating:
            evaluate.run(evaluating, env=params.env, evaluate=params.evaluate)
        with job("register") as registering:
            register.run(registering, register=params.section("register"))


QUIET: dict[quiet_nights.Outcome, str] = {
    "idle": "nothing to do",
    "missed": "a night was missed: 9.0 h late",
    "refused": "another run (process 7) is working in /home/robot/a-folder-with-a-long-name",
    "failed": "MLflow does not answer",
}


def ran(*stages: str, failure: Failure | None = None) -> RunRecord:
    results = tuple(StageResult(stage=stage, status="ran", seconds=12.5) for stage in stages)
    return RunRecord(started=STARTED, seconds=187.0, stages=results, failure=failure)


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Iterator[Path]:
    """A project whose second night has other params and beats the champion of the first one."""
    root = make_project(tmp_path_factory.mktemp("nights") / "project")
    add_store(root, migrated_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
        edit(root, "evaluate", films=2)
        night(root, 0, {0, 1, 2}, {0, 1, 2, 3, 4})
        edit(root, "rloo", iterations=6)
        night(root, 2, {0, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 9})
        record.write(root, ran(*Session(root).graph))
        yield root


@pytest.fixture
def facts(two_nights: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    monkeypatch.chdir(two_nights)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{two_nights / paths.MLFLOW_DATABASE}")
    return gather(two_nights)


def plain(html: str) -> str:
    """What a reader sees, without tags, styles and data."""
    body = html.partition("<body>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_the_verdict_is_one_sentence_with_version_rate_and_gain(facts: Facts) -> None:
    assert (
        plain(page.render(facts))
        .partition("▲ champion")[0]
        .endswith(
            "Version 2 (GRPO) replaces version 1 as champion: it solves 90.0 % of 20 held-out init states, "
            "60.0 points more than the clone. "
        )
    )


def test_the_result_is_compared_with_clone_and_champion_by_intervals_and_paired_tests(facts: Facts) -> None:
    rows = {row["name"]: (row["what"], row["figures"]["successes"]) for row in page.result_rows(facts)}
    assert rows == {
        "SFT": ("clone", 6),
        "GRPO": ("trained from the clone", 18),
        "version 1": ("champion until then", 10),
    }
    tests = {test["name"]: test["figures"] for test in page.paired_tests(facts)}
    assert {name: (t["won"], t["lost"], t["states"]) for name, t in tests.items()} == {
        "GRPO against SFT": (12, 0, 20),
        "GRPO against version 1": (8, 0, 20),
    }
    assert tests["GRPO against version 1"]["p_value"] == 2**-8
    (near, far) = page.task_rows(facts)
    rates = {label: figures["successes"] + far["rates"][label]["successes"] for label, figures in near["rates"].items()}
    assert rates == {"SFT": 6, "GRPO": 18, "version 1": 10}, "task by task"


@pytest.fixture
def joined(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """The tasks near and far come from two suites."""
    homes = {"near": "libero_short", "far": "libero_long"}
    monkeypatch.setattr(FAKE, "benchmark", lambda task: homes[task.name])
    candidates = [
        {**c, "suites": {home: c["tasks"][task] for task, home in homes.items()}}
        for c in facts.evaluation["candidates"]
    ]
    return replace(facts, evaluation={**facts.evaluation, "candidates": candidates})


def test_where_suites_are_joined_each_has_a_row_with_every_policy_also_a_champion_that_played_before(
    joined: Facts,
) -> None:
    assert joined.evaluation[config.CHAMPION] is None, "it played in its own evaluation"
    suites, tasks = page.suite_rows(joined), page.task_rows(joined)
    assert [row["name"] for row in suites] == ["libero_short", "libero_long"]
    assert [row["rates"] for row in suites] == [row["rates"] for row in tasks], "each suite has one task"
    assert set(suites[0]["rates"]) == {"SFT", "GRPO", "version 1"}
    text = plain(page.render(joined))
    assert text.index("libero_short") < text.index("Success per task"), "forty tasks would hide it"


def test_a_version_that_was_champion_already_is_no_promotion(facts: Facts) -> None:
    again = replace(facts, receipt={**facts.receipt, "verdict": Verdict.CHAMPION_ALREADY})
    assert (writing.night(facts)["promoted"], writing.night(again)["promoted"]) == (True, False)
    assert "Version 2 (GRPO) stays champion, for training gave the same weights again" in plain(page.render(again))


def test_a_result_is_not_joined_to_the_registration_of_an_earlier_one(facts: Facts) -> None:
    """After a stop between evaluate and register."""
    outcomes = facts.root / paths.EVALUATION_OUTCOMES
    registered = outcomes.read_bytes()
    episodes = json.loads(registered)
    episodes["rloo"][0]["success"] = not episodes["rloo"][0]["success"]
    try:
        files.write_json(outcomes, episodes)
        found = gather(facts.root)
    finally:
        files.write_bytes(outcomes, registered)
    assert (found.receipt, found.champion) == ({}, None)
    assert "; it was not registered." in plain(page.render(found))


def test_the_champions_rate_is_that_of_this_grid_though_it_has_played_another_one_since(facts: Facts) -> None:
    client = mlflow_tracking.connect(facts.root)
    model, tags = facts.receipt["model"], {registry.GRID: "another", registry.SUCCESSES: "1"}
    first = client.get_model_version(model, "1")
    before = {name: first.tags[name] for name in tags}
    try:
        registry.set_tags(client, first, tags)
        found = gather(facts.root)
    finally:
        registry.set_tags(client, first, before)
    assert page.result_rows(found)[-1]["figures"]["successes"] == 10
    assert writing.night(found)["champion"]["successes"] == 10


def test_a_champion_that_played_in_this_evaluation_is_shown_once_and_without_a_registration_too(facts: Facts) -> None:
    figures, gain = Rate(7, 20).to_json(), Paired(states=20, won=11, lost=0).to_json()
    champion = {"version": "1", "overall": figures, "best_gain": gain}
    films = facts.evaluation["films"]
    played = [{**film, "candidate": "champion"} for film in films if film["candidate"] == "rloo"]
    rematch = replace(
        facts,
        evaluation={**facts.evaluation, "champion": champion, "films": [*films, *played]},
        outcomes={**facts.outcomes, "champion": facts.outcomes["sft"]},
    )
    for found in (rematch, replace(rematch, receipt={}, champion=None)):
        labels = [film["label"] for row in page.film_rows(found) for film in row["films"]]
        assert labels == ["SFT", "GRPO", "version 1"] * 2
        assert [row["figures"]["successes"] for row in page.result_rows(found)] == [6, 18, 7]
        assert page.paired_tests(found)[-1] == {"name": "GRPO against version 1", "figures": gain}
        assert {(m.ours, m.theirs) for m in page.state_maps(found)} == {("GRPO", "SFT"), ("GRPO", "version 1")}


def test_policies_that_are_the_same_have_figures_and_no_comparison(facts: Facts) -> None:
    clone, trained = facts.evaluation["candidates"]
    kept = {**trained, "overall": clone["overall"], "same_policy_as": "sft"}
    champion = {"version": "1", "overall": clone["overall"], "best_gain": trained["gain"], "same_policy_as": "sft"}
    found = replace(
        facts,
        evaluation={**facts.evaluation, "best": "sft", "candidates": [clone, kept], "champion": champion},
        outcomes=dict.fromkeys(["sft", "rloo", "champion"], facts.outcomes["sft"]),
    )
    assert [(row["name"], row["what"]) for row in page.result_rows(found)] == [
        ("SFT", "clone"),
        ("GRPO", "the same policy as SFT, not played again"),
        ("version 1", "champion until then, the same policy as SFT, not played again"),
    ]
    assert not page.paired_tests(found)
    assert "not played again" in page.render(found)


def test_what_changed_since_the_champion_is_named(facts: Facts) -> None:
    assert facts.champion is not None
    assert [(c.name, c.before, c.now) for c in facts.champion.params] == [("rloo.iterations", "12", "6")]
    assert "rloo.iterations" in plain(page.render(facts))


def test_other_data_and_the_commits_since_the_champion_are_named(facts: Facts) -> None:
    client = mlflow_tracking.connect(facts.root)
    first = client.get_model_version(facts.receipt["model"], "1")
    tags = {registry.DATASET: "0123456789abcdef.dir", registry.COMMIT: git(facts.root, "rev-parse", "HEAD").strip()}
    before = {name: first.tags[name] for name in tags}
    git(facts.root, "commit", "-q", "--allow-empty", "-m", "a stiffer gripper")
    try:
        registry.set_tags(client, first, tags)
        found = gather(facts.root)
    finally:
        registry.set_tags(client, first, before)
        git(facts.root, "reset", "-q", "--soft", "HEAD~1")
    text = plain(page.render(found)).partition("What changed since the last champion")[2]
    assert "Another dataset: 0123456789ab →" in text
    assert f"{tags[registry.COMMIT]} → {found.commit} ." in text
    assert "a stiffer gripper" in text
    assert "The same dataset." in plain(page.render(facts))


def test_params_that_change_no_result_are_no_change(facts: Facts) -> None:
    before = (facts.root / paths.PARAMS).read_bytes()
    try:
        edit(facts.root, "machine", workers=3)
        edit(facts.root, "notify", events=[])
        found = gather(facts.root).champion
    finally:
        (facts.root / paths.PARAMS).write_bytes(before)
    assert found and [change.name for change in found.params] == ["rloo.iterations"]


def test_every_init_state_has_a_symbol_and_a_sentence_not_only_a_colour(facts: Facts) -> None:
    against_clone = page.state_maps(facts)[0]
    cells = [cell for _, row in against_clone.rows for cell in row]
    kinds = [kind for kind, _ in cells]
    assert kinds == ["both"] * 3 + ["won"] * 5 + ["neither", "won"]
    assert len(set(templating.SYMBOLS.values())) == len(templating.SYMBOLS)
    assert cells[3][1] == "state 3: GRPO solved it, SFT failed"
    assert (against_clone.counts["won"], against_clone.counts["lost"]) == (6, 0)


def test_films_stand_side_by_side_with_the_champions_of_its_own_evaluation(facts: Facts) -> None:
    """It did not play tonight, and its night and this one failed on other states: the first one is filmed in both."""
    assert facts.evaluation[config.CHAMPION] is None
    shown = {
        (row["task"], row["init_state"]): [(film["label"], film["success"]) for film in row["films"]]
        for row in page.film_rows(facts)
    }
    assert shown == {
        ("far", 0): [("SFT", True), ("GRPO", True), ("version 1", True)],
        ("far", 8): [("SFT", False), ("GRPO", False)],
    }


def test_the_kept_iteration_and_the_kl_limit_are_drawn(facts: Facts) -> None:
    (curve,) = page.curves(facts)
    assert "kept: iteration 6" in curve["success"]
    assert "limit 0.06" in curve["kl"]
    assert "the KL limit ended the update in 3 of 6 iterations" in plain(page.render(facts))


def test_how_much_a_policy_was_helped_is_drawn_and_in_the_table(facts: Facts) -> None:
    seen = {interventions.PER_EPISODE: 2.0, interventions.SHARE: 0.25, interventions.STEPS_BETWEEN: 50.0}
    plain_history = facts.histories["rloo"]
    trained = replace(plain_history, iterations=[{**row, **seen} for row in plain_history.iterations], control_hz=20)
    learned = replace(facts, histories={"rlpd": trained})
    (curve,) = page.curves(learned)
    words = ["interventions per episode", "intervened steps (%)", "seconds between interventions, at least"]
    assert list(curve["interventions"]) == words
    assert curve["rows"][1][-1] == [2.0, 25.0, 2.5]
    assert all(f"{one.capitalize()}, training." in plain(page.render(learned)) for one in words)
    (unhelped,) = page.curves(facts)
    assert not unhelped["interventions"]


def test_what_a_stage_used_of_the_machine_is_shown(facts: Facts) -> None:
    samples: list[dict[str, float]] = [
        {"gpu/0/utilisation_percent": 80.0, "gpu/0/memory_mib": 2048.0, "loss": 1.0, "step": 1},
        {"step": 2},
        {"gpu/0/utilisation_percent": 60.0, "gpu/0/memory_mib": 1024.0},
    ]
    used = {"sft": {usage.CPU_SECONDS: 30.0, usage.GPU_JOULES: 7200.0, **usage.of_gpus(samples)}}
    rows = page.stage_rows(replace(facts, used=used, seconds={"sft": 20.0}))
    (sft,) = [row for row in rows if row.stage == "sft"]
    assert (sft.cores, sft.gpu, sft.watt_hours) == (1.5, "70 %, 2.0 GiB", 2.0)
    assert usage.of_gpus([{"loss": 1.0}]) == {}


def test_counters_of_the_machine_only_grow() -> None:
    before = usage.read()
    np.linalg.eigvals(np.random.default_rng(0).normal(size=(150, 150)))
    assert set(before) >= {usage.CPU_SECONDS}
    assert all(value >= 0 for value in usage.since(before).values())
    assert usage.since({usage.CPU_SECONDS: before[usage.CPU_SECONDS] + 1e9}) == {}, "it went back"


def test_a_failed_run_says_which_stage_why_and_what_to_do_and_shows_nothing_of_an_earlier_run(facts: Facts) -> None:
    failure = Failure.of(RolloutError("a simulator <worker> died", "run again"), "rloo")
    record.write(facts.root, ran("states", "collect", "dataset", "sft", failure=failure))
    try:
        failed = gather(facts.root)
    finally:
        record.write(facts.root, ran(*Session(facts.root).graph))
    html = page.render(failed)
    text = plain(html)
    assert "The run stopped in rloo: a simulator &lt;worker&gt; died." in text
    assert "What to do: run again" in text
    assert "✖ failed" in text
    assert not failed.evaluation and not failed.histories, "results of another run"
    assert 'id="result"' not in html


def test_a_run_that_was_refused_is_told_of_above_the_results_of_the_run_before_it(facts: Facts) -> None:
    refusal = ran(failure=Failure.of(DeviceError("torch finds no GPU", "set machine.device: auto"), ""))
    record.write(facts.root, replace(refusal, started=STARTED.replace(day=30)))
    try:
        refused = gather(facts.root)
    finally:
        record.write(facts.root, ran(*Session(facts.root).graph))
    text = plain(page.render(refused))
    assert "The run stopped before its first stage: torch finds no GPU." in text
    assert "The run of Friday 30 January 2026, 02:00 UTC was refused" in text
    assert "What to do: set machine.device: auto" in text
    assert "Version 2 (GRPO) replaces version 1 as champion" in text
    assert page.result_rows(refused) == page.result_rows(facts)
    row = writing.night(refused)
    assert (row["mark"], row["success"], row["version"]) == ("failed", None, ""), "it has no results of its own"
    assert gather(facts.root).refusal is None, "a run followed that was not refused"


def test_a_run_that_stopped_between_two_stages_blames_neither(facts: Facts) -> None:
    stopped = ran("states", "collect", failure=Failure.of(ProjectError("params.yaml was edited"), ""))
    text = plain(page.render(replace(facts, record=stopped)))
    assert "The run stopped after collect: params.yaml was edited." in text
    assert "✖ The run stopped between two stages" in text


def test_an_error_that_is_not_ours_still_gets_a_next_step() -> None:
    failure = Failure.of(ZeroDivisionError("division by zero"), "sft")
    assert failure.what == "ZeroDivisionError: division by zero"
    assert "nightshift run" in failure.next_step


def test_the_report_of_a_project_without_results_says_so(project: Path) -> None:
    text = plain(page.render(gather(project)))
    assert "Nothing has been evaluated yet." in text


@pytest.fixture
def tracked(project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    return project


def test_a_stage_that_ran_leaves_what_it_used_of_the_machine(tracked: Path) -> None:
    with Session(tracked) as session:
        run_stage("choose", session)
    assert gather(tracked).used["choose"][usage.CPU_SECONDS] >= 0
    assert gather(tracked).used["sft"] == {}


def test_a_report_is_written_when_a_stage_fails_and_kept_by_dvc_and_mlflow(tracked: Path) -> None:
    with Session(tracked) as session:
        with pytest.raises(DataError), writing.reporting(session) as kept:
            session.current_stage = "sft"
            raise DataError("the demos are damaged", "rm -r data/demos")
        (address,) = kept
        stored = mlflow_reports.nights(tracked, tracked / ".state")
        reasons = session.store.reasons("states")
    assert "the demos are damaged" in (tracked / paths.REPORT).read_text()
    assert (tracked / f"{paths.REPORT}.dvc").exists()
    assert reasons == ("never run",), "a report makes no stage stale"
    ((stamp, row),) = stored[0].reports.items()
    assert row["mark"] == "failed"
    assert address.endswith(f"/artifacts/report/{stamp}.html")
    git(tracked, "add", "-A")
    assert "reports/report.html.dvc" in git(tracked, "diff", "--cached", "--name-only").splitlines()


def test_what_refuses_a_run_before_its_first_stage_is_blamed_on_no_stage(tracked: Path) -> None:
    record.write(tracked, ran("states", "collect"))
    edit(tracked, "machine", free_disk_gb=1.0e9)
    with Session(tracked) as session, pytest.raises(ProjectError, match="free_disk_gb"), writing.reporting(session):
        ensure("states", session)
    found = gather(tracked)
    assert found.refusal and found.refusal.failure and found.refusal.failure.stage == ""
    assert found.record and [result.stage for result in found.record.stages] == ["states", "collect"]
    assert "free_disk_gb" in (tracked / paths.REPORT).read_text()


def test_a_refusal_is_not_told_any_more_once_a_run_was_let_through_that_found_nothing_to_do(tracked: Path) -> None:
    record.write(tracked, ran(failure=Failure(stage="", what="the disk is full", next_step="")))
    with Session(tracked) as session, writing.reporting(session):
        session.results.append(StageResult(stage="states", status="cached", seconds=0.1))
    assert gather(tracked).refusal is None
    assert "the disk is full" not in (tracked / paths.REPORT).read_text()


@pytest.mark.parametrize("current", ["dataset", ""])
def test_a_run_that_changed_nothing_or_was_interrupted_leaves_the_report_alone(tracked: Path, current: str) -> None:
    """Interrupted in a stage, or between two."""
    with Session(tracked) as session:
        with writing.reporting(session):
            session.results.append(StageResult(stage="states", status="cached", seconds=0.1))
        with pytest.raises(KeyboardInterrupt), writing.reporting(session):
            session.results.append(StageResult(stage="collect", status="ran", seconds=0.1))
            session.current_stage = current
            raise KeyboardInterrupt
    assert not (tracked / paths.REPORT).exists()


def test_a_report_that_cannot_be_written_does_not_hide_the_error_of_the_run(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Path) -> Facts:
        raise OSError("no space left on device")

    monkeypatch.setattr(writing, "write", broken)
    with Session(tracked) as session, pytest.raises(DataError, match="damaged"), writing.reporting(session):
        raise DataError("the demos are damaged")
    assert "the report was not written: no space left on device" in caplog.text


def test_a_report_that_mlflow_did_not_take_is_said_to_be_written(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unanswered(*_: object) -> None:
        raise OSError("MLflow does not answer")

    monkeypatch.setattr(mlflow_reports, "keep", unanswered)
    with Session(tracked) as session, pytest.raises(DataError), writing.reporting(session):
        raise DataError("the demos are damaged")
    assert (tracked / paths.REPORT).exists()
    assert "the report is in reports/report.html, but" in caplog.text
    assert "not written" not in caplog.text


def test_the_report_does_not_count_as_a_change_of_the_code(tracked: Path) -> None:
    (tracked / "reports").mkdir()
    pointer = tracked / f"{paths.REPORT}.dvc"
    pointer.write_text("one")
    git(tracked, "add", "-A")
    git(tracked, "commit", "-q", "-m", "report")
    pointer.write_text("two")
    assert not Session(tracked).commit.endswith("+")


def test_all_nights_are_one_row_each_with_or_without_a_report(facts: Facts) -> None:
    writing.write(facts.root)
    (newest,) = model_versions.runs(facts.root, 1)
    mlflow_reports.keep(facts.root, newest.run_id, ran().stamp, facts.root / paths.REPORT, writing.night(facts))
    index = nights.write(facts.root).read_text()
    assert index.count("<tr>") == 1 + 2, "a head and two nights"
    assert 'href="20260131T020000Z.html"' in index
    assert "Sat 31 Jan, 02:00" in index
    assert "no report" in index
    assert "version 1 (rloo) becomes champion: there was none" in index
    assert (facts.root / paths.NIGHTS / "20260131T020000Z.html").read_text().startswith("<!doctype html>")


@pytest.fixture
def quiet(facts: Facts) -> Iterator[None]:
    for outcome, why in QUIET.items():
        quiet_nights.add(facts.root, datetime.now(UTC), outcome, why)
    yield
    (facts.root / paths.QUIET_NIGHTS).unlink()


@pytest.mark.usefixtures("quiet")
def test_nights_without_a_run_in_mlflow_have_a_row_and_others_no_second_one(facts: Facts) -> None:
    first = model_versions.runs(facts.root, model_versions.EVERY)[-1]
    quiet_nights.add(facts.root, first.started.astimezone(UTC), "failed", "of a night with a run in MLflow")
    index = nights.write(facts.root).read_text()
    assert index.count("<tr>") == 1 + 2 + len(QUIET)
    assert all(why in index for why in QUIET.values())
    assert "of a night with a run" not in index


def test_the_commands_write_the_pages_and_say_where(facts: Facts, capsys: pytest.CaptureFixture[str]) -> None:
    report_commands.report()
    report_commands.all_nights()
    said = capsys.readouterr().out
    assert "Version 2 (GRPO) replaces version 1 as champion" in said
    for page_ in (paths.REPORT, paths.NIGHTS / nights.INDEX):
        assert str(page_) in said
        assert (facts.root / page_).exists()


def test_the_trend_has_nights_of_one_grid_only() -> None:
    def one(day: int, grid: str, successes: int, mark: str) -> nights.Night:
        return nights.Night(
            started=STARTED.replace(day=day),
            seconds=60.0,
            mark=mark,
            promoted=mark == "champion",
            verdict="",
            changed="",
            rate=Rate(successes, 20),
            champion=Rate(10, 20),
            grid=grid,
            commit="",
            page="",
        )

    drawn = nights.trend([one(3, "b", 15, "champion"), one(2, "b", 9, "challenger"), one(1, "a", 3, "champion")])
    assert "success of 2 nights" in drawn
    assert "02 Jan" in drawn and "01 Jan" not in drawn
    assert nights.trend([]) is None
    stays = replace(one(4, "b", 15, "champion"), promoted=False)
    assert nights.trend([stays, one(3, "b", 15, "champion")]).count(svg._MARKS["triangle"]) == 1, "it became so once"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_the_report_without_scrolling_sideways_errors_or_network(
    facts: Facts, tab: Page, tmp_path: Path, width: int
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.render(facts))
    tab.open(file, width)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints() == []
    assert tab.requests() == []
    assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    films = tab.evaluate("[...document.querySelectorAll('video')].map(v => [v.videoWidth > 0, v.error === null])")
    assert films == [[True, True]] * 5
    outside = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.evaluate(f"{outside}.map(e => e.outerHTML.slice(0, 80))") == []


LONG_NAME = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_a_browser_has_room_for_long_names_of_tasks_and_keeps_the_cells_of_maps_square(
    joined: Facts, tab: Page, tmp_path: Path, width: int
) -> None:
    file = tmp_path / "report.html"
    file.write_text(re.sub(r"\bfar\b", LONG_NAME.replace("_", " "), page.render(joined)))
    tab.open(file, width)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    lines = "[...document.querySelectorAll('.rates tbody th')].map(e => e.getBoundingClientRect().height / 22)"
    assert max(tab.evaluate(lines)) < 5, "the name is not squeezed into a narrow column"
    cells = "[...document.querySelectorAll('.map td')].map(e => e.getBoundingClientRect())"
    assert tab.evaluate(f"{cells}.every(cell => cell.height < 1.5 * cell.width)")


@pytest.mark.usefixtures("quiet")
def test_a_browser_shows_the_page_of_all_nights(facts: Facts, tab: Page) -> None:
    index = nights.write(facts.root)
    for width in WIDTHS:
        tab.open(index, width)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert (tab.complaints(), tab.requests()) == ([], [])
    links = tab.evaluate("[...document.querySelectorAll('main a')].map(a => a.getAttribute('href'))")
    assert all((index.parent / link).exists() for link in links)


def test_the_report_can_be_read_with_a_keyboard_and_by_a_screen_reader(facts: Facts, tab: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.render(facts))
    tab.open(file, 1280)
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the report"
    unnamed = "[...document.querySelectorAll('svg[role=img], video')].filter(e => !e.getAttribute('aria-label'))"
    assert tab.evaluate(f"{unnamed}.length") == 0
    assert tab.evaluate("[...document.images].every(image => image.alt)")
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    broken = "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href')))"
    assert tab.evaluate(f"{broken}.length") == 0


def test_the_report_prints_stills_instead_of_films(facts: Facts, tab: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.render(facts))
    tab.open(file, 1280)
    tab.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    tab.as_printed()
    shown = "[...document.querySelectorAll('{}')].map(e => e.checkVisibility())"
    assert tab.evaluate(shown.format("video")) == [False] * 5
    assert tab.evaluate(shown.format(".strip")) == [True] * 5


def test_night_rows_are_plain_json(facts: Facts) -> None:
    row = writing.night(facts)
    assert json.loads(json.dumps(row)) == row
    assert (row["mark"], row["changed"], row["version"]) == ("champion", "1 param, code", "2")
