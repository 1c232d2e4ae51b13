"""Learner ranks on Ray: each learns from its own part of the episodes or demos, and all hold the same weights.

    stage (driver)                        ranks (Ray actors, one learner each; on cuda each has a GPU of its own)
    ──────────────                        ──────────────────────────────────────────────────────────────────────
    update(parts) ── part r to rank r ──▶ copy of the state; gradient steps, their gradients summed over all ranks
      │◀─ metrics of rank 0 ─────────────┘
      │─ heartbeats? ───────────────────▶ RankActor.heartbeats(), on a thread beside update's
      │◀─ a count that rises ────────────┘
      └─ a rank died or hangs: all are restarted from the copy of a rank that still answers, and the update is repeated
    policy() ───────────────────────────▶ weights of rank 0 ──▶ object store ──▶ workers that play the next iteration

The driver holds references: weights and moments reach it only where it writes a checkpoint. A rank blocks at every sum
until all ranks have reached it, so one rank that hangs stalls all of them. The driver waits as long as any rank makes
progress.

With FSDP each rank holds a part of the policy (fsdp.py). All ranks take part where weights are gathered for rank 0, and
each writes its part of a checkpoint. A rank that fails takes its part along: the stage ends, and resumes from the last
checkpoint when it is run again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from nightshift.cluster.connection import start_ray
from nightshift.cluster.gpus import Gpu, all_gpus
from nightshift.cluster.heartbeat import HEARTBEAT_GROUP, Heartbeat
from nightshift.cluster.learning_versions import difference_error, learning_versions
from nightshift.cluster.object_store import ObjectStoreWeights
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.errors import DeviceError, NightshiftError, RolloutError
from nightshift.learners.base import LearnerSpec, LearnerState, Work_contra
from nightshift.learners.data_parallel import DataParallel
from nightshift.learners.local import Rank
from nightshift.policies.snapshot import PolicySnapshot

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_WAIT_SECONDS = 0.5
_UNTIL_A_RANK_DIES = math.inf
"""No timeout: a rank that writes or reads a checkpoint, which may be large, counts no progress meanwhile."""
_Result = TypeVar("_Result")


class RayLearners(Generic[Work_contra]):
    """Several ranks on Ray; rank r does part r of the work."""

    def __init__(
        self,
        spec: LearnerSpec[Work_contra],
        ranks: int,
        *,
        placement: Literal["colocated", "apart"] = "colocated",
        simulator_cpus: int = 0,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """`simulator_cpus`: that workers of this or a later stage ask of a Ray that is started here."""
        start_ray(max(ranks, simulator_cpus))  # ranks reserve no CPU, and later stages get the same Ray
        _check_gpus(spec.device, ranks)
        self._spec = spec
        self._timeout = timeout
        self._count = ranks
        self._placement = placement
        self._ranks: list[Any] = []
        self._version = spec.policy.version
        """Of the policy that the ranks hold."""
        self._policy: PolicySnapshot | None = spec.policy
        """Of that version; None until somebody asks for it."""
        self._state: Any = None
        """A reference to the state of that version. None: the ranks alone hold it, or begin from `spec`."""

    def update(self, parts: Sequence[Work_contra]) -> dict[str, float]:
        references = [ray.put(part) for part in parts]
        return self._retried(lambda: self._update_all(references))

    def policy(self) -> PolicySnapshot:
        if self._policy is None:
            self._policy = self._retried(self._fetch_policy)
        return self._policy

    def state(self) -> LearnerState:
        return self._retried(self._fetch_state)

    def write_shards(self, folder: Path) -> Mapping[str, str]:
        if self._spec.strategy != "fsdp":
            return {}
        where = folder.resolve()
        return self._retried(lambda: self._write_shards(where))

    def restore(self, state: LearnerState) -> None:
        self.close()
        where = None if state.shards is None else state.shards.resolve()  # ranks may work in another folder
        self._state = ray.put(replace(state, shards=where))
        start = self._spec.policy
        self._policy = PolicySnapshot.of(start.spec, state.policy_weights(start), state.version, start.frozen)
        self._version = state.version

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    def _retried(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns; where a rank fails, it is repeated with new ranks from the state before."""
        for _ in range(MAX_ATTEMPTS):
            try:
                if not self._ranks:
                    self._start_ranks()
                return work()
            except (RayError, _RanksStalled) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, NightshiftError):
                    raise cause from None
                _log.warning("a learner rank failed, all ranks are restarted: %r", cause)
                failure = error
                self._keep_state()
                self.close()
        raise RolloutError(
            f"the learner ranks failed {MAX_ATTEMPTS} times: {cause!r}", "run again: it resumes"
        ) from failure

    def _update_all(self, references: Sequence[Any]) -> dict[str, float]:
        answers = [rank.update.remote(part) for rank, part in zip(self._ranks, references, strict=True)]
        metrics: dict[str, float]
        metrics, version = self._get(answers, self._timeout)[0]
        if version != self._version:
            self._version, self._policy, self._state = version, None, None
        return metrics

    def _fetch_policy(self) -> PolicySnapshot:
        """With a reference to its weights, which are in the object store when this returns."""
        answers = [rank.weights.options(num_returns=2).remote() for rank in self._ranks]
        self._get([done for done, _ in answers], self._timeout)
        _, weights = answers[0]
        start = self._spec.policy
        return PolicySnapshot(
            spec=start.spec,
            weights=ObjectStoreWeights(weights),
            frozen=start.frozen,
            version=self._version,
        )

    def _fetch_state(self) -> LearnerState:
        found = [self._state] if self._state is not None else [rank.state.remote() for rank in self._ranks]
        state: LearnerState = self._get(found, self._timeout)[0]
        if self._spec.strategy != "fsdp":
            self._state = found[0]
        return state

    def _write_shards(self, folder: Path) -> dict[str, str]:
        written = self._get([rank.write_shards.remote(folder) for rank in self._ranks], _UNTIL_A_RANK_DIES)
        return {name: digest for sums in written for name, digest in sums.items()}

    def _keep_state(self) -> None:
        """Before the ranks are ended: take the state after the last whole update from the first one that answers.

        It goes to the new ranks by reference. Ranks that have not made an update yet begin from `spec` again.
        """
        version = self._version
        if self._state is not None or not version:
            return
        ask = {"num_returns": 2, "concurrency_group": HEARTBEAT_GROUP}  # the other thread may block at a sum
        states = dict(rank.state_after.options(**ask).remote(version) for rank in self._ranks)
        waiting = list(states)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=self._timeout)
            if not done:
                break
            with contextlib.suppress(RayError):
                ray.get(done)
                self._state = states[done[0]]
                return
        self.close()
        raise RolloutError(
            f"no learner rank is left that holds the weights after update {version}",
            "run again: it resumes from the last checkpoint",
        )

    def _start_ranks(self) -> None:
        """Start and connect all ranks, with the state after the last update."""
        _check_gpus(self._spec.device, self._count)  # again: a node may be gone since
        on_gpu = self._spec.device.type == "cuda"
        self._ranks = self._rank_actors(on_gpu=on_gpu)
        timeout = max(self._timeout, TIMEOUT_SECONDS)  # a process needs time to start
        driver = learning_versions()
        try:
            self._get([rank.check_versions.remote(driver) for rank in self._ranks], timeout)
        except _RanksStalled:
            if not on_gpu:
                raise
            raise DeviceError(
                f"machine.ranks is {self._count}, one GPU each, and they have not been free for {timeout:.0f} s",
                "lower machine.ranks in params.yaml, or end what uses the GPUs (ray status shows it)",
            ) from None
        (address,) = self._get([self._ranks[0].rendezvous_address.remote()], timeout)
        self._get([r.join.remote(address, number, self._count) for number, r in enumerate(self._ranks)], timeout)
        if self._state is not None:
            self._get([rank.restore.remote(self._state) for rank in self._ranks], _UNTIL_A_RANK_DIES)

    def _rank_actors(self, *, on_gpu: bool) -> list[Any]:
        actor = ray.remote(num_cpus=0, concurrency_groups={HEARTBEAT_GROUP: 1})(RankActor)
        spec = ray.put(self._spec)
        if on_gpu and self._placement == "colocated":
            return [actor.options(**gpu.options).remote(spec, gpu) for gpu in all_gpus()[: self._count]]
        return [actor.options(num_gpus=int(on_gpu)).remote(spec) for _ in range(self._count)]

    def _get(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        """The results of all; raises as soon as one fails or all stall, since the others would block for ever."""
        heartbeats = [Heartbeat(rank) for rank in self._ranks]
        results: dict[Any, Any] = {}
        waiting = list(futures)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
            results |= zip(done, ray.get(done), strict=True)
            if waiting and min(heartbeat.seconds_since_progress() for heartbeat in heartbeats) > timeout:
                raise _RanksStalled(f"no rank has made progress for {timeout:.0f} s")
        return [results[future] for future in futures]


class RankActor:
    """A learner in a process of its own; `join` builds it, connected to the other ranks."""

    _strategy: DataParallel
    _rank: Rank[Any]

    def __init__(self, spec: LearnerSpec[Any], gpu: Gpu | None = None) -> None:
        """`gpu`: the one to learn on, where Ray has not given one to this actor alone."""
        if gpu is not None:
            gpu.choose()
        self._spec = spec
        self._has_joined = False
        self._before: LearnerState | None = None
        """The state before the last update that was begun."""
        self._copying = threading.Lock()

    def check_versions(self, driver: Mapping[str, str]) -> None:
        """Refuse to learn with other code than the driver's."""
        if difference := difference_error(driver, learning_versions()):
            raise difference

    def rendezvous_address(self) -> str:
        """Where the other ranks connect to this one; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int) -> None:
        self._strategy = self._connect(address, rank, size)
        self._rank = Rank(self._spec, self._strategy)
        self._has_joined = True

    def _connect(self, address: str, rank: int, size: int) -> DataParallel:
        spec = self._spec
        if spec.strategy == "fsdp":
            from nightshift.learners.fsdp import FullySharded  # takes seconds to import

            return FullySharded(address, rank, size, spec.device, cpu_offload=spec.cpu_offload)
        return DataParallel(address, rank, size, spec.device)

    def restore(self, state: LearnerState) -> None:
        self._rank.restore(state)

    def update(self, work: Any) -> tuple[dict[str, float], int]:
        """The metrics, and the version of the policy after it."""
        with self._copying:
            self._before = None  # before the next copy is made: with 7 billion weights two are too many
            self._before = self._rank.state()
        return self._rank.update(work), self._rank.version

    def weights(self) -> tuple[None, Mapping[str, NDArray[Any]] | None]:
        """Of the policy, from rank 0: all ranks have the same, or gather them for it."""
        gathers = self._strategy.shards or self._strategy.rank == 0
        weights = self._rank.policy().weights if gathers else None
        return None, weights if self._strategy.rank == 0 else None

    def state(self) -> LearnerState | None:
        """Of rank 0: all ranks have the same."""
        return self._rank.state() if self._strategy.rank == 0 else None

    def write_shards(self, folder: Path) -> Mapping[str, str]:
        return self._rank.write_shards(folder)

    def state_after(self, version: int) -> tuple[int, LearnerState]:
        """The version, and the state after so many updates: before the update in progress or just made, or as it is
        where the next one has not begun. To be called on another thread than `update`."""
        if self._strategy.shards:
            raise RuntimeError("a sharded rank holds a part of the state only")
        with self._copying:
            before = self._before
            state = before if before is not None and before.version == version else self._rank.state()
        if state.version != version:
            raise RuntimeError(f"this rank is at update {state.version}, not {version}")
        return version, state

    def heartbeats(self) -> int:
        """A count that rises with every microbatch and every sum, to be read on another thread during an update."""
        return self._rank.microbatches + self._strategy.sums if self._has_joined else 0


class _RanksStalled(Exception):
    """A rank hangs, and all others block at the next sum."""


def _check_gpus(device: torch.device, ranks: int) -> None:
    if device.type != "cuda":
        return
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus < ranks:
        raise DeviceError(
            f"machine.ranks is {ranks}, one GPU each, and the Ray cluster has {gpus}",
            "lower machine.ranks or set machine.device: cpu in params.yaml, or add nodes with GPUs",
        )
