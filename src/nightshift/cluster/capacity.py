"""How many workers the Ray cluster has room for, and asking its autoscaler for more."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import ray
from ray.autoscaler.sdk import request_resources

REMIND_SECONDS = 60.0
_POLL_SECONDS = 1.0
_ROUNDING = 1e-6
"""Of shares of a GPU: three thirds fit on one."""
_FEWER = (
    "machine.workers is %d, %s each, and the cluster has %d of them: the run goes on with these and takes up more "
    "as they come (ray status shows the nodes)"
)
_NONE = "machine.workers is %d, %s each, and the cluster has none: waiting for the first (ray status shows the nodes)"

_log = logging.getLogger(__name__)


class Capacity:
    """Workers that the cluster has room for. It may have room for fewer than wanted, grow and shrink.

    No more workers than that are given requests: a request to a worker without a CPU would wait for one.
    """

    def __init__(self, wanted: int, *, cpus_each: int, gpus_each: float = 0) -> None:
        self.wanted = wanted
        self._each: dict[str, float] = {"CPU": cpus_each, **({"GPU": gpus_each} if gpus_each else {})}
        """Resources of one worker, all on one node."""
        self.workers = wanted
        """Available when last looked at."""
        self._reminded = -REMIND_SECONDS
        self._has_requested = False

    def available_workers(self) -> int:
        """At least one: without room for any this waits, and logs that it does."""
        while not (available := min(self.wanted, _places(self._each))):
            self.workers = 0
            self._request_more()
            self._remind()
            time.sleep(_POLL_SECONDS)
        if available not in (self.workers, self.wanted):
            _log.warning(_FEWER, self.wanted, self._size, available)
        self.workers = available
        if available < self.wanted:
            self._request_more()
        return available

    def release(self) -> None:
        """Withdraw the request, so that the autoscaler may remove idle nodes; also one that a killed run left."""
        request_resources(num_cpus=0)
        self._has_requested = False

    def _request_more(self) -> None:
        """Ask an autoscaler for nodes with room for `wanted` workers. The request stands until `release`, also while
        nodes come and go; a cluster without an autoscaler ignores it."""
        if not self._has_requested:
            request_resources(bundles=[self._each] * self.wanted)
            self._has_requested = True

    @property
    def _size(self) -> str:
        cpus = "one CPU" if self._each["CPU"] == 1 else f"{self._each['CPU']} CPUs"
        return f"{cpus} and {self._each['GPU']:.2g} GPUs" if "GPU" in self._each else cpus

    def _remind(self) -> None:
        if time.monotonic() - self._reminded > REMIND_SECONDS:
            self._reminded = time.monotonic()
            _log.warning(_NONE, self.wanted, self._size)


def _places(each: Mapping[str, float]) -> int:
    """How many workers of this size the nodes have room for."""
    return sum(_places_on(node["Resources"], each) for node in ray.nodes() if node["Alive"])


def _places_on(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    return min(int(node.get(name, 0) / amount + _ROUNDING) for name, amount in each.items())
