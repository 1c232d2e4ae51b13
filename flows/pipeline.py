"""The whole pipeline: the order of stages, one line each."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from nightshift.pipeline.run import Session, StageResult
from nightshift.project import environment
from tasks._report import reporting
from tasks._summary import summarise
from tasks.choose import choose
from tasks.collect import collect
from tasks.dataset import dataset
from tasks.evaluate import evaluate
from tasks.register import register
from tasks.rloo import rloo
from tasks.rlpd import rlpd
from tasks.sft import sft
from tasks.states import states


@flow(name="pipeline", persist_result=False)
def pipeline() -> list[StageResult]:
    """From init states to a registered policy; stages that are fresh in dvc.lock are not run again."""
    environment.apply(Path.cwd())
    with Session(Path.cwd()) as session, reporting(session):
        starts = states(session)
        demos = collect(session, starts)
        data = dataset(session, demos)
        cloned = sft(session, data)
        chosen = choose(session)
        on_policy = rloo(session, chosen, starts, cloned)
        off_policy = rlpd(session, chosen, starts, data, cloned)
        report = evaluate(session, cloned, on_policy, off_policy)
        model = register(session, data, on_policy, off_policy, report)
        return summarise(session, [starts, demos, data, cloned, chosen, on_policy, off_policy, report, model])
