"""A Ray cluster of several nodes, as on several machines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.cluster_utils import Cluster

from tests import ray_cluster
from tests.ray_cluster import SMALL


def requested_bundles(gcs_address: str) -> list[dict[str, float]]:
    """Resources that Ray holds as requested from an autoscaler, each on one node."""
    client = GcsClient(address=gcs_address)
    request = client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, namespace=None)
    bundles: list[dict[str, float]] = json.loads(request or "[]")
    return bundles


AddNode = Callable[..., Any]


@pytest.fixture(scope="package")
def cluster(forking: dict[str, Any]) -> Iterator[Cluster]:
    """A head without CPUs."""
    with ray_cluster.cluster(num_cpus=0, **forking) as started:
        yield started


@contextlib.contextmanager
def adding_nodes(cluster: Cluster, forking: dict[str, Any]) -> Iterator[AddNode]:
    """Adds nodes that are gone at the end, as is the driver's connection; it finds them by address alone."""
    added = []

    def add(cpus: int, *, forks: bool = True, **settings: Any) -> Any:
        added.append(cluster.add_node(num_cpus=cpus, **SMALL, **settings, **(forking if forks else {})))
        return added[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield add
    ray.shutdown()
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    cluster.wait_for_nodes()


@pytest.fixture
def add_node(cluster: Cluster, forking: dict[str, Any]) -> Iterator[AddNode]:
    with adding_nodes(cluster, forking) as add:
        yield add
