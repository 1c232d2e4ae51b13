"""The stage that splits the list of algorithms into a file per training stage."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from nightshift import config
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import choose


def choices() -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in paths.CHOICES.iterdir()}


@pytest.mark.usefixtures("project")
def test_every_training_stage_has_a_file_that_says_whether_it_is_chosen(job: Callable[[str], Job]) -> None:
    choose.run(job("choose"), algorithms=("rloo",))
    assert {name: json.loads(content)["chosen"] for name, content in choices().items()} == {
        name: name == "rloo" for name in config.ALGORITHMS
    }
    choose.run(job("choose"), algorithms=())
    assert not any(json.loads(content)["chosen"] for content in choices().values())


@pytest.mark.usefixtures("project")
def test_choosing_one_more_leaves_the_files_of_the_others_as_they_are(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "ALGORITHMS", ("rloo", "another"))
    choose.run(job("choose"), algorithms=("rloo",))
    before = choices()
    choose.run(job("choose"), algorithms=("another", "rloo"))  # type: ignore[arg-type]
    after = choices()
    assert before["rloo"] == after["rloo"]
    assert before["another"] != after["another"]
