"""The sentences of a report: the verdict, and what a reader should be careful about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from nightshift.config import CHAMPION
from nightshift.pipeline.report.facts import Facts
from nightshift.pipeline.report.record import RunRecord
from nightshift.reports.gate import Verdict
from nightshift.reports.history import KL

Mark = Literal["failed", "champion", "challenger", "open"]
MARKS: Mapping[Mark, tuple[str, str]] = {
    "failed": ("✖", "failed"),
    "champion": ("▲", "champion"),
    "challenger": ("●", "challenger"),
    "open": ("○", "not registered"),
}
_FEW_EPISODES = 50


def mark(facts: Facts) -> Mark:
    return "failed" if facts.refusal else _outcome_mark(facts)


def _outcome_mark(facts: Facts) -> Mark:
    if facts.record and facts.record.failure:
        return "failed"
    if not facts.receipt:
        return "open"
    return "champion" if CHAMPION in facts.receipt["aliases"] else "challenger"


def promoted(facts: Facts) -> bool:
    """Whether this run's version became champion; one with the weights of the champion was it before."""
    return facts.receipt.get("verdict") == Verdict.PROMOTED


def verdict(facts: Facts) -> str:
    """The night in one sentence."""
    return _stopped(facts.refusal) if facts.refusal else outcome(facts)


def _stopped(run: RunRecord) -> str:
    failure = run.failure
    assert failure is not None
    if failure.stage:
        where = f"in {failure.stage}"
    else:
        where = f"after {run.changed[-1]}" if run.changed else "before its first stage"
    return f"The run stopped {where}: {failure.what.rstrip('.')}."


def outcome(facts: Facts) -> str:
    """The run whose results are shown, in one sentence."""
    if facts.record and facts.record.failure:
        return _stopped(facts.record)
    if facts.best is None:
        return "Nothing has been evaluated yet."
    result = f"{_solves(facts.best)}{_against_clone(facts)}"
    if not facts.receipt:
        return f"{facts.best['label']} {result}; it was not registered."
    version = f"Version {facts.receipt['version']} ({facts.best['label']})"
    if _outcome_mark(facts) == "champion":
        return f"{version} {_role(facts)}: it {result}."
    champion = f"version {facts.receipt['champion']} remains" if facts.receipt["champion"] else "there is no"
    return f"{version} stays challenger: it {result}, and {champion} champion."


def _role(facts: Facts) -> str:
    """Of a version that is champion now."""
    if not promoted(facts):
        return "stays champion, for training gave the same weights again"
    if facts.champion:
        return f"replaces version {facts.champion.record.version} as champion"
    return "is the first champion"


def _solves(candidate: Mapping[str, Any]) -> str:
    overall = candidate["overall"]
    return f"solves {100 * overall['rate']:.1f} % of {overall['episodes']} held-out init states"


def _against_clone(facts: Facts) -> str:
    if facts.best is None or facts.clone is None or facts.best is facts.clone:
        return ", and no training made the clone better"
    points = 100 * facts.best["gain"]["gain"]
    return f", {abs(points):.1f} points {'more' if points >= 0 else 'fewer'} than the clone"


def warnings(facts: Facts) -> list[str]:
    return [*_evaluation_warnings(facts), *_training_warnings(facts), *_provenance_warnings(facts)]


def _evaluation_warnings(facts: Facts) -> Iterator[str]:
    for candidate in facts.evaluation.get("candidates", ()):
        if candidate["invalid"]:
            yield (
                f"{candidate['label']}: {candidate['invalid']} episodes in which the simulator failed are left out of "
                "its rates."
            )
    if facts.best is None or facts.clone is None:
        return
    if facts.best["overall"]["episodes"] < _FEW_EPISODES:
        yield (
            f"The result rests on {facts.best['overall']['episodes']} episodes, so its interval is wide: raise "
            "evaluate.init_states."
        )
    for task, rate in facts.best["tasks"].items():
        before = facts.clone["tasks"][task]
        if rate["rate"] < before["rate"]:
            yield (
                f"{task}: {facts.best['label']} solves fewer states ({rate['successes']} of {rate['episodes']}) than "
                f"the clone ({before['successes']} of {before['episodes']})."
            )
    if facts.champion and facts.champion.paired is None:
        yield (
            f"Version {facts.champion.record.version} was not evaluated on this grid of init states, so it could not "
            "be compared."
        )
    if facts.params.evaluate.films and not facts.evaluation.get("films"):
        yield "There are no films: no GL library works here (libosmesa6 or libegl1 on Debian)."


def _training_warnings(facts: Facts) -> Iterator[str]:
    for name, history in facts.histories.items():
        if history.kept == 0:
            yield f"{name}: no iteration was better than the clone on the validation states, so the clone was kept."
        skipped = sum(row.get("update/skipped_steps", 0) for row in history.iterations)
        if skipped:
            yield f"{name}: {skipped:.0f} gradient steps were skipped because a gradient was not finite."
        limit = history.kl_limit
        above = [i for i, value in history.metric(KL).items() if limit is not None and value > limit]
        if above:
            yield (f"{name}: the KL limit ended the update in {len(above)} of {len(history.iterations)} iterations.")


def _provenance_warnings(facts: Facts) -> Iterator[str]:
    if facts.commit.endswith("+"):
        yield f"The code has changes that are not committed (on top of {facts.commit.rstrip('+')})."
    elif facts.commit == "unknown":
        yield "The commit of the code is not known."
    if facts.record is None:
        yield "What the last run did is not recorded here: stages have the times of when they last ran."


def changed(facts: Facts) -> str:
    """What differs from the last champion, in a few words. Example: "2 params, code" """
    if facts.champion is None:
        return "first champion" if facts.receipt else ""
    record = facts.champion.record
    count = len(facts.champion.params)
    parts = [f"{count} {'param' if count == 1 else 'params'}"] if count else []
    parts += ["data"] if record.dataset_md5 != facts.dataset_md5 else []
    parts += ["code"] if record.commit != facts.commit else []
    return ", ".join(parts) or "nothing"
