"""How much a policy was helped, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nightshift.data.episode import Episode
from nightshift.interventions.metrics import intervention_metrics
from nightshift.telemetry import interventions as names
from tests.data import examples


def played(acted: str, *, success: bool = False) -> Episode:
    """Who acted at each control step: P the policy, H a person. The last step of an episode has no action."""
    flags = np.array([who == "H" for who in acted] + [False])
    return examples.make(steps=len(flags), interventions=flags, success=success)


def test_two_interventions_in_six_steps_are_counted_to_the_step() -> None:
    assert intervention_metrics([played("PPHHPH", success=True)]) == {
        names.PER_EPISODE: 2.0,
        names.SHARE: 0.5,
        names.STEPS_BETWEEN: 1.5,
        names.SUCCESS_ALONE: 0.0,
    }


def test_a_round_counts_its_episodes_together_and_no_intervention_goes_on_in_the_next_episode() -> None:
    helped, alone, lost = played("PPHHPH"), played("PPPP", success=True), played("HHPPPPPP")
    found = intervention_metrics([helped, alone, lost])
    assert found == {
        names.PER_EPISODE: 1.0,
        names.SHARE: pytest.approx(5 / 18),
        names.STEPS_BETWEEN: pytest.approx(13 / 3),
        names.SUCCESS_ALONE: pytest.approx(1 / 3),
    }


def test_without_an_intervention_all_steps_of_the_round_are_the_policys() -> None:
    found = intervention_metrics([played("PPPP"), played("PPP", success=True)])
    assert found == {names.PER_EPISODE: 0, names.SHARE: 0, names.STEPS_BETWEEN: 7, names.SUCCESS_ALONE: 0.5}
