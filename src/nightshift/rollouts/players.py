"""Who plays in processes of this machine (player_processes.py): the scripted expert, and policies.

The expert decides before every step, and takes as long as the step itself. With threads all simulators would wait for
the slowest decision, step by step; a process that plays a request by itself waits for nobody. Images are drawn by one
process from the recorded states (local.py): many processes that draw on one GPU wait for each other.

A policy decides in batches, so a process plays many of its requests side by side. One process was seen to leave a GPU
idle half of the time, three to keep it busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from nightshift.rollouts.engine import ONE_AT_A_TIME, EngineSettings
from nightshift.rollouts.player_processes import Bundle, PlayerProcesses, Waiting
from nightshift.rollouts.retries import IN_THIS_PROCESS
from nightshift.types import RolloutRequest


class ExpertPlayers(PlayerProcesses):
    """As many processes as there are threads that simulate, of all workers. Each draws nothing, keeps the simulators of
    one task, which take a second to build, and gets its requests while there are any."""

    keeps_simulators = False
    remedy = "set machine.workers to 0 and threads to 1 in params.yaml to see its output; if memory ran out, lower them"

    def _engine_settings(self, settings: EngineSettings) -> EngineSettings:
        return replace(ONE_AT_A_TIME, page=settings.page, draw=False)

    def _waiting(self, requests: Sequence[RolloutRequest]) -> Waiting:
        return _ByTask(requests)


class PolicyPlayers(PlayerProcesses):
    """Each process has a share of the requests, which depends on their number alone: on a GPU, requests that are in one
    batch differ by rounding from others."""

    keeps_simulators = True
    remedy = IN_THIS_PROCESS

    def _waiting(self, requests: Sequence[RolloutRequest]) -> Waiting:
        return _InShares(len(requests), self.count)


class _ByTask(Waiting):
    """Bundles of one request."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._tasks = [request.task for request in requests]
        self._numbers: dict[str, deque[int]] = {task: deque() for task in self._tasks}
        for number, task in enumerate(self._tasks):
            self._numbers[task].append(number)

    def __bool__(self) -> bool:
        return any(self._numbers.values())

    def take(self, task: str) -> Bundle:
        """One of this task, or of the task that has most."""
        numbers = self._numbers.get(task) or max(self._numbers.values(), key=len)
        return (numbers.popleft(),)

    def put_back(self, bundle: Bundle) -> None:
        (number,) = bundle
        self._numbers[self._tasks[number]].appendleft(number)


class _InShares(Waiting):
    """Each share has requests from all over the list: neighbours are of one task, and take equally long."""

    def __init__(self, requests: int, shares: int) -> None:
        self._bundles = deque(tuple(range(first, requests, shares)) for first in range(min(shares, requests)))

    def __bool__(self) -> bool:
        return bool(self._bundles)

    def take(self, task: str) -> Bundle:
        return self._bundles.popleft()

    def put_back(self, bundle: Bundle) -> None:
        self._bundles.appendleft(bundle)
