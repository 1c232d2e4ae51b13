"""The GPUs of a Ray cluster one by one, for actors that share theirs with workers.

Ray counts shares of GPUs and fills one after the other, so it may give two actors the same one. An actor that Ray gives
none is told here which one to use.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class Gpu(NamedTuple):
    node: str
    number: int
    """Among those of the node."""

    @property
    def options(self) -> dict[str, Any]:
        """Of an actor on its node, which Ray gives no GPU."""
        return {"num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False)}

    def choose(self) -> None:
        """Let this process, on that node, see this GPU alone; before torch looks for GPUs."""
        given = os.environ.get(VISIBLE_GPUS)
        os.environ[VISIBLE_GPUS] = given.split(",")[self.number] if given else str(self.number)


def all_gpus() -> list[Gpu]:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    return [Gpu(node["NodeID"], number) for node in nodes for number in range(int(node["Resources"].get("GPU", 0)))]
