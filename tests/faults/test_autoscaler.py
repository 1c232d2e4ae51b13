"""A real autoscaler, whose nodes are processes of this machine, adds the node that a pool lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import ray

from nightshift.cluster.capacity import Capacity
from nightshift.cluster.connection import start_ray
from tests.faults.conftest import requested_bundles
from tests.ports import free_port
from tests.ray_cluster import SMALL, cluster

WORKERS = 2
DEADLINE_SECONDS = 60
_HEAD = "ray.head.default"
_NO_SSH = {"disable_node_updaters": True, "disable_launch_config_check": True}


def settings(gcs_address: str) -> dict[str, object]:
    """A head without CPUs, and at most one node with one CPU per worker."""
    commands = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    starts = ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    return {
        "cluster_name": "autoscaled",
        "provider": {"type": "fake_multinode", "gcs_address": gcs_address, **_NO_SSH},
        "available_node_types": {
            _HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "simulators": {"resources": {"CPU": WORKERS, **SMALL}, "node_config": {}, "max_workers": 1},
        },
        "head_node_type": _HEAD,
        "max_workers": 1,
        "idle_timeout_minutes": 1,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in (*commands, *starts)},
    }


@pytest.fixture
def autoscaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Joined by this process, as a run would at RAY_ADDRESS."""
    monkeypatch.setenv("RAY_FAKE_CLUSTER", "1")
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    port = free_port()
    file = tmp_path / "autoscaling.json"
    file.write_text(json.dumps(settings(f"{ray.util.get_node_ip_address()}:{port}")))
    with cluster(num_cpus=0, gcs_server_port=port, autoscaling_config=str(file), no_monitor=False) as started:
        monkeypatch.setenv("RAY_ADDRESS", started.address)
        start_ray(WORKERS)
        yield
        ray.shutdown()


def cpus() -> int:
    return int(ray.cluster_resources().get("CPU", 0))


@pytest.mark.slow
@pytest.mark.usefixtures("autoscaled")
def test_a_missing_node_is_requested_and_the_request_is_withdrawn() -> None:
    capacity = Capacity(WORKERS, cpus_each=1)
    assert cpus() == 0
    waiting = Thread(target=capacity.available_workers, daemon=True)
    waiting.start()
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive(), "the autoscaler added no node"
    assert capacity.workers == WORKERS
    assert requested_bundles(ray.get_runtime_context().gcs_address) == [{"CPU": 1}] * WORKERS
    capacity.release()
    assert requested_bundles(ray.get_runtime_context().gcs_address) == []
