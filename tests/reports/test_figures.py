"""What the figure of an evaluation shows of a training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from nightshift.reports import figures
from nightshift.reports.history import History
from nightshift.statistics.intervals import Rate


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


def test_a_training_with_interventions_shows_how_much_the_policy_was_helped(axes: Axes) -> None:
    metrics = [{"rollout/success": 0.9, "intervention/share": share} for share in (0.6, 0.2)]
    figures._training(axes, "RLPD", History(algorithm="", iterations=metrics, validation={}, kept=1))
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert np.asarray(lines["intervened steps, training"].get_ydata()).tolist() == [0.6, 0.2]


def test_every_bar_has_its_number(axes: Axes) -> None:
    def result(label: str, *successes: int) -> dict[str, object]:
        tasks = {f"task {i}": Rate(n, 20).to_json() for i, n in enumerate(successes)}
        return {"label": label, "overall": Rate(sum(successes), 40).to_json(), "tasks": tasks}

    figures._bars(axes, {"candidates": [result("SFT", 5, 10), result("RLOO", 20, 16)], "grid": {"episodes": 40}})
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == ["38", "25", "50", "90", "100", "80"]


def test_both_axes_of_a_training_are_labelled(axes: Axes) -> None:
    history = History(algorithm="", iterations=[{"rollout/success": 0.5, "update/kl": 0.1}], validation={}, kept=1)
    figures._training(axes, "RLOO", history)
    assert [one.get_ylabel() for one in axes.figure.axes] == ["success", "KL per iteration (nats)"]
    assert axes.get_xlabel() == "iteration"
