"""What becomes of a request whose simulator fails: played again, then given up, and not too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nightshift.errors import RolloutError
from nightshift.rollouts.rollout import ATTEMPTS
from nightshift.types import RolloutRequest, Trajectory

LOST_AT_MOST = 2
LOST_SHARE = 0.1
"""More lost requests than both allow are no bad luck: the machine or the simulator is broken."""


class Setbacks:
    """The failures of one call of a pool's `run`."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._requests = requests
        self._failures: Counter[int] = Counter()
        self._lost = 0

    def record(self, index: int, cause: str) -> list[Trajectory] | None:
        """The invalid episodes to answer the request with, or None while it deserves another attempt."""
        self._failures[index] += 1
        if self._failures[index] < ATTEMPTS:
            return None
        request = self._requests[index]
        self._lost += 1
        if self._lost > max(LOST_AT_MOST, LOST_SHARE * len(self._requests)):
            raise RolloutError(
                f"the simulator failed on {self._lost} of {len(self._requests)} init states, {ATTEMPTS} times each; "
                f"the last was {request.task}, state {request.init_state}: {cause}",
                "set machine.workers to 0 in params.yaml to see its output",
            )
        return [Trajectory.lost(request, member) for member in range(request.count)]
