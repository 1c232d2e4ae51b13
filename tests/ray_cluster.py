"""Ray clusters of one machine, whose nodes are processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 * 2**20}
_HEALTH_CHECKS = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""A killed node refuses the connection and is given up after five checks: 3 s apart by default. A slow one has 10 s to
answer each, as by default."""


@contextlib.contextmanager
def cluster(**settings: Any) -> Iterator[Cluster]:
    """A cluster of a head only. Ray leaves signal handlers behind, which other tests must not see."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    head = {"include_dashboard": False, "_system_config": _HEALTH_CHECKS, **SMALL, **settings}
    started = Cluster(initialize_head=True, head_node_args=head)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    yield started
    started.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)
