"""The whole pipeline: the order of stages, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from flows.lifecycle import labelled, orderly, tell_of_crash
from nightshift.pipeline.run import Choice, Session, StageResult
from nightshift.project import environment
from tasks._report import reporting
from tasks._summary import summarise
from tasks.choose import choose
from tasks.collect import collect
from tasks.dataset import dataset
from tasks.evaluate import evaluate
from tasks.opponent import opponent
from tasks.register import register
from tasks.rloo import rloo
from tasks.rlpd import rlpd
from tasks.sft import sft
from tasks.start import start
from tasks.states import states


@flow(name="pipeline", flow_run_name=labelled, persist_result=False, on_crashed=[tell_of_crash])
@orderly
def pipeline(from_stage: str = "", force_stages: Sequence[str] = ()) -> list[StageResult]:
    """From init states to a registered policy; stages that are fresh in dvc.lock are not run again."""
    environment.apply(Path.cwd())
    with Session(Path.cwd(), Choice.of(Path.cwd(), from_stage, force_stages)) as session, reporting(session):
        starts = states(session)
        demos = collect(session, starts)
        data = dataset(session, demos)
        initial = start(session)
        cloned = sft(session, data, initial)
        chosen = choose(session)
        on_policy = rloo(session, chosen, starts, cloned)
        off_policy = rlpd(session, chosen, starts, data, cloned)
        champion = opponent(session, on_policy, off_policy)
        report = evaluate(session, cloned, on_policy, off_policy, champion)
        model = register(session, data, on_policy, off_policy, report)
        done = [starts, demos, data, initial, cloned, chosen, on_policy, off_policy, champion, report, model]
        return summarise(session, done)
