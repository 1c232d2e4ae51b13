"""Data-parallel learners: several ranks on Ray that sum their gradients.

    stage (driver)                        ranks (Ray actors, one learner each)
    ──────────────                        ────────────────────────────────────
    update(parts) ── part r to rank r ──▶ advantages, minibatches; gradients are summed over all ranks (gloo or nccl)
      │◀─ metrics of rank 0 ─────────────┘ all ranks hold the same weights before and after
      │─ heartbeats? ───────────────────▶ _Rank.heartbeats(), on a thread beside update's
      │◀─ a count that rises ────────────┘
      └─ a rank died or hangs: all are restarted from the state before the update, and the update is repeated

A rank blocks at every sum until all ranks have reached it, so one rank that hangs stalls all of them. The driver waits
as long as any rank makes progress.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from nightshift.algorithms.estimators import Groups
from nightshift.cluster import version_check
from nightshift.cluster.connection import start_ray
from nightshift.cluster.heartbeat import HEARTBEAT_GROUP, TIMEOUT_SECONDS, Heartbeat
from nightshift.errors import NightshiftError, RolloutError
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.local import Rank
from nightshift.policies.snapshot import PolicySnapshot

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_WAIT_SECONDS = 0.5
_COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Long on purpose: the driver detects a stall by the ranks' progress, not by the duration of one sum."""


class RayLearners:
    """Several ranks on Ray; rank r learns from part r of the groups."""

    def __init__(self, spec: LearnerSpec, ranks: int, *, timeout: float = TIMEOUT_SECONDS) -> None:
        start_ray(ranks)
        self._spec = spec
        self._timeout = timeout
        self._count = ranks
        self._ranks: list[Any] = []
        self._policy, self._state = spec.policy, _Rank(spec).state()

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        references = [ray.put(part) for part in parts]
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._update_all(references, progress)
            except (RayError, _RanksStalled) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, NightshiftError):
                    raise cause from None
                _log.warning("an update failed, its ranks are restarted: %r", cause)
                failure = error
                self.close()
        raise RolloutError(f"an update failed {MAX_ATTEMPTS} times: {cause!r}", "run again: it resumes") from failure

    def policy(self) -> PolicySnapshot:
        return self._policy

    def state(self) -> LearnerState:
        return self._state

    def restore(self, state: LearnerState) -> None:
        self.close()
        rank = _Rank(self._spec)
        rank.restore(state)
        self._policy, self._state = rank.policy(), state

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    def _update_all(self, references: Sequence[Any], progress: float) -> dict[str, float]:
        if not self._ranks:
            self._start_ranks()
        futures = [rank.update.remote(part, progress) for rank, part in zip(self._ranks, references, strict=True)]
        metrics: dict[str, float] = self._get(futures, self._timeout)[0]
        # The state comes back after every update, not only for a checkpoint: it is what a restart begins with.
        first = self._ranks[0]
        self._policy, self._state = self._get([first.policy.remote(), first.state.remote()], self._timeout)
        return metrics

    def _start_ranks(self) -> None:
        """Start every rank with the state after the last update, and connect them."""
        actor = ray.remote(num_cpus=0, concurrency_groups={HEARTBEAT_GROUP: 1})(_Rank)
        spec, state = ray.put(self._spec), ray.put(self._state)
        self._ranks = [actor.remote(spec) for _ in range(self._count)]
        timeout = max(self._timeout, TIMEOUT_SECONDS)  # a process needs time to start
        (address,) = self._get([self._ranks[0].rendezvous_address.remote()], timeout)
        driver = version_check.versions(None)
        self._get([rank.check_versions.remote(driver) for rank in self._ranks], timeout)
        self._get([r.join.remote(address, number, self._count) for number, r in enumerate(self._ranks)], timeout)
        self._get([rank.restore.remote(state) for rank in self._ranks], timeout)

    def _get(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        """The results of all; raises as soon as one fails or all stall, since the others would block for ever."""
        heartbeats = [Heartbeat(rank) for rank in self._ranks]
        waiting = list(futures)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
            ray.get(done)
            if waiting and min(heartbeat.seconds_since_progress() for heartbeat in heartbeats) > timeout:
                raise _RanksStalled(f"no rank has made progress for {timeout:.0f} s")
        results: list[Any] = ray.get(list(futures))
        return results


class _RanksStalled(Exception):
    """A rank hangs, and all others block at the next sum."""


class _Rank(Rank):
    """A learner and its connection to the other ranks."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._collective = _ProcessGroup()
        super().__init__(spec, self._collective)

    def check_versions(self, driver: Mapping[str, str]) -> None:
        """Refuse to learn with other code than the driver's."""
        if mismatch := version_check.mismatch_error(driver, None):
            raise mismatch

    def rendezvous_address(self) -> str:
        """Where the other ranks connect to this one; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int) -> None:
        on_gpu = self._learner.policy.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # counts are summed on the CPU, gradients where they are
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=_COLLECTIVE_TIMEOUT)
        self._collective.rank, self._collective.size = rank, size

    def heartbeats(self) -> int:
        """A count that rises with every microbatch and every sum, to be read on another thread during an update."""
        return self._learner.microbatches + self._collective.sums


class _ProcessGroup:
    """Sums over torch's process group; a single rank until `_Rank.join`."""

    rank = 0
    size = 1
    sums = 0
    """Sums so far."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                self.sums += 1
