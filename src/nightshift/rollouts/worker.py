"""A simulator process: it holds simulators and a copy of the policy, and plays the requests it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import ray

from nightshift import config, envs
from nightshift.cluster import version_check
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import Answer, Engine, EngineSettings
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest


class Worker:
    """Keeps no state that could change a result: a new worker gives the same answers."""

    def __init__(
        self,
        env: config.Env,
        settings: EngineSettings,
        make_fleet: MakeFleet,
        driver: Mapping[str, str] | None = None,
    ) -> None:
        """`driver`: the driver's package versions, where it may be on another machine."""
        self._mismatch = version_check.mismatch_error(driver, env.suite) if driver is not None else None
        _draw_on_own_gpu()
        self._engine = Engine(env, settings, make_fleet, self._beat)
        self._heartbeats = 0

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None
    ) -> tuple[list[Answer], Mapping[str, float]]:
        """The episodes of each request by its position, and the seconds they took by activity (engine.py)."""
        if self._mismatch:  # not raised by __init__: Ray does not pass on the error of an actor that cannot start
            raise self._mismatch
        self._engine.stopwatch = Stopwatch()
        answers = [answer for turn in self._engine.play(deque(enumerate(requests)), policy) for answer in turn]
        return answers, dict(self._engine.stopwatch.seconds)

    def heartbeats(self) -> int:
        """A counter that grows with every control step; another thread may ask for it while `run` is busy."""
        return self._heartbeats

    def close_experts(self) -> None:
        self._engine.close_experts()

    def close(self) -> None:
        self._engine.close()

    def _beat(self) -> None:
        self._heartbeats += 1


def _draw_on_own_gpu() -> None:
    """A worker that draws elsewhere than it acts would crowd the first GPU of its node."""
    for gpu in ray.get_gpu_ids() if ray.is_initialized() else ():
        if str(gpu).isdigit():  # not a UUID: EGL knows numbers only
            envs.draw_on_gpu(int(gpu))
