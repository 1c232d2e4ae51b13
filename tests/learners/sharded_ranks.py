"""Ranks as plain processes with gloo: Ray would take longer to start than they take to learn."""

from __future__ import annotations

import pickle
import tempfile
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.data_parallel import DataParallel
from nightshift.learners.fsdp import FullySharded
from nightshift.learners.local import Rank
from nightshift.policies.snapshot import PolicySnapshot
from tests.forks import fork

_SECONDS = 300.0
"""A rank that waits for another one for ever fails the test."""


@dataclass(frozen=True, kw_only=True)
class Work:
    spec: LearnerSpec[Any]
    updates: Sequence[Sequence[Any]]
    """Of each update, one part of the work per rank."""
    start: LearnerState | None = None
    save: Path | None = None
    """Where to write the state after the last update."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one rank."""

    policy: PolicySnapshot
    state: LearnerState
    metrics: Mapping[str, float]
    """Of the last update."""
    sums: Mapping[str, str]
    """Of the files it wrote."""
    held: int
    """Elements of the policy's parameters that this rank holds."""
    microbatches: int


def run(work: Work) -> list[Result]:
    """On as many processes as an update has parts."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/{uuid.uuid4().hex}"
        copied = pickle.dumps(work)  # multiprocessing would share the memory of its tensors
        ranks = [fork(_rank, rendezvous, number, copied, folder) for number in range(len(work.updates[0]))]
        for process in ranks:
            process.join(_SECONDS)
            if process.is_alive():
                process.kill()
        found = [Path(folder) / str(number) for number in range(len(ranks))]
        assert all(path.exists() for path in found), f"ranks that hang or died: {[p.exitcode for p in ranks]}"
        results = [pickle.loads(path.read_bytes()) for path in found]
    for result in results:
        assert isinstance(result, Result), result
    return results


def _rank(rendezvous: str, number: int, copied: bytes, folder: str) -> None:
    try:
        work: Work = pickle.loads(copied)
        result: Result | str = _work(_connect(rendezvous, number, work), work)
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the test shows it
        result = traceback.format_exc()
    (Path(folder) / str(number)).write_bytes(pickle.dumps(result))


def _connect(rendezvous: str, number: int, work: Work) -> DataParallel:
    spec, size = work.spec, len(work.updates[0])
    if spec.strategy == "fsdp":
        return FullySharded(rendezvous, number, size, spec.device, cpu_offload=spec.cpu_offload)
    return DataParallel(rendezvous, number, size, spec.device)


def _work(strategy: DataParallel, work: Work) -> Result:
    rank: Rank[Any] = Rank(work.spec, strategy)
    if work.start is not None:
        rank.restore(work.start)
    metrics: Mapping[str, float] = {}
    for parts in work.updates:
        metrics = rank.update(parts[strategy.rank])
    return Result(
        policy=rank.policy(),
        state=rank.state(),
        metrics=metrics,
        sums=rank.write_shards(work.save) if work.save and strategy.shards else {},
        held=sum(_local(tensor).numel() for tensor in rank._learner.policy.parameters()),
        microbatches=rank.microbatches,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
