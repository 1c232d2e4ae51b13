"""Requests whose simulator fails: played again a few times, then answered with invalid episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nightshift.errors import RolloutError
from nightshift.types import RolloutRequest, Trajectory

MAX_ATTEMPTS = 3
MAX_INVALID = 2
MAX_INVALID_SHARE = 0.1
"""More invalid requests than both allow mean that the machine or the simulator is broken: the stage ends.

Requests with perturbations do not count: it may be the perturbation that breaks the simulator, and who asks for them
judges each perturbation (reports/robustness.py)."""

IN_THIS_PROCESS = "set machine.workers to 0 in params.yaml to see its output"


class Retries:
    """The failures of one call of a pool's `run`.

    A request is deterministic, so one that raises the same error twice, or hangs twice, is not played again. A process
    may also die because of its machine, so a group of sampled episodes is played again after two deaths; a greedy or
    expert episode, which is one of many alike, is not. Different errors allow MAX_ATTEMPTS in all.
    """

    def __init__(self, requests: Sequence[RolloutRequest], *, remedy: str = IN_THIS_PROCESS) -> None:
        """`remedy`: what people can do where the simulator fails too often."""
        self._requests = requests
        self._remedy = remedy
        self._errors: defaultdict[int, list[str]] = defaultdict(list)
        self._counted = sum(not request.perturbations for request in requests)
        self._invalid = 0

    def record(self, index: int, error: str, *, process_died: bool = False) -> list[Trajectory] | None:
        """A failure of a request: its invalid episodes if it is given up, None if it is to be played again."""
        errors = self._errors[index]
        may_be_chance = process_died and self._requests[index].controller == "sample"
        is_repeated = error in errors and not may_be_chance
        errors.append(error)
        if not is_repeated and len(errors) < MAX_ATTEMPTS:
            return None
        request = self._requests[index]
        if not request.perturbations:
            self._count_invalid(request, error)
        return [Trajectory.lost(request, member) for member in range(request.count)]

    def _count_invalid(self, request: RolloutRequest, error: str) -> None:
        self._invalid += 1
        if self._invalid <= max(MAX_INVALID, MAX_INVALID_SHARE * self._counted):
            return
        unit = "episodes" if request.count == 1 else "init states"
        calm = " without a perturbation" if self._counted < len(self._requests) else ""
        raise RolloutError(
            f"the simulator failed on {self._invalid} of {self._counted} {unit}{calm}, more than once each; "
            f"the last was {request.place}: {error}",
            self._remedy,
        )
