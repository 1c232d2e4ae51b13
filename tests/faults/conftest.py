"""A Ray cluster of several nodes, as on several machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

AddNode = Callable[..., Any]
_SMALL = {"object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for workers."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_SMALL})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def add_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddNode]:
    """Adds nodes that are gone after the test, as is the driver's connection; it finds them by address alone."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    added = []

    def add(cpus: int, **settings: Any) -> Any:
        added.append(cluster.add_node(num_cpus=cpus, **_SMALL, **settings))
        return added[-1]

    yield add
    ray.shutdown()
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    cluster.wait_for_nodes()
