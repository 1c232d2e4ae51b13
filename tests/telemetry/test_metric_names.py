"""The metrics by which runs are compared have one name each, and the page about models explains every one."""

from __future__ import annotations

import re

from nightshift.pipeline import results
from nightshift.pipeline.results import Results
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired
from nightshift.telemetry import metric_names
from tests.conftest import REPOSITORY

GAIN = Paired(states=10, won=4, lost=1).to_json()


def example() -> Results:
    candidates = [
        {"name": "sft", "label": "SFT", "overall": Rate(4, 10).to_json(), "invalid": 0, "tasks": {}, "gain": None},
        {
            "name": "rloo",
            "label": "RLOO",
            "overall": Rate(7, 10).to_json(),
            "invalid": 1,
            "suites": {"libero_goal": Rate(7, 10).to_json()},
            "tasks": {"near": Rate(7, 10).to_json()},
            "gain": GAIN,
        },
    ]
    champion = {"version": "1", "overall": Rate(5, 10).to_json(), "best_gain": GAIN}
    registration = {
        "model": "m",
        "version": "2",
        "aliases": ["challenger"],
        "verdict": "not promoted",
        "candidate": "rloo",
        "reason": "version 2 (rloo) stays challenger",
        "p_value": 0.25,
    }
    report = {"best": "rloo", "candidates": candidates, "champion": champion}
    return Results(evaluation=report, registration=registration)


def test_every_metric_of_a_run_is_explained_on_the_page_about_models() -> None:
    page = (REPOSITORY / "docs" / "models.md").read_text()
    rows = set(re.findall(r"^\| `([a-z_/<>]+)` \|", page, re.MULTILINE))
    per_part = {metric_names.suite_success("<suite>"), metric_names.task_success("<task>")}
    assert rows == {*metric_names.ALL, metric_names.candidate_success("<candidate>"), *per_part}


def test_a_run_with_a_gain_a_champion_and_a_gate_has_every_metric() -> None:
    found = results.metrics(example())
    per_name = {metric_names.candidate_success(name) for name in ("sft", "rloo")}
    per_part = {metric_names.suite_success("libero_goal"), metric_names.task_success("near")}
    assert set(found) == {*metric_names.ALL, *per_name, *per_part}
    assert (found[metric_names.SUCCESS], found[metric_names.PROMOTED]) == (0.7, 0.0)
    assert found[metric_names.CHAMPION_GAIN] == found[metric_names.GAIN] == 0.3


def test_the_description_of_a_run_has_the_verdict_the_candidates_and_links() -> None:
    note = results.note(example(), {"sft": "abc"})
    assert note.startswith("version 2 (rloo) stays challenger\n")
    assert "| RLOO | 70.0 % | 39.7 to 89.2 | 10 |" in note
    assert "[sft](http://127.0.0.1:5000/#/runs/abc)" in note
    assert results.tags(example())["model.aliases"] == "challenger"


def test_before_the_evaluation_there_is_nothing_to_tell() -> None:
    nothing = Results(evaluation={}, registration={})
    assert results.metrics(nothing) == {}
    assert results.tags(nothing) == {}
