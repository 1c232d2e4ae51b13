"""scripts/expert_sweep.py on the fake suite: its table, and a sweep that goes on after one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift import envs
from scripts import expert_sweep
from scripts.expert_sweep import Played, Start

STOVE = "turn_on_the_stove"
NEVER = "an expert that the sweep never asks"


def start(init_state: int) -> Start:
    return Start(suite="fake", task="near", split="eval", init_state=init_state, disturbance=0.0)


def test_a_sweep_plays_what_its_file_lacks_and_adds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "episodes.jsonl"
    known = Played(start=start(0), solved=False, steps=9, reason=NEVER)
    path.write_text(known.line() + known.line()[:20])
    expert_sweep.main(["fake", "--task", "near", "--states", "3", "--jobs", "2", "--episodes", str(path)])
    kept = [Played.of_line(line) for line in path.read_text().splitlines()]
    assert kept[0] == known
    assert sorted(episode.start.init_state for episode in kept) == [0, 1, 2]
    assert [episode.solved for episode in kept] == [False, True, True]
    table = capsys.readouterr().out
    assert f"0 ({NEVER})" in table
    assert "| all | 2 of 3 |" in table


def test_an_episode_that_cannot_be_played_is_a_row_with_its_error() -> None:
    episode = expert_sweep.play(Start(suite="fake", task="no_such", split="eval", init_state=0, disturbance=0.0))
    assert not episode.solved
    assert "no_such" in expert_sweep.row("no_such", [episode])


def test_an_error_is_not_kept_as_a_finished_episode(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    missing = Start(suite="fake", task="no_such", split="eval", init_state=0, disturbance=0.0)
    (episode,) = expert_sweep.sweep([missing], 1, path)
    assert episode.is_error
    assert expert_sweep.finished(path) == {}


@pytest.mark.parametrize(("suite", "task", "steps"), [("libero_40", STOVE, 300), ("fake", "near", 100)])
def test_an_episode_has_the_steps_of_the_suite_that_its_task_comes_from(suite: str, task: str, steps: int) -> None:
    assert set(envs.horizons(expert_sweep.environment(suite, [task])).values()) == {steps}


def test_the_same_start_gives_the_same_episode() -> None:
    once, again = (expert_sweep.play(start(1)) for _ in range(2))
    assert once.solved
    assert once == again
