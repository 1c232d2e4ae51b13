"""Ray clusters of one machine, whose nodes are processes, and workers that are forked."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests import handover
from tests.forks import fork
from tests.waiting import SECONDS

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 * 2**20}
_HEALTH_CHECKS = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""A killed node refuses the connection and is given up after five checks: 3 s apart by default. A slow one has 10 s to
answer each, as by default."""
_NO_SIDE_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""An autoscaler, a reader of logs and a server of statistics: each is a new interpreter, as long as the cluster is."""


@contextlib.contextmanager
def cluster(**settings: Any) -> Iterator[Cluster]:
    """A cluster of a head only. Ray leaves signal handlers behind, which other tests must not see."""
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    head = {**_NO_SIDE_PROCESSES, "_system_config": _HEALTH_CHECKS, **SMALL, **settings}
    with (
        mock.patch.object(Cluster._wait_for_node, "__defaults__", (SECONDS,)),  # 30 by default
        mock.patch.object(Cluster.wait_for_nodes, "__defaults__", (SECONDS,)),
    ):
        with _keep_signal_handlers(), mock.patch.object(Node, "start_api_server"):
            started = Cluster(initialize_head=True, head_node_args=head)
        yield started
        with _keep_signal_handlers():
            started.shutdown()


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def forked_workers() -> Iterator[dict[str, Any]]:
    """Settings of Ray nodes whose workers are forked. Ray knows a worker by the socket that it opens and by the process
    number that it sends, so it need not be the process that Ray started."""
    from ray._private.workers import default_worker

    with tempfile.TemporaryDirectory(prefix="ray-workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen()
        server = fork(_serve, listener, default_worker.__file__)
        yield {"worker_path": handover.__file__, "env_vars": {handover.ADDRESS_VARIABLE: address}}
        server.kill()
        server.join()


def _serve(listener: socket.socket, program: str) -> None:
    """Fork a worker for every connection. Nothing of Ray is imported before that: it reads some of its variables (the
    job, the process number of the raylet) when it is imported."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = [program, *handover.take_over(connection)]
            runpy.run_path(program, run_name="__main__")
        connection.close()
