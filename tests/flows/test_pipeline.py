"""The flow on a real Prefect server: one task per stage, states and artifacts; no stage does real work here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterTimestamp
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.states import Completed, Pending, Running, Scheduled
from pydantic import BaseModel, model_serializer

from flows import lifecycle
from flows.lifecycle import REFUSED
from flows.local import deployments
from flows.nightly import NOTHING_TO_DO, nightly
from flows.pipeline import pipeline
from flows.server import ADDRESS
from nightshift import config
from nightshift.adapters.dvc_store import StageStatus
from nightshift.cli import commands
from nightshift.errors import Busy, ConfigError, DataError, ProjectError, RolloutError, Unreachable
from nightshift.pipeline import notify, run
from nightshift.pipeline.run import Session, StageResult
from nightshift.project import graph, paths, quiet_nights
from nightshift.telemetry import progress
from tasks.evaluate import evaluate
from tasks.opponent import opponent
from tests.conftest import REPOSITORY, add_store, choose, edit, make_project
from tests.flows.conftest import PrefectServer
from tests.receiver import SECRET, receiving
from tests.waiting import wait_until

STAGES = [
    *("states", "collect", "dataset", "start", "sft", "choose", "rloo", "rlpd", "opponent", "evaluate", "register")
]


@pytest.fixture(scope="module", autouse=True)
def _server(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Flows of this process talk to the server."""
    results = tmp_path_factory.mktemp("results")
    with temporary_settings({PREFECT_API_URL: prefect_server.url, PREFECT_LOCAL_STORAGE_PATH: results}):
        yield


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project in which ensuring a stage notes its name and does nothing."""
    root = make_project(tmp_path / "project")
    monkeypatch.chdir(root)
    done: list[str] = []

    def ensure(stage: str, session: Session) -> StageResult:
        done.append(stage)
        return StageResult(stage=stage, status="restored" if stage == "sft" else "cached", seconds=0.1)

    monkeypatch.setattr(run, "ensure", ensure)
    return done


def named(name: str) -> FlowRunFilter:
    return FlowRunFilter(name=FlowRunFilterName(any_=[name]))


def runs_of(name: str) -> dict[str, Any]:
    """Task runs by name of the newest flow run of that name."""
    with get_client(sync_client=True) as client:
        return {task.name: task for task in client.read_task_runs(flow_run_filter=named(name))}


def test_the_flow_runs_every_stage_of_dvc_yaml_once_and_in_order(calls: list[str]) -> None:
    results = pipeline.with_options(flow_run_name="in-order")()
    assert calls == STAGES == list(graph.load(REPOSITORY))
    assert [result.stage for result in results] == STAGES


def test_prefect_shows_cached_and_restored_stages_as_such_with_their_artifacts(calls: list[str]) -> None:
    pipeline.with_options(flow_run_name="shown")()
    tasks = runs_of("shown")
    assert {name: task.state_name for name, task in tasks.items()} == {
        stage: "Restored" if stage == "sft" else "Cached" for stage in STAGES
    }
    assert tasks["dataset"].task_inputs["after"], "the graph shows what follows what"
    with get_client(sync_client=True) as client:
        keys = {artifact.key for artifact in client.read_artifacts()}
    assert {f"stage-{stage}" for stage in STAGES} | {"summary", "success"} <= keys


@pytest.mark.slow
def test_prefect_shows_a_training_stage_that_is_not_chosen_as_skipped_and_goes_on(
    tmp_path: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project")
    add_store(root, migrated_store)
    choose(root)
    edit(root, "sft", steps=20)
    edit(root, "evaluate", init_states=2)
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    results = pipeline.with_options(flow_run_name="skipping")()
    skipped = dict.fromkeys((*config.ALGORITHMS, config.START), "skipped")
    assert {r.stage: r.status for r in results} == dict.fromkeys(STAGES, "ran") | skipped
    tasks = runs_of("skipping")
    assert {name: task.state_name for name, task in tasks.items()} == {
        stage: "Skipped" if stage in skipped else "Completed" for stage in STAGES
    }
    assert tasks["rloo"].state.message == "rloo is skipped: not in algorithms"
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=named("skipping"))
    artifacts = {artifact.key: str(artifact.data) for artifact in found}
    assert "| rloo | skipped | " in artifacts["summary"]
    assert [key for key in artifacts if key in ("mlflow-sft", "mlflow-rloo")] == ["mlflow-sft"]
    assert "/artifacts/report/" in artifacts["report"], "the report is linked on the flow's page"
    assert "stays" in (root / paths.REPORT).read_text() or "first champion" in (root / paths.REPORT).read_text()
    with Session(root) as session:
        assert not [reason for stage in STAGES for reason in session.store.reasons(stage)], (
            "a report makes nothing stale"
        )


def test_a_fault_of_a_simulator_or_a_server_is_tried_again_and_any_other_error_is_not(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Exception] = [
        RolloutError("a worker died"),
        Unreachable("MLflow does not answer"),
        ProjectError("the disk is full", "free some space"),
    ]

    def ensure(stage: str, session: Session) -> StageResult:
        calls.append(stage)
        raise faults.pop(0)

    monkeypatch.setattr(run, "ensure", ensure)
    monkeypatch.setattr("tasks.states.states.retry_delay_seconds", [0, 0])
    with pytest.raises(ProjectError, match="the disk is full"):
        pipeline()
    assert calls == ["states", "states", "states"]


def test_a_stage_that_takes_longer_than_its_hours_is_not_tried_again(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure(stage: str, session: Session) -> StageResult:
        calls.append(stage)
        while True:
            time.sleep(0.05)

    monkeypatch.setattr(run, "ensure", ensure)
    monkeypatch.setattr("tasks.states.states.timeout_seconds", 1.0)
    monkeypatch.setattr("tasks.states.states.retry_delay_seconds", [0, 0])
    with pytest.raises(ProjectError, match=r"states took longer than its 0\.000278 h") as refused:
        pipeline()
    assert "it resumes" in refused.value.next_step
    assert len(calls) < 2


@pytest.mark.parametrize(("stopped_in", "key"), [("evaluate", "success"), ("register", "model")])
def test_a_stage_that_was_stopped_shows_nothing_of_an_earlier_run(
    stopped_in: str, key: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure(stage: str, session: Session) -> StageResult:
        if stage == stopped_in:
            raise KeyboardInterrupt
        return StageResult(stage=stage, status="cached", seconds=0.1)

    monkeypatch.setattr(run, "ensure", ensure)
    monkeypatch.setattr("nightshift.pipeline.summary.model_page", lambda root: "http://127.0.0.1:5000/#/models/arm")
    ended: Any = pipeline.with_options(flow_run_name=f"stopped in {stopped_in}")(return_state=True)
    assert (ended.name, calls) == ("Cancelled", [])
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=named(f"stopped in {stopped_in}"))
    assert key not in {artifact.key for artifact in found}


class Interrupted(BaseModel):
    """pydantic turns what the handler of a signal raises here into an error of its own."""

    @model_serializer
    def serialize(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("where", ["nightshift.pipeline.run.ensure", "flows.pipeline.summarise"])
def test_a_signal_that_pydantic_turns_into_an_error_stops_a_run_and_nobody_is_told_of_a_failure(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, lambda *_: Interrupted().model_dump_json())
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        ended: Any = pipeline.with_options(flow_run_name=f"stopped in {where}")(return_state=True)
    assert (ended.name, messages, quiet_nights.read(Path.cwd())) == ("Cancelled", [], [])
    assert "Failed" not in {task.state_name for task in runs_of(f"stopped in {where}").values()}


def test_people_are_told_once_how_a_night_ended_and_the_address_is_written_nowhere(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = datetime.now(UTC)
    edit(Path.cwd(), "notify", events=["failure", "nothing_to_do"])
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        monkeypatch.setattr(run, "ensure", lambda stage, _: StageResult(stage=stage, status="cached", seconds=0.0))
        nightly.with_options(flow_run_name="told")()
        monkeypatch.setattr(run, "ensure", lambda stage, session: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nightly.with_options(flow_run_name="told")()
    assert [message["title"] for message in messages] == ["Nightshift: nothing to do", "Nightshift: the run failed"]
    with get_client(sync_client=True) as client:
        since = LogFilter(timestamp=LogFilterTimestamp.model_validate({"after_": began}))
        logs = [log.message for log in client.read_logs(since)]
    assert logs
    written = [path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()]
    assert not [text for text in [*logs, *map(str, written)] if SECRET in text]


@pytest.mark.usefixtures("calls")
def test_a_failure_in_the_flow_of_the_command_is_told_and_kept_once(
    prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ensure", lambda stage, session: 1 / 0)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back afterwards
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        monkeypatch.setenv(ADDRESS, prefect_server.url)
        with pytest.raises(ZeroDivisionError):
            commands.nightly()
    assert [message["title"] for message in messages] == ["Nightshift: the run failed"]
    assert [night.outcome for night in quiet_nights.read(Path.cwd())] == ["failed"]


def test_a_night_that_another_run_is_in_the_way_of_is_kept(calls: list[str]) -> None:
    with Session(Path.cwd()):
        assert nightly(return_state=True).name == REFUSED
    assert calls == []
    assert [night.outcome for night in quiet_nights.read(Path.cwd())] == ["refused"]


def test_a_night_whose_folder_is_taken_before_its_pipeline_begins_is_refused_and_kept_once(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between its own session, which imports demos, and that of the pipeline."""
    with ExitStack() as stack:
        prepared_then_taken(monkeypatch, stack)
        ended: Any = nightly(return_state=True)
    assert (ended.name, calls) == (REFUSED, [])
    assert "is working in" in ended.message
    assert [night.outcome for night in quiet_nights.read(Path.cwd())] == ["refused"]
    assert not [record for record in caplog.records if record.exc_info], "being refused is no error"


def test_a_command_whose_folder_is_taken_before_its_flow_begins_says_so_and_keeps_the_night_once(
    calls: list[str], prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a Prefect server takes seconds, and another run may begin in them."""
    monkeypatch.setattr(commands, "check_free", lambda root: None)  # it was free then
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back afterwards
    monkeypatch.setattr(commands, "enter", lambda **_: Path.cwd())
    monkeypatch.setenv(ADDRESS, prefect_server.url)
    with ExitStack() as stack, receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        prepared_then_taken(monkeypatch, stack)
        with pytest.raises(Busy, match="is working in") as refused:
            commands.nightly()
    assert refused.value.next_step.startswith("wait for it, or kill ")
    assert (calls, messages) == ([], [])
    assert [night.outcome for night in quiet_nights.read(Path.cwd())] == ["refused"]


def prepared_then_taken(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """A night after whose preparation another run takes the folder."""
    monkeypatch.setattr("nightshift.pipeline.nightly.prepare", lambda root: stack.enter_context(Session(root)) and [])


def test_a_run_whose_stage_fails_leaves_a_report_that_says_so_and_links_it(
    tmp_path: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project")
    add_store(root, migrated_store)
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")

    def broken(*_: Any, **__: Any) -> None:
        raise DataError("the demos are damaged", "rm -r data/demos")

    monkeypatch.setattr("nightshift.stages.dataset.run", broken)
    with pytest.raises(DataError):
        pipeline.with_options(flow_run_name="failing")()
    page = (root / paths.REPORT).read_text()
    assert "The run stopped in dataset: the demos are damaged." in page
    assert "rm -r data/demos" in page
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=named("failing"))
    assert "report" in {artifact.key for artifact in found}


def test_nightly_is_the_pipeline_by_the_clock(calls: list[str]) -> None:
    results: Any = nightly()
    assert [result.stage for result in results] == STAGES


def test_a_night_with_nothing_to_do_ends_so_by_name_and_starts_no_pipeline(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nightshift.pipeline.nightly.statuses", lambda root: [StageStatus(name="sft", reasons=(), follows=())]
    )
    edit(Path.cwd(), "notify", events=["nothing_to_do"])
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        state: Any = nightly(return_state=True)
    assert (state.name, state.is_completed(), calls) == (NOTHING_TO_DO, True, [])
    assert "no new demos" in state.message
    assert [message["title"] for message in messages] == ["Nightshift: nothing to do"]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("died", [False, True])
def test_the_command_tells_once_that_there_is_nothing_to_do_also_after_a_run_that_was_killed(
    died: bool, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(Path.cwd(), "notify", events=["nothing_to_do"])
    fresh = [StageStatus(name="sft", reasons=(), follows=())]
    monkeypatch.setattr("nightshift.pipeline.nightly.statuses", lambda root: fresh)
    monkeypatch.setattr(run, "ensure", lambda stage, _: StageResult(stage=stage, status="cached", seconds=0.1))
    monkeypatch.setattr(commands, "enter", lambda **_: Path.cwd())
    monkeypatch.setenv(ADDRESS, prefect_server.url)
    if died:
        run.LOCK.parent.mkdir(exist_ok=True)
        run.LOCK.write_text("123456\n")
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        commands.nightly()
    assert [message["title"] for message in messages] == ["Nightshift: nothing to do"]


def test_deployments_name_flows_that_exist() -> None:
    deployments = {d["name"]: d for d in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]}
    assert deployments["pipeline"]["entrypoint"] == "flows.pipeline.pipeline"
    assert deployments["nightly"]["entrypoint"] == "flows.nightly.nightly"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("<<<<<<< HEAD\nname: a\n=======\n", "prefect.yaml has an unresolved git conflict in line 1"),
        ("deployments: {pipeline}\n", "prefect.yaml does not state a list of deployments with a name each"),
        ("deployments: [{name: pipeline}]\n", "prefect.yaml does not state the deployment nightly"),
        (
            "deployments: [{name: pipeline, description: a}, {name: nightly, description: b, tags: []}]\n",
            "prefect.yaml does not state tags of pipeline",
        ),
    ],
)
def test_a_damaged_prefect_yaml_is_one_sentence(
    content: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths.PREFECT_YAML.write_text(content)
    with pytest.raises(ConfigError, match=sentence) as refused:
        deployments()
    assert "prefect.yaml" in refused.value.next_step


def test_an_error_of_prefect_in_making_a_deployment_is_not_said_to_be_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("another Prefect")

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("flows.local.Schedule", broken)
    with pytest.raises(TypeError, match="another Prefect"):
        deployments()


def test_a_night_that_is_tried_again_much_later_is_played(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect keeps the time at which it was due."""
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    nightly(catch_up_hours=0.0)
    assert calls == STAGES


def test_a_night_that_can_only_begin_much_later_is_left_out_and_told(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        begun = nightly(catch_up_hours=0.0, return_state=True)
    assert begun.name == "Missed"
    assert calls == []
    assert [(night.outcome, " h late" in night.why) for night in quiet_nights.read(Path.cwd())] == [("missed", True)]
    assert [message["title"] for message in messages] == ["Nightshift: a night was missed"]


def test_prefects_page_shows_iteration_success_and_time_left_while_a_stage_runs(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def ensure(stage: str, session: Session) -> StageResult:
        if stage == "rloo":
            with progress.bar("rloo", total=4) as advance:
                for success in (25, 50):
                    advance(f"success {success}%")
                    seen.append(wait_until(partial(shown_progress, "watched", success)))
        return StageResult(stage=stage, status="cached", seconds=0.0)

    monkeypatch.setattr(run, "ensure", ensure)
    monkeypatch.setattr("tasks._progress.EVERY_SECONDS", 0.01)
    pipeline.with_options(flow_run_name="watched")()
    first, second = seen
    assert first.id == second.id, "one artifact, updated"
    assert first.description.startswith("rloo 1 of 4: success 25%, ")
    assert second.description.startswith("rloo 2 of 4: success 50%, ")
    assert second.description.endswith(" s left")
    assert first.task_run_id == runs_of("watched")["rloo"].id, "the graph shows it at its task"


def shown_progress(name: str, percent: float) -> Any:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=named(name))
    return next((a for a in found if a.key == "progress-rloo" and a.data == percent), None)


def test_a_run_that_was_taken_up_by_a_server_that_died_is_marked_and_one_that_is_scheduled_or_starting_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with get_client(sync_client=True) as client:
        here = [lifecycle.TAKEN_UP_HERE]
        pending = client.create_flow_run(nightly, state=Pending(), tags=here)
        scheduled = client.create_flow_run(nightly, state=Scheduled(), tags=here)
        assert pending.id not in [run.id for run in lifecycle.mark_leftovers(client)], "it may be starting"
        monkeypatch.setattr(lifecycle, "_SECONDS_TO_BEGIN", -60)
        assert pending.id in [run.id for run in lifecycle.mark_leftovers(client)]
        ended, waiting = (client.read_flow_run(run.id).state for run in (pending, scheduled))
    assert ended is not None
    assert waiting is not None
    assert (ended.name, ended.message) == ("Crashed", "its process never began")
    assert waiting.name == "Scheduled", "a night to come, or to be caught up with"


def test_a_task_whose_end_prefect_left_out_since_the_clock_was_set_back_ends_as_its_run_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(pipeline, state=Running())
        client.update_flow_run_labels(run.id, lifecycle._labels())
        tasks = [
            client.create_task_run(task, run.id, dynamic_key="0", state=Running()) for task in (opponent, evaluate)
        ]
        client.set_task_run_state(tasks[0].id, Completed(), force=True)
        lifecycle.mark_leftovers(client)
        assert client.read_task_run(tasks[1].id).state_name == "Running", "its run is at work"
        client.set_flow_run_state(run.id, Completed(), force=True)
        lifecycle.mark_leftovers(client)
        assert client.read_task_run(tasks[1].id).state_name == "Running", "its end may be on its way"
        monkeypatch.setattr(lifecycle, "_SECONDS_TO_ARRIVE", -1)
        lifecycle.mark_leftovers(client)
        ended = client.read_task_run(tasks[1].id).state
    assert ended is not None
    assert (ended.name, ended.message) == ("Completed", "its run has ended")


@pytest.mark.parametrize(
    ("state", "tags"),
    [
        (Running(), [lifecycle.TAKEN_UP_HERE]),
        (Running(), []),
        (Pending(), ["nightshift"]),
        (Pending(), ["nightshift.host=another"]),
    ],
    ids=["running", "running elsewhere", "pending of no machine", "pending on another machine"],
)
def test_a_run_without_labels_that_may_be_of_other_people_or_machines_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, state: State[None], tags: list[str]
) -> None:
    monkeypatch.setattr(lifecycle, "_SECONDS_TO_BEGIN", -60)
    with get_client(sync_client=True) as client:
        theirs = client.create_flow_run(pipeline, state=state, tags=tags)
        assert theirs.id not in [run.id for run in lifecycle.mark_leftovers(client)]
        assert client.read_flow_run(theirs.id).state_name == state.name
