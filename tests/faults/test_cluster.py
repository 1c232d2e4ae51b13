"""Three Ray nodes, as on a cluster, and one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from nightshift.distributed.local import LocalPool
from nightshift.distributed.pool import RayPool
from nightshift.types import Trajectory
from tests.distributed.test_pool import ENV, POLICY, actions, requests, same


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, list[Any]]]:
    """A head without room for workers, and two nodes with room for two each; the driver finds them by address alone."""
    small = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    others = [cluster.add_node(num_cpus=2, **small) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster, others
    ray.shutdown()
    cluster.shutdown()


def test_a_node_that_is_lost_costs_no_episode_and_changes_none(nodes: tuple[Cluster, list[Any]]) -> None:
    cluster, others = nodes
    pool = RayPool(3, ENV)
    wanted = requests(30)
    results: dict[int, list[Trajectory]] = {}
    for index, trajectories in pool.run(wanted, POLICY):
        assert index not in results
        results[index] = trajectories
        if len(results) == 5:
            cluster.remove_node(others[0], allow_graceful=False)
    assert same(actions(results), actions(dict(LocalPool(ENV).run(wanted, POLICY))))
    assert not others[0].any_processes_alive()
    assert pool.spent()["busy"] > 0
