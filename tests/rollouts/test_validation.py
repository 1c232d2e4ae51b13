from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nightshift import config
from nightshift.envs.splits import TrainingStates
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.validation import Selection, Validator
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import small_params
from tests.rollouts.parts import policy

ENV = config.Params.model_validate(small_params()).env
STATES_OF = {"near": TrainingStates(train=range(0), validation=range(10))}


class Scripted(LocalPool):
    """Of every validation a text with a letter per init state: 1 solved, 0 failed, x lost to the simulator."""

    def __init__(self, validations: Sequence[str]) -> None:
        super().__init__(ENV)
        self._validations = iter(validations)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        letters = next(self._validations)
        for index, request in enumerate(requests):
            letter = letters[request.init_state]
            yield index, [replace(Trajectory.lost(request, 0), success=letter == "1", valid=letter != "x")]


def after(validations: Sequence[str]) -> Selection:
    """The selection after these validations, the first of which is of the start."""
    selection = Selection(Validator(Scripted(validations), STATES_OF), snapshot(policy()))
    for iteration in range(len(validations)):
        selection.validate(snapshot(policy(), version=iteration), iteration)
    return selection


def test_the_weights_and_the_iteration_that_are_kept_are_of_one_policy_where_later_episodes_are_invalid() -> None:
    selection = after(["0000000000", "1111111111", "0111111111", "x111100000"])
    assert selection.best.version == 1
    assert selection.kept(level=0.1).iteration == 1
