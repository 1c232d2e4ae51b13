"""The processes that share an update: one, in this process, or several on Ray that add up their gradients.

    stage (driver)                        ranks (Ray actors, one learner each)
    ──────────────                        ────────────────────────────────────
    update(parts) ── part r to rank r ──▶ credit, minibatches; every gradient is summed over all ranks (gloo or nccl)
      │◀─ metrics of rank 0 ─────────────┘ all ranks hold the same weights before and after
      │─ heartbeat counter? ────────────▶ _Rank.heartbeats(), on a thread beside update's
      │◀─ a count that grows ────────────┘
      └─ a rank that died or hangs: all are started again from where they were, and the update is made again

A rank waits for the others at every sum, also when it has nothing to add: one that hangs brings all to a standstill.
The driver waits for all while any moves.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from nightshift import config
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.cluster import version_check
from nightshift.cluster.connection import start_ray
from nightshift.cluster.heartbeat import HEARTBEAT_GROUP, TIMEOUT_SECONDS, Heartbeat
from nightshift.errors import NightshiftError, RolloutError
from nightshift.learners import checkpoint
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot

_log = logging.getLogger(__name__)

ATTEMPTS = 3
_WAIT_SECONDS = 0.5
_NEVER = timedelta(days=7)
"""A rank may wait for others as long as these move; whether they do is for the driver to see."""

Demonstrated = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Features [N, D], actions [N, C, A] and mask [N, C] of the demos."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What every rank begins with."""

    policy: PolicySnapshot
    settings: config.Rloo
    seed: int
    demos: Demonstrated | None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """All that a learner knows: what a checkpoint holds."""

    tensors: Mapping[str, NDArray[Any]]
    state: Mapping[str, float]


class Learners(Protocol):
    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]: ...

    def policy(self) -> PolicySnapshot: ...

    def learned(self) -> Learned: ...

    def restore(self, learned: Learned) -> None: ...

    def close(self) -> None: ...


def open_learners(start: Start) -> Learners:
    return Single(start) if start.settings.ranks == 1 else RayLearners(start)


class Single:
    """One learner in this process."""

    def __init__(self, start: Start) -> None:
        self._rank = _Rank(start)

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        return self._rank.update(parts[0], progress)

    def policy(self) -> PolicySnapshot:
        return self._rank.policy()

    def learned(self) -> Learned:
        return self._rank.learned()

    def restore(self, learned: Learned) -> None:
        self._rank.restore(learned)

    def close(self) -> None:
        """Nothing to end."""


class RayLearners:
    """Several learners on Ray; rank r learns from part r of what was played."""

    def __init__(self, start: Start, *, timeout: float = TIMEOUT_SECONDS) -> None:
        start_ray(start.settings.ranks)
        self._start = start
        self._timeout = timeout
        self._count = start.settings.ranks
        self._ranks: list[Any] = []
        self._policy, self._learned = start.policy, _Rank(start).learned()

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        references = [ray.put(part) for part in parts]
        for _ in range(ATTEMPTS):
            try:
                return self._together(references, progress)
            except (RayError, _Standstill) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, NightshiftError):
                    raise cause from None
                _log.warning("an update failed, its ranks are started again: %r", cause)
                failure = error
                self.close()
        raise RolloutError(f"an update failed {ATTEMPTS} times: {cause!r}", "run again: it resumes") from failure

    def policy(self) -> PolicySnapshot:
        return self._policy

    def learned(self) -> Learned:
        return self._learned

    def restore(self, learned: Learned) -> None:
        self.close()
        same = _Rank(self._start)
        same.restore(learned)
        self._policy, self._learned = same.policy(), learned

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    def _together(self, references: Sequence[Any], progress: float) -> dict[str, float]:
        if not self._ranks:
            self._begin()
        futures = [rank.update.remote(part, progress) for rank, part in zip(self._ranks, references, strict=True)]
        metrics: dict[str, float] = self._answers(futures, self._timeout)[0]
        first = self._ranks[0]
        self._policy, self._learned = self._answers([first.policy.remote(), first.learned.remote()], self._timeout)
        return metrics

    def _begin(self) -> None:
        """Start every rank where the last update ended, and let them find each other."""
        actor = ray.remote(num_cpus=0, concurrency_groups={HEARTBEAT_GROUP: 1})(_Rank)
        start, learned = ray.put(self._start), ray.put(self._learned)
        self._ranks = [actor.remote(start) for _ in range(self._count)]
        timeout = max(self._timeout, TIMEOUT_SECONDS)  # a process takes its time to start
        (address,) = self._answers([self._ranks[0].address.remote()], timeout)
        driver = version_check.versions(None)
        self._answers([rank.compare.remote(driver) for rank in self._ranks], timeout)
        self._answers([r.join.remote(address, number, self._count) for number, r in enumerate(self._ranks)], timeout)
        self._answers([rank.restore.remote(learned) for rank in self._ranks], timeout)

    def _answers(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        """Of all; but others are not waited for once one has failed or all stand still: they might wait for ever."""
        heartbeats = [Heartbeat(rank) for rank in self._ranks]
        waiting = list(futures)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
            ray.get(done)
            if waiting and min(heartbeat.seconds_since_progress() for heartbeat in heartbeats) > timeout:
                raise _Standstill(f"no rank has moved for {timeout:.0f} s")
        answers: list[Any] = ray.get(list(futures))
        return answers


class _Standstill(Exception):
    """A rank hangs, and all others wait for it."""


class _Rank:
    """A learner and its place among the others."""

    def __init__(self, start: Start) -> None:
        torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
        torch.manual_seed(start.seed)  # a critic begins at random
        demos = None if start.demos is None else Demos(*map(torch.tensor, start.demos))
        generator = torch.Generator().manual_seed(start.seed)
        self._collective = _Torch()
        self._learner = OnPolicyLearner(
            restore(start.policy), start.settings, generator, demos=demos, collective=self._collective
        )

    def compare(self, driver: Mapping[str, str]) -> None:
        """Refuse to learn with other code than the driver's."""
        if mismatch := version_check.mismatch_error(driver, None):
            raise mismatch

    def address(self) -> str:
        """Where the others find rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int) -> None:
        on_gpu = next(self._learner.policy.parameters()).is_cuda
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=address, rank=rank, world_size=size, timeout=_NEVER
        )
        self._collective.rank, self._collective.size = rank, size

    def update(self, groups: Groups, progress: float) -> dict[str, float]:
        return self._learner.update(groups, progress)

    def heartbeats(self) -> int:
        """A counter that grows with every micro-batch and every sum; another thread may ask for it during an update."""
        return self._learner.pieces + self._collective.sums

    def policy(self) -> PolicySnapshot:
        return snapshot(self._learner.policy, self._learner.version)

    def learned(self) -> Learned:
        packed = checkpoint.pack(self._learner.trained, self._learner.generator)
        tensors = {name: tensor.detach().numpy().copy() for name, tensor in packed.items()}
        return Learned(tensors=tensors, state=self._learner.state)

    def restore(self, learned: Learned) -> None:
        tensors = {name: torch.tensor(values) for name, values in learned.tensors.items()}
        checkpoint.unpack(tensors, self._learner.trained, self._learner.generator)
        self._learner.restore(learned.state)


class _Torch:
    """Sums over torch's process group; alone until it has joined one."""

    rank = 0
    size = 1
    sums = 0
    """So far."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                self.sums += 1
