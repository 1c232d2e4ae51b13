"""How often a request is played whose simulator fails, and when failures end the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nightshift.errors import RolloutError
from nightshift.rollouts.retries import Retries
from nightshift.types import Controller, PerturbationSpec, RolloutRequest


def requests(count: int, controller: Controller = "sample") -> list[RolloutRequest]:
    return [
        RolloutRequest(task="near", split="train", init_state=state, controller=controller, seed=0, count=2)
        for state in range(count)
    ]


@pytest.mark.parametrize("controller", ["greedy", "expert", "sample"])
def test_the_same_error_twice_is_not_tried_a_third_time(controller: Controller) -> None:
    retries = Retries(requests(4, controller))
    assert retries.record(1, "MemoryError()") is None
    invalid = retries.record(1, "MemoryError()")
    assert invalid is not None
    assert [(episode.request.init_state, episode.member, episode.valid) for episode in invalid] == [
        (1, 0, False),
        (1, 1, False),
    ]


def test_different_errors_are_tried_three_times() -> None:
    retries = Retries(requests(4))
    assert retries.record(0, "ValueError()") is None
    assert retries.record(0, "no step for 300 s") is None
    assert retries.record(0, "MemoryError()") is not None


@pytest.mark.parametrize(("controller", "attempts"), [("sample", 3), ("greedy", 2), ("expert", 2)])
def test_a_process_that_dies_is_tried_again_since_its_machine_may_be_the_cause(
    controller: Controller, attempts: int
) -> None:
    retries = Retries(requests(4, controller))
    answers = [retries.record(0, "its process died", process_died=True) for _ in range(attempts)]
    assert answers[:-1] == [None] * (attempts - 1)
    assert answers[-1] is not None


def test_failures_of_other_requests_do_not_count() -> None:
    retries = Retries(requests(4))
    assert retries.record(0, "MemoryError()") is None
    assert retries.record(1, "MemoryError()") is None


def given_up(retries: Retries, index: int) -> None:
    retries.record(index, "MemoryError()")
    assert retries.record(index, "MemoryError()") is not None


@pytest.mark.parametrize(("count", "allowed"), [(6, 2), (50, 5)])
def test_more_than_two_and_more_than_a_tenth_of_the_requests_end_the_run(count: int, allowed: int) -> None:
    retries = Retries(requests(count))
    for index in range(allowed):
        given_up(retries, index)
    with pytest.raises(RolloutError, match=rf"failed on {allowed + 1} of {count} init states.*state {allowed}: Mem"):
        given_up(retries, allowed)


def test_perturbed_requests_do_not_end_the_run_and_those_without_a_perturbation_do() -> None:
    calm = [replace(one, count=1) for one in requests(6, "greedy")]
    noisy = [replace(one, perturbations=(PerturbationSpec(name="action_noise", strength=2.0),)) for one in calm]
    retries = Retries([*calm, *noisy])
    for index in (*range(len(calm), len(calm) + len(noisy)), 0, 1):
        given_up(retries, index)
    sentence = "failed on 3 of 6 episodes without a perturbation, more than once each; the last was near, state 2: Mem"
    with pytest.raises(RolloutError, match=sentence):
        given_up(retries, 2)
