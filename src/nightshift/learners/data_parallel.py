"""Data parallel ranks: each holds whole networks and learns from its own part of the episodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nightshift.algorithms.strategy import Strategy

_TIMEOUT = timedelta(days=7)
"""Long on purpose: the driver detects a stall by the ranks' progress, not by the duration of one sum."""


class DataParallel(Strategy):
    """Sums over torch's process group. All ranks begin with the same weights, and take the same steps."""

    def __init__(self, address: str, rank: int, size: int, device: torch.device) -> None:
        """Waits for the other ranks, which connect to rank 0 at `address`."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # counts are summed on the CPU, always
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=_TIMEOUT)
        self.sums = 0
        """Done so far."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            self.sums += 1
