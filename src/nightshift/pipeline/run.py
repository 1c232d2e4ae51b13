"""Running stages: what Prefect's tasks, `nightshift run` and `dvc repro` all come down to.

Prefect task ─┐                ┌─ fresh in dvc.lock ──────────────► cached
              ├─► ensure ──────┼─ made before, in the run-cache ──► restored
nightshift run┘                ├─ else begin ► run_stage ► commit ► ran
                               └─ params.yaml does not use it ────► skipped
dvc repro ──► nightshift stage X ──► run_stage (DVC itself decides, and commits)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from nightshift import config, files
from nightshift.adapters.tracking import WITHOUT_EFFECT, JsonlTracker, RunKind, Tee, Tracker
from nightshift.errors import Busy, ProjectError
from nightshift.pipeline import results
from nightshift.pipeline.job import Job
from nightshift.project import graph, locks, packages, paths, repository
from nightshift.telemetry import usage
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from filelock import FileLock

    from nightshift.adapters.dvc_store import DvcStore, StageStatus
    from nightshift.adapters.mlflow_tracking import Tracking
    from nightshift.rollouts.base import Pool

STAGES = "nightshift.stages"
"""The package that holds one module per stage of dvc.yaml."""

TIMINGS = paths.STATE / "timings.json"
USAGE = paths.STATE / "usage.json"
LOCK = paths.STATE / "run.lock"

ASK_THE_REGISTRY = {"start": "sft", "opponent": "evaluate"}
"""Stages that read the registry, and the stage that uses what they found."""

FORCED = "--force-stage"

Status = Literal["ran", "cached", "restored", "skipped"]


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a run did with a stage.

    Example: StageResult(stage="sft", status="ran", seconds=41.2, reasons=("never run",))
    """

    stage: str
    status: Status
    seconds: float
    """How long this run spent on it."""
    reasons: tuple[str, ...] = ()
    """Why the result in dvc.lock did not stand, or why the stage was skipped."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which stages a run looks at, beyond what dvc.lock says of them."""

    first: str = ""
    """Results of the stages before this one are taken as they are."""
    forced: tuple[str, ...] = ()
    """Stages that run even if they are fresh."""
    before: tuple[str, ...] = ()
    """The stages before `first`."""

    @classmethod
    def of(cls, root: Path, first: str, forced: Sequence[str]) -> Choice:
        """ProjectError if there is no stage of such a name, or a stage before the first has no result to take."""
        stages = graph.load(root)
        for stage in [*forced, *([first] if first else [])]:
            _check_name(stage, stages)
        names = list(stages)
        before = tuple(names[: names.index(first)]) if first else ()
        for stage in before:
            for out in stages[stage].outs:
                if not (root / out).exists():
                    raise ProjectError(
                        f"{out}, which {stage} makes, is not there", f"nightshift run --from-stage {stage}"
                    )
        return cls(first=first, forced=tuple(forced), before=before)

    def selected(self, stages: Sequence[str], stale: Sequence[str]) -> list[str]:
        """Those of all stages that a run does."""
        return [name for name in stages if self._includes(name, name in stale)]

    def _includes(self, stage: str, is_stale: bool) -> bool:
        if stage in self.forced:
            return True
        return stage not in self.before and (is_stale or ASK_THE_REGISTRY.get(stage) in self.forced)


class Session:
    """What the stages of one process share: params, versions, simulators, trackers. Its exit closes all of them."""

    def __init__(self, root: Path, choice: Choice | None = None, kind: RunKind = "pipeline", title: str = "") -> None:
        """`kind` is what its run in MLflow is if it joins none, and `title` its name."""
        self.kind = kind
        self._title = title
        self.choice = choice or Choice()
        repository.check_folder(root)
        self.root = root.resolve()
        self.params = config.load(self.root / paths.PARAMS)
        self.graph = graph.load(self.root)
        self.versions = packages.record(self.root, self.graph)
        self.commit = repository.commit(self.root)
        self.results: list[StageResult] = []
        """Of the stages that are done."""
        self.current_stage = ""
        """The one that is being made; after an error the one that failed. None while it is only checked."""
        self._code = self._code_now()
        self._pools: dict[config.Env, Pool] = {}
        self._store: DvcStore | None = None
        self._tracking: Tracking | None = None
        self._prechecked: set[str] = set()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        died = was_killed(self.root)
        lock = _lock(self.root)
        if died and not packages.on_compute_node():
            try:
                _ = self.tracking  # ends the runs in MLflow that the dead process left open
            except BaseException:
                lock.release()  # its file still names a process, so that the next session tries again
                raise
        self._open.callback(locks.release, lock)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._tracking:
            self._open.callback(self._tracking.close, _mlflow_status(error))
        if self._store:
            self._open.callback(self._store.close)
        for pool in self._pools.values():
            self._open.callback(pool.close)
        self._open.close()

    @property
    def store(self) -> DvcStore:
        from nightshift.adapters.dvc_store import PATIENCE_SECONDS, DvcStore

        if self._store is None:
            repository.check(self.root)
            self._store = DvcStore(self.root, patience=PATIENCE_SECONDS)
        return self._store

    @property
    def tracking(self) -> Tracking:
        return self.connect()

    def connect(self) -> Tracking:
        """Open MLflow's store, which may refuse or not answer."""
        from nightshift.adapters.mlflow_tracking import Tracking

        if self._tracking is None:
            made_of = (self.params, self.commit, self._sources())
            self._tracking = Tracking(self.root, *made_of, self.kind, self._title)
        return self._tracking

    def pool(self, env: config.Env) -> Pool:
        """Simulators for these tasks, started at the first call and kept until the session ends."""
        if env not in self._pools:
            from nightshift.policies.device import resolve
            from nightshift.rollouts.opening import open_pool

            machine = self.params.machine
            self._pools[env] = open_pool(machine, env, resolve(machine.device))
        return self._pools[env]

    def precheck(self, stages: Iterable[str]) -> None:
        """Before the first of these stages runs: whether params.yaml and this machine fit all that are not skipped."""
        named = [definition(stage, self) for stage in stages if stage not in self._prechecked]
        definitions = [stage for stage in named if not self.params.skips(stage.name)]
        if definitions:
            from nightshift.pipeline import precheck

            states = states_to_resume([stage.name for stage in definitions], self)
            precheck.check(self.params, definitions, states, in_run=True)
            self._prechecked.update(stage.name for stage in definitions)

    def check_unchanged(self) -> None:
        """All stages of a run have the same params, code and versions: an edit made meanwhile ends the run, unless it
        is of a section without an effect on results."""
        if _deciding(config.load(self.root / paths.PARAMS)) != _deciding(self.params):
            raise ProjectError("params.yaml was edited while the pipeline ran", "run again: what is done is cached")
        for path, digest in self._code_now().items():
            if digest != self._code[path]:
                raise ProjectError(f"{path} was edited while the pipeline ran", "run again: what is done is cached")
        if packages.installed(self.root, self.graph) != self.versions:
            raise ProjectError("packages were installed while the pipeline ran", "run again: what is done is cached")

    def _sources(self) -> str:
        """Digest of what a run works with besides params: code, versions of packages, imports."""
        code = {path.as_posix(): digest for path, digest in self._code.items()}
        content = [code, dict(self.versions), files.identity_or_missing(self.root / paths.IMPORTS)]
        return files.json_sha256(content)

    def _code_now(self) -> dict[Path, str]:
        return {path: files.identity_or_missing(self.root / path) for path in sorted(graph.code(self.graph))}


def _deciding(params: config.Params) -> dict[str, Any]:
    """What decides about results."""
    return params.model_dump(exclude=set(WITHOUT_EFFECT))


def was_killed(root: Path) -> bool:
    """Whether the last run in this folder died, and left runs in Prefect and MLflow that nothing works on."""
    return locks.was_abandoned(root / LOCK)


def check_free(root: Path) -> None:
    """Raise Busy if another run works in this folder. The lock file of a dead run is left as it is."""
    if locks.is_held(root / LOCK):
        raise _busy(root, locks.holder(root / LOCK))


def _mlflow_status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def fingerprint(stage: str, session: Session) -> str:
    """sha256 over all that decides a stage's result: params, versions, code and inputs. Names its checkpoints."""
    inputs = {path.as_posix(): files.identity_or_missing(session.root / path) for path in session.graph[stage].deps}
    return files.json_sha256([stage, sections(stage, session), versions(stage, session), inputs])


def states_to_resume(stages: Iterable[str], session: Session) -> dict[str, Path]:
    """Where those of the stages that have checkpoints keep them for the inputs that are here now.

    None of a stage whose inputs another of them makes anew: it will not resume from these.
    """
    chosen = [session.graph[stage] for stage in stages]
    to_come = {out for stage in chosen for out in stage.outs}
    begun = [stage.name for stage in chosen if (session.root / paths.STATE / stage.name).is_dir()]
    ready = [stage for stage in begun if to_come.isdisjoint(session.graph[stage].deps)]
    return {stage: session.root / paths.stage_state(stage, fingerprint(stage, session)) for stage in ready}


def run_stage(stage: str, session: Session) -> float:
    """Run nightshift.stages.<stage> with the sections it names, without DVC; returns the seconds it took.

    A stage that params.yaml does not use leaves a folder that says so.
    """
    _check_choice(stage, session)
    if session.params.skips(stage):
        _skip(stage, session)
        return 0.0
    session.precheck([stage])
    run = importlib.import_module(f"{STAGES}.{stage}").run
    arguments = {name.replace(".", "_"): session.params.section(name) for name in session.graph[stage].params}
    current = fingerprint(stage, session)
    started = time.monotonic()
    before = usage.read()
    with _tracker(stage, current, session) as tracker:
        _log_inputs(stage, session, tracker)
        run(_job(stage, current, session, tracker), **arguments)
        if stage in results.MADE_BY and not packages.on_compute_node():
            publish(stage, session)
    seconds = time.monotonic() - started
    record_time(session.root, stage, seconds)
    samples = files.read_journal(session.root / paths.stage_metrics(stage, current))
    used = {**usage.since(before), **usage.of_gpus(samples)}
    files.write_json(session.root / USAGE, {**machine_usage(session.root), stage: used})
    return seconds


def _log_inputs(stage: str, session: Session, tracker: Tracker) -> None:
    """The data that a stage reads, as datasets of its run; a folder that says that it is not used is not one."""
    code = graph.code(session.graph)
    for path in session.graph[stage].deps:
        if path not in code and not (session.root / path / paths.SKIPPED).exists():
            digest = graph.recorded_md5(session.root, path) or files.identity_or_missing(session.root / path)[:32]
            tracker.dataset(path.as_posix(), digest, path)


def publish(stage: str, session: Session) -> None:
    """Put what came out on the run of the pipeline, with links to the runs of stages that were not run again.

    The registration is published after `register` only: before that, the file on disk is of another run.
    """
    tracking = session.tracking
    ran = tracking.ran
    others = [stage for stage in session.graph if stage not in ran and not session.params.skips(stage)]
    cached = tracking.link_cached({stage: fingerprint(stage, session) for stage in others})
    found = results.read(session.root)
    if stage != "register":
        found = replace(found, registration={})
    tracking.publish(results.metrics(found), results.tags(found), results.note(found, {**cached, **ran}))


def ensure(stage: str, session: Session) -> StageResult:
    """Bring the stage's outputs up to date at the least cost. Call it for the stages above it first."""
    result = _ensure(stage, session)
    session.results.append(result)
    return result


def _ensure(stage: str, session: Session) -> StageResult:
    started = time.monotonic()
    reasons = _reasons(stage, session)
    if session.params.skips(stage):
        if reasons:
            _run_and_commit(stage, session)
        why = config.skip_reason(stage)
        console.print(f"[dim]– {stage}  skipped ({why})[/]")
        return StageResult(stage=stage, status="skipped", seconds=time.monotonic() - started, reasons=(why,))
    if reasons and not packages.on_compute_node():
        session.connect()  # if that fails, it fails before the old outputs are removed
    if not reasons:
        result = StageResult(stage=stage, status="cached", seconds=time.monotonic() - started)
    elif FORCED not in reasons and session.store.restore(stage):
        result = StageResult(stage=stage, status="restored", seconds=time.monotonic() - started, reasons=reasons)
    else:
        session.check_unchanged()
        session.precheck([stage, *following(stage, session)])
        console.print(f"[bold cyan]▶ {stage}[/]  [dim]{'; '.join(reasons)}[/]")
        _run_and_commit(stage, session)
        result = StageResult(stage=stage, status="ran", seconds=time.monotonic() - started, reasons=reasons)
    if (session.root / paths.STATE / stage).is_dir():
        remove_checkpoints(stage, fingerprint(stage, session), session)
    console.print(f"[green]✔ {stage}[/]  {result.status}, {result.seconds:.1f} s")
    return result


def _reasons(stage: str, session: Session) -> tuple[str, ...]:
    """Why the stage has to run; empty if its result stands, or is to be taken as it is."""
    if stage in session.choice.forced:
        return (FORCED,)
    if stage in session.choice.before:
        return ()
    return session.store.reasons(stage) or _asked_again(stage, session)


def renew(stage: str, session: Session) -> None:
    """Run a stage whether it is stale or not, and record its result."""
    session.precheck([stage])
    _run_and_commit(stage, session)


def _asked_again(stage: str, session: Session) -> tuple[str, ...]:
    """The registry, which DVC does not see, is asked again whenever the stage that uses the answer will run.

    Another champion alone makes no result stale: a night in which nothing else changed has nothing to do.
    """
    user = ASK_THE_REGISTRY.get(stage)
    if not user:
        return ()
    if user in session.choice.forced:
        return (f"asked again, since {user} is forced",)
    return (_asked_for(user),) if session.store.reasons(user) else ()


def _asked_for(user: str) -> str:
    return f"asked again, since {user} is stale"


def _run_and_commit(stage: str, session: Session) -> None:
    session.current_stage = stage
    transaction = session.store.begin(stage, session.check_unchanged)
    run_stage(stage, session)
    session.store.commit(transaction)
    session.current_stage = ""


def _check_choice(stage: str, session: Session) -> None:
    """The file that `choose` wrote is in the key of a training stage, so it has to say what params.yaml says."""
    if stage not in config.ALGORITHMS:
        return
    path = session.root / paths.choice(stage)
    try:
        recorded = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        recorded = None
    if recorded != {"chosen": not session.params.skips(stage)}:
        raise ProjectError(
            f"{paths.choice(stage)} does not say whether algorithms in {paths.PARAMS} has {stage}",
            f"nightshift stage choose {stage}",
        )


def _skip(stage: str, session: Session) -> None:
    """Always the same folder, so that what reads it stays fresh when an input of the stage changes."""
    for out in session.graph[stage].outs:
        with files.new_folder(session.root / out) as folder:
            files.write_json(folder / paths.SKIPPED, {"skipped": config.skip_reason(stage)})


def following(stage: str, session: Session) -> list[str]:
    """The stages after this one in dvc.yaml, which a run does next."""
    names = list(session.graph)
    return names[names.index(definition(stage, session).name) + 1 :]


def statuses(root: Path) -> list[StageStatus]:
    """Every stage, fresh or stale, without running any."""
    from nightshift.adapters.dvc_store import DvcStore

    repository.check(root)
    params = config.load(root / paths.PARAMS)
    stages = graph.load(root)
    packages.record(root, stages)
    graph.check_lock(root)
    with contextlib.closing(DvcStore(root)) as store:
        found = store.status([stage for stage in stages if params.skips(stage)])
    return [_with_question(status, stale(found)) for status in found]


def _with_question(status: StageStatus, stale: Sequence[str]) -> StageStatus:
    """A fresh stage that asks the registry is run all the same if the stage that uses the answer is stale."""
    user = ASK_THE_REGISTRY.get(status.name)
    if user is None or user not in stale or not status.fresh:
        return status
    return replace(status, reasons=(_asked_for(user),))


def stale(found: Iterable[StageStatus]) -> list[str]:
    """The stages that a run would do."""
    return [status.name for status in found if not status.fresh and not status.skipped]


def timings(root: Path) -> Mapping[str, float]:
    """How long each stage took when it last ran here."""
    return results.read_json(root / TIMINGS)


def machine_usage(root: Path) -> Mapping[str, Mapping[str, float]]:
    """What each stage used of the machine when it last ran here, by name of telemetry.usage."""
    return results.read_json(root / USAGE)


def record_time(root: Path, stage: str, seconds: float) -> None:
    files.write_json(root / TIMINGS, {**timings(root), stage: round(seconds, 2)})


def definition(stage: str, session: Session) -> graph.Definition:
    """The stage in dvc.yaml; ProjectError if there is none of this name."""
    _check_name(stage, session.graph)
    return session.graph[stage]


def _check_name(stage: str, stages: Mapping[str, graph.Definition]) -> None:
    if stage not in stages:
        raise ProjectError(f"there is no stage {stage!r}", f"choose one of {', '.join(stages)}")


def sections(stage: str, session: Session) -> dict[str, Any]:
    """The sections of params.yaml that decide a stage's result, as plain values."""
    return {name: _plain(session.params.section(name)) for name in session.graph[stage].params}


def versions(stage: str, session: Session) -> dict[str, str]:
    """The installed versions that decide a stage's result."""
    return {name: session.versions[name] for name in session.graph[stage].versions}


def _job(stage: str, current: str, session: Session, tracker: Tracker) -> Job:
    state = session.root / paths.stage_state(stage, current)
    state.mkdir(parents=True, exist_ok=True)
    return Job(
        stage=stage,
        fingerprint=current,
        state=state,
        tracker=tracker,
        pool=session.pool,
        machine=session.params.machine,
        commit=session.commit,
        forced=stage in session.choice.forced,
    )


@contextmanager
def _tracker(stage: str, current: str, session: Session) -> Iterator[Tracker]:
    """Call it before the stage's state is made: without one the stage starts over, and so do its metrics."""
    path = session.root / paths.stage_metrics(stage, current)
    if not (session.root / paths.stage_state(stage, current)).exists():
        path.unlink(missing_ok=True)
    lines = JsonlTracker(path)
    if packages.on_compute_node():
        yield lines
        return
    with session.tracking.stage(stage, current, sections(stage, session)) as tracker:
        yield Tee([lines, tracker])


def remove_checkpoints(stage: str, done: str, session: Session) -> None:
    """Of the fingerprint that is done. Those of other fingerprints may be resumed; `nightshift gc` removes them."""
    shutil.rmtree(session.root / paths.stage_state(stage, done), ignore_errors=True)


def _plain(section: Any) -> Any:
    if isinstance(section, config.Section):
        return section.model_dump(mode="json")
    return list(section) if isinstance(section, tuple) else section


def _lock(root: Path) -> FileLock:
    """One run at a time in a folder: two would write the same outputs."""
    path = root / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    return locks.acquire(path, lambda holder: _busy(root, holder))


def _busy(root: Path, holder: str) -> Busy:
    return Busy(f"another run (process {holder}) is working in {root}", f"wait for it, or kill {holder}")
