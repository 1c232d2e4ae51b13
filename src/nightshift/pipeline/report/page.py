"""A report as one HTML file: styles, charts and films are inside, so it can be mailed, printed and archived."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightshift import envs
from nightshift.config import CHAMPION
from nightshift.pipeline.report import robustness, svg, words
from nightshift.pipeline.report.facts import Facts
from nightshift.pipeline.report.templating import (
    BOTH,
    INVALID,
    LOST,
    NEITHER,
    SYMBOLS,
    WON,
    data_uri,
    environment,
)
from nightshift.project import paths
from nightshift.reports import tables
from nightshift.reports.history import KL, SAMPLED_SUCCESS
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, solved
from nightshift.telemetry import usage

COLUMNS = 20
"""Init states per row of a map: as many as a phone has room for."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    stage: str
    status: str
    seconds: float
    share: float
    """Of the longest, for its bar."""
    cores: float | None
    """Busy on average, of every process on the machine."""
    gpu: str
    """How busy GPUs were and how much of their memory was in use; empty if none was."""
    watt_hours: float | None


@dataclass(frozen=True, kw_only=True)
class ChampionPlayed:
    """How the champion did, and how the best candidate compares with it."""

    name: str
    figures: Mapping[str, Any] | None
    """Its rate."""
    paired: Mapping[str, Any] | None
    """Of the best candidate against it; None where it has not played this grid."""
    solved: Mapping[Cell, bool]
    """On this grid."""
    same_policy_as: str | None = None
    """The candidate that played in its place."""


@dataclass(frozen=True, kw_only=True)
class StateMap:
    """How two policies did on every init state of a task."""

    task: str
    ours: str
    theirs: str
    rows: Sequence[tuple[int, Sequence[tuple[str, str]]]]
    """(number of the first state, [(kind, sentence), …])"""
    counts: Mapping[str, int]


def render(facts: Facts) -> str:
    return str(
        environment()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            words=words,
            mark=words.mark(facts),
            verdict=words.verdict(facts),
            warnings=words.warnings(facts),
            result_rows=result_rows(facts),
            tests=paired_tests(facts),
            curves=curves(facts),
            suites=suite_rows(facts),
            tasks=task_rows(facts),
            maps=state_maps(facts),
            films=film_rows(facts),
            robustness=robustness.shown(facts.root, facts.robustness) if facts.robustness else None,
            stages=stage_rows(facts),
        )
    )


def result_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per policy: the candidates, then the champion they were compared with."""
    rows = [
        {
            "name": candidate["label"],
            "what": _what(candidate, facts),
            "best": candidate["name"] == facts.evaluation["best"],
            "figures": candidate["overall"],
        }
        for candidate in facts.evaluation.get("candidates", ())
    ]
    if (champion := champion_played(facts)) and champion.figures:
        what = "champion until then"
        if champion.same_policy_as:
            what += f", the same policy as {_label(champion.same_policy_as, facts)}, not played again"
        elif not champion.paired:
            what += ", on other init states"
        rows.append({"name": champion.name, "what": what, "best": False, "figures": champion.figures})
    return rows


def _what(candidate: Mapping[str, Any], facts: Facts) -> str:
    if first := tables.same_policy_as(candidate):
        return f"the same policy as {_label(first, facts)}, not played again"
    return "clone" if candidate is facts.clone else "trained from the clone"


def _label(name: str, facts: Facts) -> str:
    candidate = facts.candidate(name)
    return str(candidate["label"]) if candidate else name


def champion_played(facts: Facts) -> ChampionPlayed | None:
    """From this evaluation if it played there, which is known before the registration; else from its own."""
    if played := facts.evaluation.get(CHAMPION):
        return ChampionPlayed(
            name=f"version {played['version']}",
            figures=played["overall"],
            paired=played["best_gain"],
            solved=solved(facts.outcomes[CHAMPION]),
            same_policy_as=tables.same_policy_as(played),
        )
    if facts.champion is None:
        return None
    record, paired = facts.champion.record, facts.champion.paired
    return ChampionPlayed(
        name=f"version {record.version}",
        figures=record.rate.to_json() if record.rate else None,
        paired=paired.to_json() if paired else None,
        solved=record.solved,
    )


def paired_tests(facts: Facts) -> list[dict[str, Any]]:
    """State by state: every candidate against the clone, and the best against the champion."""
    clone = facts.clone
    tests = [
        {"name": f"{candidate['label']} against {clone['label']}", "figures": candidate["gain"]}
        for candidate in tables.compared(facts.evaluation.get("candidates", ()))
        if clone
    ]
    if (champion := champion_played(facts)) and champion.paired and facts.best and not _is_best(champion, facts):
        tests.append({"name": f"{facts.best['label']} against {champion.name}", "figures": champion.paired})
    return tests


def _is_best(champion: ChampionPlayed, facts: Facts) -> bool:
    """Whether the best candidate played in its place: then there is nothing to compare."""
    return champion.same_policy_as is not None and champion.same_policy_as == facts.evaluation["best"]


def task_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per task: the rate of every candidate, and of the champion where it has played this grid."""
    best, champion = facts.best, champion_played(facts)
    if best is None:
        return []
    candidates = facts.evaluation["candidates"]
    return [
        {
            "name": task,
            "rates": {c["label"]: c["tasks"][task] for c in candidates}
            | (_champions_rate(champion, {task}) if champion else {}),
            "steps": best["episode_length"][task]["median_of_successes"],
        }
        for task in best["tasks"]
    ]


def suite_rows(facts: Facts) -> list[dict[str, Any]]:
    """The same per published suite, where there are several."""
    best, champion = facts.best, champion_played(facts)
    if best is None or not tables.suites(best):
        return []
    suite = envs.suite(facts.evaluation["grid"]["suite"])
    tasks = {
        name: {task.name for task in suite.tasks() if suite.benchmark(task) == name} for name in tables.suites(best)
    }
    candidates = facts.evaluation["candidates"]
    return [
        {
            "name": name,
            "rates": {c["label"]: tables.suites(c)[name] for c in candidates}
            | (_champions_rate(champion, tasks[name]) if champion else {}),
        }
        for name in tasks
    ]


def _champions_rate(champion: ChampionPlayed, tasks: Container[str]) -> dict[str, Any]:
    won = [success for (task, _), success in champion.solved.items() if task in tasks]
    return {champion.name: Rate(sum(won), len(won)).to_json()} if won else {}


def curves(facts: Facts) -> list[dict[str, Any]]:
    """The training of every algorithm that has a history."""
    made = []
    for name, history in facts.histories.items():
        sampled, kl, helped = history.metric(SAMPLED_SUCCESS), history.metric(KL), history.interventions()
        label = (history.algorithm or name).upper().replace("_", " ")
        made.append(
            {
                "label": label,
                "kept": history.kept,
                "iterations": len(history.iterations),
                "success": svg.success_curve(
                    sampled, history.validation, history.kept, f"{label}: success by iteration; numbers in the table"
                ),
                "kl": svg.metric_curve(kl, f"{label}: KL by iteration", history.kl_limit) if kl else None,
                "limit": history.kl_limit,
                "interventions": {
                    words: svg.metric_curve(values, f"{label}: {words}, by iteration")
                    for words, values in helped.items()
                },
                "rows": [
                    (i, sampled.get(i), history.validation.get(i), kl.get(i), [one.get(i) for one in helped.values()])
                    for i in sorted({*sampled, *history.validation})
                ],
            }
        )
    return made


def state_maps(facts: Facts) -> list[StateMap]:
    """A map per task against the clone; where the champion played the same states, one against it as well."""
    if not facts.outcomes or facts.clone is None or facts.best is None:
        return []
    last = facts.evaluation["candidates"][-1]
    shown = last if facts.best is facts.clone else facts.best
    maps = []
    if shown is not facts.clone:
        clone = facts.clone
        maps += _maps(
            shown["label"], facts.outcomes[shown["name"]], clone["label"], solved(facts.outcomes[clone["name"]])
        )
    if (champion := champion_played(facts)) and champion.solved:
        maps += _maps(facts.best["label"], facts.outcomes[facts.best["name"]], champion.name, champion.solved)
    return maps


def _maps(ours: str, our_outcomes: Any, theirs: str, other: Mapping[Cell, bool]) -> list[StateMap]:
    cells = [(outcome["task"], outcome["init_state"]) for outcome in our_outcomes]
    mine = solved(our_outcomes)
    maps = []
    for task in dict.fromkeys(task for task, _ in cells):
        states = [(state, _kind((task, state), mine, other)) for one, state in cells if one == task]
        items = [(kind, f"state {state}: {_sentence(kind, ours, theirs)}") for state, kind in states]
        rows = [(states[start][0], items[start : start + COLUMNS]) for start in range(0, len(items), COLUMNS)]
        counts = {kind: sum(kind == found for _, found in states) for kind in SYMBOLS}
        maps.append(StateMap(task=task, ours=ours, theirs=theirs, rows=rows, counts=counts))
    return maps


def _kind(cell: Cell, mine: Mapping[Cell, bool], other: Mapping[Cell, bool]) -> str:
    if cell not in mine or cell not in other:
        return INVALID
    return {(True, True): BOTH, (True, False): WON, (False, True): LOST, (False, False): NEITHER}[
        mine[cell], other[cell]
    ]


def _sentence(kind: str, ours: str, theirs: str) -> str:
    return {
        BOTH: "both solved it",
        WON: f"{ours} solved it, {theirs} failed",
        LOST: f"{ours} failed, {theirs} solved it",
        NEITHER: "both failed",
        INVALID: "no valid episode of both",
    }[kind]


def film_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per filmed init state: every candidate and the champion, from this evaluation if it played there, else
    where its own evaluation filmed the state."""
    played = facts.evaluation.get(CHAMPION)
    labels = {c["name"]: c["label"] for c in facts.evaluation.get("candidates", ())}
    labels |= {CHAMPION: f"version {played['version']}"} if played else {}
    place = {name: number for number, name in enumerate(labels)}
    rows: dict[Cell, list[dict[str, Any]]] = {}
    for film in sorted(facts.evaluation.get("films", ()), key=lambda film: place[film["candidate"]]):
        file = facts.root / paths.EVALUATION / film["file"]
        if file.exists():
            strip = file.with_suffix(".jpg").read_bytes()
            shown = _shown_film(labels[film["candidate"]], film["success"], file.read_bytes(), strip)
            rows.setdefault((film["task"], film["init_state"]), []).append(shown)
    if facts.champion and not played:
        kept = facts.champion.record.films
        for cell in rows.keys() & kept.keys():
            rows[cell].append(_shown_film(f"version {facts.champion.record.version}", *kept[cell]))
    found = [{"task": task, "init_state": state, "films": films} for (task, state), films in rows.items()]
    return sorted(
        found, key=lambda row: len({film["success"] for film in row["films"]}) == 1
    )  # those that differ first


def _shown_film(label: str, success: bool, video: bytes, strip: bytes) -> dict[str, Any]:
    return {
        "label": label,
        "success": success,
        "video": data_uri("video/mp4", video),
        "strip": data_uri("image/jpeg", strip),
    }


def stage_rows(facts: Facts) -> list[StageRow]:
    """Of the last run; a stage that was cached shows how long it took when it ran."""
    done = {result.stage: result for result in facts.record.stages} if facts.record else {}
    names = list(done) or [stage for stage in facts.used if stage in facts.seconds]
    if facts.record and facts.record.failure and facts.record.failure.stage:
        names.append(facts.record.failure.stage)
    skipped = {name for name in done if done[name].status == "skipped"}
    seconds = {name: 0.0 if name in skipped else facts.seconds.get(name, 0.0) for name in names}
    longest = max([*seconds.values(), 1e-9])
    return [
        StageRow(
            stage=name,
            status=done[name].status if name in done else ("failed" if facts.record else "ran"),
            seconds=seconds[name],
            share=seconds[name] / longest,
            cores=_cores(facts.used.get(name, {}), seconds[name]),
            gpu=_gpu(facts.used.get(name, {})),
            watt_hours=_watt_hours(facts.used.get(name, {})),
        )
        for name in names
    ]


def _cores(used: Mapping[str, float], seconds: float) -> float | None:
    return used[usage.CPU_SECONDS] / seconds if seconds and usage.CPU_SECONDS in used else None


def _gpu(used: Mapping[str, float]) -> str:
    busy = [f"{used[usage.GPU_PERCENT]:.0f} %"] if usage.GPU_PERCENT in used else []
    memory = [f"{used[usage.GPU_MIB] / 1024:.1f} GiB"] if usage.GPU_MIB in used else []
    return ", ".join([*busy, *memory])


def _watt_hours(used: Mapping[str, float]) -> float | None:
    joules = [used[name] for name in (usage.CPU_JOULES, usage.GPU_JOULES) if name in used]
    return sum(joules) / 3600 if joules else None
