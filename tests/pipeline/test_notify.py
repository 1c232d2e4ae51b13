"""What people are told after a run, by a real webhook."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift import files
from nightshift.errors import ProjectError
from nightshift.pipeline import notify
from nightshift.pipeline.run import StageResult, Status
from nightshift.project import paths
from nightshift.reports.gate import Verdict
from tests.conftest import edit
from tests.receiver import SECRET, receiving, receiving_mail

ALL = ["failure", "promotion", "regression", "nothing_to_do"]


@pytest.fixture
def told(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    edit(project, "notify", events=ALL)
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        yield messages


def results(status: Status) -> list[StageResult]:
    return [StageResult(stage=stage, status=status, seconds=1.0) for stage in ("sft", "register")]


def receipt(root: Path, verdict: Verdict) -> None:
    """Of a version that is champion, whether it became so now or before."""
    files.write_json(root / paths.EVALUATION_OUTCOMES, {})
    content = {"model": "arm", "version": "4", "aliases": ["champion"], "verdict": verdict}
    judged = {"reason": "version 4 solved 7 of 10", "outcomes": files.sha256(root / paths.EVALUATION_OUTCOMES)}
    files.write_json(root / paths.RECEIPT, content | judged)


@pytest.mark.parametrize(
    ("verdict", "title"),
    [
        (Verdict.PROMOTED, "Nightshift: arm version 4 is champion"),
        (Verdict.WORSE, "Nightshift: arm version 4 is worse than the champion"),
        (Verdict.NOT_COMPARED, "Nightshift: arm version 4 could not be compared with the champion"),
    ],
)
def test_a_promotion_a_regression_and_what_a_person_must_decide_are_told_with_the_reason_of_the_gate(
    project: Path, told: list[dict[str, Any]], verdict: Verdict, title: str
) -> None:
    receipt(project, verdict)
    notify.finished(project, results("ran"))
    (message,) = told
    assert message["title"] == title
    assert "version 4 solved 7 of 10" in message["message"]
    assert str(project) in message["message"]


@pytest.mark.parametrize("verdict", [Verdict.NOT_PROMOTED, Verdict.CHAMPION_ALREADY])
def test_a_policy_that_is_neither_better_nor_worse_is_no_news(
    project: Path, told: list[dict[str, Any]], verdict: Verdict
) -> None:
    receipt(project, verdict)
    notify.finished(project, results("ran"))
    assert told == []


def test_a_night_with_nothing_to_do_and_a_failure_are_told(project: Path, told: list[dict[str, Any]]) -> None:
    notify.finished(project, results("cached"))
    notify.failed(project, ProjectError("the disk is full", "free some space"))
    notify.killed(project, ["wise-owl"])
    assert [message["title"] for message in told] == [
        "Nightshift: nothing to do",
        "Nightshift: the run failed",
        "Nightshift: a run was killed",
    ]
    assert "the disk is full\n  → free some space" in told[1]["message"]


def test_a_mail_has_the_lines_of_the_message(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(project, "notify", events=ALL)
    with receiving_mail() as (address, mails):
        monkeypatch.setenv(notify.ADDRESSES, address)
        notify.failed(project, ProjectError("0 < 1 GB are left & the disk is full", "free some space"))
    (mail,) = mails
    assert (mail["Subject"], mail["To"]) == ("Nightshift: the run failed", "a@example.com")
    text = mail.get_body(("plain",))
    assert text is not None
    assert "0 < 1 GB are left & the disk is full\n → free some space\n" in text.get_content().replace("\r\n", "\n")


def test_a_chat_is_told_as_a_webhook_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(project, "notify", events=ALL)
    with receiving() as (webhook, messages):
        monkeypatch.setenv(notify.ADDRESSES, webhook.replace("json://", "mmost://"))
        notify.failed(project, ProjectError("the disk is full", "free some space"))
    (message,) = messages
    assert "Nightshift: the run failed" in message["text"]
    assert "the disk is full\n  → free some space" in message["text"]


def test_only_the_events_of_params_yaml_are_told_and_a_failure_even_if_it_cannot_be_read(
    project: Path, told: list[dict[str, Any]]
) -> None:
    edit(project, "notify", events=["promotion"])
    notify.finished(project, results("cached"))
    assert told == []
    (project / "params.yaml").write_text("seed: [")
    notify.failed(project, ProjectError("params.yaml is not valid YAML"))
    assert len(told) == 1


def test_an_address_that_does_not_answer_is_a_warning_without_the_address(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(notify.ADDRESSES, f"json://127.0.0.1:9/{SECRET}, nonsense://{SECRET}")
    with caplog.at_level(logging.DEBUG):
        notify.failed(project, ProjectError("the disk is full"))
    assert "2 of 2 notifications were not sent: check NIGHTSHIFT_NOTIFY" in caplog.text
    assert SECRET not in caplog.text
