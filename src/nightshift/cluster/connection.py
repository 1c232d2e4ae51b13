"""The Ray cluster that workers run on: joined at RAY_ADDRESS, or a small one started here."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, worker

from nightshift.cluster.program import ADDRESS_VARIABLE, temporary_folder
from nightshift.errors import RolloutError
from nightshift.interrupts import SECONDS_TO_STOP

_SESSION = "nightshift-ray"
"""With the process and a random part the name of a folder; short, since names of sockets are limited to 107 bytes."""
_SHARED_MEMORY = Path("/dev/shm")
_OBJECT_STORE_BYTES = (256 * 2**20, 16 * 2**30)
"""At least, at most. The answer to a bundle of requests with images is a gigabyte: what does not fit goes to disk."""
_CONNECT_SECONDS = 10.0
_SERVERS = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
"""The raylet ends with its agents."""
_STOPPED = {0, *(-number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))}
"""Exit codes of servers that were told to stop, by us or as a part of our process group."""
_WATCH_SECONDS = 0.02
"""Between two looks at the servers: Ray may end this process soon after one of them."""
_POLL_SECONDS = 0.2
_TIMES_TO_REMOVE = 25
_RESUMES = "run again: it resumes"
_START_ONE = "start it (ray start --head, docs/cluster.md), or unset RAY_ADDRESS to work on this machine alone"


def start_ray(cpus: int) -> None:
    """Join the cluster at RAY_ADDRESS, or start a small one here that lends this many CPUs."""
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS_VARIABLE)
    with _keep_signal_handlers():
        if address:
            _join(address)
            return
        _start(cpus)
    threading.Thread(target=_end_with, args=(worker._global_node,), daemon=True).start()


def stop_ray() -> None:
    """Leave the cluster. A small one that was started here ends, and its folder is removed after it: Ray writes there
    until then. Not left to exit handlers alone, since a process may end without them."""
    ray.shutdown()
    for folder in temporary_folder().glob(f"{_SESSION}-{os.getpid()}-*"):
        _remove(folder)


def _start(cpus: int) -> None:
    folder, object_store = _session_folder(), _object_store_bytes()
    others = set(psutil.Process().children(recursive=True))
    try:
        with _on_loopback(), _last_words():
            ray.init(
                "local",  # not a cluster that another user started on this machine
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=object_store,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(folder),
            )
    except (OSError, ValueError):
        raise
    except Exception as error:  # Ray raises it bare when its servers have not started after 30 s
        _kill(set(psutil.Process().children(recursive=True)) - others)
        reason = " ".join(str(error).split())
        raise RolloutError(f"Ray did not start on this machine: {reason}", "run again when it is less busy") from error


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """Another process says so if this one ends in the block. Ray ends it in C++, where no thread of Python gets its
    turn, if a server is killed while it connects."""
    told = RolloutError("this process ended while Ray started: a server of Ray or itself was killed", _RESUMES)
    script = 'read -r _ || printf "error: %s\\n" "$0" >&2'
    with subprocess.Popen(["sh", "-c", script, str(told)], stdin=subprocess.PIPE) as speaker:
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):  # a signal to the process group has ended it
                speaker.communicate(b"\n")


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end_with(node: Any) -> None:
    """Say so if a server of our cluster is killed, and end. Ray would end this process too, up to a minute later, in
    C++ and without a sentence for people; the next run marks it as killed, and resumes."""
    servers = [info.process for name in _SERVERS for info in node.all_processes[name]]
    while all(server.poll() is None for server in servers):
        time.sleep(_WATCH_SECONDS)
    if any(server.poll() in _STOPPED for server in servers):  # so is this process: it saves and ends by itself
        time.sleep(SECONDS_TO_STOP)
    if worker._global_node is not node or not ray.is_initialized():  # it was ray.shutdown(), which disconnects first
        return
    error = RolloutError("a server of Ray on this machine was killed", _RESUMES)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray's own switch for systems without clusters: its processes listen on 127.0.0.1, and not on every interface.

    The variable is for the processes that Ray starts; this one has read it already.
    """
    name, constant = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    variable = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        del os.environ[name]
        if variable is not None:
            os.environ[name] = variable


def _session_folder() -> Path:
    """Logs, sockets and spilled objects of a cluster here: readable by this user alone, and gone when this process is.

    What a killed process left is removed by the next one.
    """
    for folder in temporary_folder().glob(f"{_SESSION}-*-*"):
        if not _is_alive(int(folder.name.split("-")[-2])):
            shutil.rmtree(folder, ignore_errors=True)
    private = Path(tempfile.mkdtemp(prefix=f"{_SESSION}-{os.getpid()}-", dir=temporary_folder()))
    atexit.register(stop_ray)  # before Ray's own handler, which would make the folder again
    return private / "s"  # Ray opens the folder that it is given to everybody


def _remove(folder: Path) -> None:
    """More than once: on a busy machine a process of Ray still writes its last log meanwhile."""
    for _ in range(_TIMES_TO_REMOVE):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_POLL_SECONDS)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _object_store_bytes() -> int:
    """A quarter of the memory, which is taken only as it is used. Beyond what shared memory has room for, Ray would
    put the store into a folder of /tmp, so a small one (64 MB in a container by default) gets the least."""
    least, most = _OBJECT_STORE_BYTES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else 0
    return max(least, min(most, memory // 4, shared * 3 // 4))


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Ray replaces the signal handlers, also where it fails to start: put ours back."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _join(address: str) -> None:
    _check_reachable(address)
    try:
        ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RolloutError(
            f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {reason}",
            "run on a node of the cluster, with its versions of Python and Ray and its token (docs/cluster.md)",
        ) from error


def _check_reachable(address: str) -> None:
    """Fail at once if nothing listens there: Ray would retry for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():  # Ray has an error message for these
        return
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS)):
            return
    except OSError as error:
        raise RolloutError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}", _START_ONE) from error
