"""What the figure of an evaluation shows of a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from nightshift.reports import figures
from nightshift.reports.candidates import Candidate
from nightshift.reports.history import History
from nightshift.statistics.intervals import Rate
from nightshift.telemetry import interventions as names


@pytest.fixture
def axes() -> Iterator[Axes]:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_a_training_shows_sampled_and_greedy_success_the_kept_iteration_and_kl(axes: Axes) -> None:
    metrics = [{"rollout/success": rate, "update/kl": 0.01} for rate in (0.5, 0.7, 0.8)]
    validation = {0: Rate(31, 40), 2: Rate(36, 40)}
    history = History(algorithm="grpo", iterations=metrics, validation=validation, kept=2, kl_limit=0.06)
    figures._training(axes, "GRPO", history)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert np.asarray(lines["sampled, training"].get_ydata()).tolist() == [0.5, 0.7, 0.8]
    assert np.asarray(lines["kept: iteration 2"].get_xdata()).tolist() == [2, 2]
    assert labels(axes) == [
        "sampled, training",
        "kept: iteration 2",
        "greedy, validation",
        "KL per iteration (right)",
        "KL limit 0.06 (right)",
    ]
    (container,) = axes.containers
    (bars,) = container[2]
    ends = [[y for _, y in segment] for segment in bars.get_segments()]
    assert ends == [pytest.approx([rate.low, rate.high]) for rate in validation.values()]
    assert axes.get_title() == "GRPO: training"


def test_a_training_without_validation_or_kl_shows_what_there_is(axes: Axes) -> None:
    history = History(algorithm="", iterations=[{"rollout/success": 0.5}], validation={}, kept=1)
    figures._training(axes, "RLPD", history)
    assert set(labels(axes)) == {"sampled, training", "kept: iteration 1"}


def test_a_kl_that_overflowed_is_left_out(axes: Axes) -> None:
    metrics = [{"rollout/success": 0.5, "update/kl": kl} for kl in (np.inf, 0.2, np.nan)]
    figures._training(axes, "RLOO", History(algorithm="", iterations=metrics, validation={}, kept=1))
    (distance,) = (one for one in axes.figure.axes if one is not axes)
    (line,) = distance.get_lines()
    assert np.asarray(line.get_ydata()).tolist() == [0.2]


HELPED = [
    {"rollout/success": 0.9, names.PER_EPISODE: often, names.SHARE: share, names.STEPS_BETWEEN: between}
    for often, share, between in ((2.0, 0.6, 30.0), (0.5, 0.2, 90.0))
]


def test_a_training_with_interventions_shows_how_often_how_much_and_how_far_apart_the_policy_was_helped() -> None:
    drawn, panels = plt.subplots(3)
    history = History(algorithm="", iterations=HELPED, validation={}, kept=1, control_hz=20)
    figures._interventions(panels.tolist(), "RLPD", history)
    shown = {one.get_title(loc="left"): np.asarray(one.get_lines()[0].get_ydata()).tolist() for one in panels}
    plt.close(drawn)
    assert shown == {
        "RLPD: interventions per episode": [2.0, 0.5],
        "RLPD: intervened steps (%)": [60.0, 20.0],
        "RLPD: seconds between interventions, at least": [1.5, 4.5],
    }


def test_a_history_that_does_not_know_its_control_rate_shows_control_steps() -> None:
    history = History(algorithm="", iterations=HELPED, validation={}, kept=1)
    assert history.interventions()["control steps between interventions, at least"] == {1: 30.0, 2: 90.0}


def test_the_figure_of_an_evaluation_has_panels_of_interventions_where_somebody_could_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(plt, "close", lambda figure: drawn.extend(one.get_title(loc="left") for one in figure.axes))
    rate = Rate(5, 10).to_json()
    report = {
        "candidates": [{"label": "SFT", "overall": rate, "tasks": {"lift": rate}}],
        "grid": {"episodes": 10},
    }
    for iterations in (HELPED, [{"rollout/success": 0.9}]):
        history = History(algorithm="", iterations=iterations, validation={}, kept=1, control_hz=20)
        candidate = Candidate(name="rlpd", label="RLPD", folder=tmp_path, policy={}, history=history)
        drawn.clear()
        figures.evaluation(tmp_path / "e.png", report, [candidate])
        assert ("RLPD: seconds between interventions, at least" in drawn) == (iterations is HELPED)


def test_every_bar_has_its_number(axes: Axes) -> None:
    def result(label: str, *successes: int) -> dict[str, object]:
        tasks = {f"task {i}": Rate(n, 20).to_json() for i, n in enumerate(successes)}
        return {"label": label, "overall": Rate(sum(successes), 40).to_json(), "tasks": tasks}

    figures._bars(axes, {"candidates": [result("SFT", 5, 10), result("RLOO", 20, 16)], "grid": {"episodes": 40}})
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == ["38", "25", "50", "90", "100", "80"]


def test_bars_of_the_same_policy_say_so(axes: Axes) -> None:
    rate = Rate(5, 10).to_json()
    clone: dict[str, object] = {"label": "SFT", "overall": rate, "tasks": {"lift": rate}}
    results = [clone, {**clone, "label": "RLOO", "same_policy_as": "sft"}]
    figures._bars(axes, {"candidates": results, "grid": {"episodes": 10}})
    assert labels(axes) == ["after SFT", "after RLOO (the same policy)"]


def test_both_axes_of_a_training_are_labelled(axes: Axes) -> None:
    history = History(algorithm="", iterations=[{"rollout/success": 0.5, "update/kl": 0.1}], validation={}, kept=1)
    figures._training(axes, "RLOO", history)
    assert [one.get_ylabel() for one in axes.figure.axes] == ["success", "KL per iteration (nats)"]
    assert axes.get_xlabel() == "iteration"
