"""Processes on the nodes of a Ray cluster: a task starts one, waits for it and ends it.

Ray decides on which node, by the CPUs and GPUs that each takes. A process whose node is lost is started again on
another one: what it does must resume. Its folder must be on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time

import ray
from ray.exceptions import RayError, RayTaskError

from nightshift.cluster.connection import start_ray, stop_ray
from nightshift.cluster.gpus import VISIBLE_GPUS
from nightshift.cluster.program import STARTED_BY, Program
from nightshift.errors import NightshiftError, ProjectError, RolloutError
from nightshift.interrupts import SECONDS_TO_STOP

_NODES_TO_LOSE = 3
_POLL_SECONDS = 0.2


class ClusterProcesses:
    """Each takes these CPUs and GPUs of one node of the cluster at RAY_ADDRESS."""

    def __init__(self, *, cpus: int, gpus: int) -> None:
        start_ray(cpus)
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": _NODES_TO_LOSE, "scheduling_strategy": "SPREAD"}
        self._start = ray.remote(**options)(_call)
        self._tasks: list[ray.ObjectRef] = []
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def hosts(self) -> set[str]:
        """Names of the machines that the nodes are on."""
        return {str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}

    def call(self, program: Program) -> int:
        """Have it run and wait for its exit code."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            self._tasks.append(task := self._start.remote(program))
        try:
            return int(ray.get(task))
        except RayTaskError as error:
            if isinstance(error.cause, NightshiftError):
                raise error.cause from None
            raise
        except RayError as error:
            raise RolloutError(f"the Ray cluster lost a process: {' '.join(str(error).split())}") from error

    def stop(self) -> None:
        """End those that run and begin no other."""
        with self._lock:
            self._stopped = True
            for task in self._tasks:
                ray.cancel(task)

    def close(self) -> None:
        """Leave the cluster when no process is left, so that none is killed in the middle of its end."""
        if self._tasks:
            ray.wait(self._tasks, num_returns=len(self._tasks), timeout=SECONDS_TO_STOP)
        stop_ray()


def _call(program: Program) -> int:
    if not program.folder.is_dir():
        raise ProjectError(
            f"the node {socket.gethostname()} does not see {program.folder}",
            "put the project on a file system that all nodes of the cluster share",
        )
    gpus = {VISIBLE_GPUS: os.environ[VISIBLE_GPUS]} if VISIBLE_GPUS in os.environ else {}
    with program.log.open("w") as log:
        process = subprocess.Popen(
            program.command,
            cwd=program.folder,
            env={**program.environment, **gpus, STARTED_BY: str(os.getpid())},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while process.poll() is None:  # a wait would not be interrupted by ray.cancel
            time.sleep(_POLL_SECONDS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        process.kill()
    return process.returncode
