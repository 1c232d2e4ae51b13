"""A Ray cluster of several nodes, as on several machines."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.cluster_utils import Cluster


def requested_bundles(gcs_address: str) -> list[dict[str, float]]:
    """Resources that Ray holds as requested from an autoscaler, each on one node."""
    client = GcsClient(address=gcs_address)
    request = client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, namespace=None)
    bundles: list[dict[str, float]] = json.loads(request or "[]")
    return bundles


AddNode = Callable[..., Any]
_SMALL = {"object_store_memory": 80 * 2**20}
_HEALTH_CHECKS = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""A killed node refuses the connection and is given up after five checks: 3 s apart by default. A slow one has 10 s to
answer each, as by default."""


@contextlib.contextmanager
def head_without_cpus(**settings: Any) -> Iterator[Cluster]:
    """A cluster of a head only. Ray leaves a signal handler behind, which other tests must not see."""
    handler = signal.getsignal(signal.SIGTERM)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH_CHECKS, **_SMALL, **settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with head_without_cpus() as cluster:
        yield cluster


@contextlib.contextmanager
def adding_nodes(cluster: Cluster) -> Iterator[AddNode]:
    """Adds nodes that are gone at the end, as is the driver's connection; it finds them by address alone."""
    added = []

    def add(cpus: int, **settings: Any) -> Any:
        added.append(cluster.add_node(num_cpus=cpus, **_SMALL, **settings))
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
def add_node(cluster: Cluster) -> Iterator[AddNode]:
    with adding_nodes(cluster) as add:
        yield add
