"""The latency of the teleop page on loopback, and its pictures per second, beside a busy core.

    python benchmarks/teleop.py                 # libero_mini at 256², software rendering
    python benchmarks/teleop.py --idle          # without the busy process

A program stands in for the page: it sends a command every 50 ms, and sometimes a changed one. Latency is from sending a
changed command to the moment at which the simulator has executed it; the round trip is until the page hears of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent.resolve())  # and not this folder, which has a libero.py

import numpy as np
from websockets.sync.client import connect

from nightshift import config
from nightshift.access import Access
from nightshift.envs.libero.compiling import compile_control_step
from nightshift.project import paths
from nightshift.teleop.library import Library
from nightshift.teleop.server import Server, open_server
from nightshift.teleop.session import PICTURE_SIZE, Setup

PERIOD = 0.05
CHANGE_EVERY = 7
"""Commands of which one is changed; not a divisor of anything, so that changes come at any phase of control."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--idle", action="store_true")
    options = parser.parse_args()
    compile_control_step()
    params = config.load(paths.PARAMS)
    with tempfile.TemporaryDirectory() as folder, busy_core(wanted=not options.idle):
        os.chdir(folder)
        setup = Setup(env=params.env, states=params.states, commit="benchmark")
        library = Library("benchmark", {"actions": (-1.0, 1.0)})
        with running(open_server(setup, library, Access(None), ("127.0.0.1", 0), time.monotonic)) as port:
            measured = measure(port, options.seconds)
        library.close()
    report(measured, setup.views)


@contextmanager
def busy_core(*, wanted: bool) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    if wanted:
        process.start()
    yield
    if wanted:
        process.terminate()
        process.join()


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def running(server: Server) -> Iterator[int]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.port
    finally:
        server.stop()
        thread.join()


def measure(port: int, seconds: float) -> dict[str, Any]:
    """Fly for so many seconds. The clocks of the server and of this program are the same one."""
    found: dict[str, Any] = {"latency": [], "round_trip": [], "frames": {}, "age": [], "steps": 0}
    with connect(f"ws://127.0.0.1:{port}/socket", max_size=None) as socket:

        def say(**message: Any) -> None:
            socket.send(json.dumps(message))

        say(type="hello")
        _until_ready(socket)
        say(type="pilot", who="benchmark")
        sent: dict[int, float] = {}
        stop = threading.Event()
        thread = threading.Thread(target=_fly, args=(say, sent, stop))
        thread.start()
        time.sleep(4 * PERIOD)
        say(type="start")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            _note(socket.recv(timeout=60), found, sent, say)
        stop.set()
        thread.join()
        say(type="pause")
    found["seconds"] = seconds
    return found


def _until_ready(socket: Any) -> None:
    """Until the first picture: making a GL context takes seconds, and holds the interpreter meanwhile."""
    while not isinstance(socket.recv(timeout=600), bytes):
        pass


def _fly(say: Any, sent: dict[int, float], stop: threading.Event) -> None:
    """Commands that move the hand to and fro; `sent` has when each changed one left."""
    seq, sign, random = 0, 1.0, np.random.default_rng(0)
    while not stop.is_set():
        seq += 1
        if seq % CHANGE_EVERY == 0:
            sign = -sign
            time.sleep(random.uniform(0, PERIOD))
            sent[seq] = time.monotonic()
        say(type="drive", seq=seq, axes=[0.0, sign, 0.0, 0.0, 0.0, 0.0], gripper="open", speed=0.1)
        time.sleep(PERIOD)


def _note(message: str | bytes, found: dict[str, Any], sent: dict[int, float], say: Any) -> None:
    now = time.monotonic()
    if isinstance(message, bytes):
        say(type="seen")
        view, _, stamp = struct.unpack_from("<BxxxId", message)
        found["frames"][view] = found["frames"].get(view, 0) + 1
        found["age"].append(now - stamp)
        return
    state = json.loads(message)
    if state["type"] != "state":
        return
    found["steps"], found["phase"] = state["step"], state["phase"]
    for seq in [seq for seq in sent if seq <= state["seq"]]:
        began = sent.pop(seq)
        found["latency"].append(state["time"] - began)
        found["round_trip"].append(now - began)


def report(found: dict[str, Any], views: list[str]) -> None:
    for name, goal in (("latency", " (goal: below 50 ms)"), ("round_trip", ""), ("age", " of pictures")):
        if not found[name]:
            print(f"{name}: nothing was measured; the session is {found['phase']}")
            continue
        values = np.array(found[name]) * 1000
        told = "  ".join(f"p{q} {np.percentile(values, q):.0f} ms" for q in (50, 95, 99))
        print(f"{name + goal:32} {told}  ({len(values)})")
    for view, count in sorted(found["frames"].items()):
        print(f"{views[view]:32} {count / found['seconds']:.1f} pictures/s at {PICTURE_SIZE}² (goal: 10)")
    print(f"{'control':32} {found['steps'] / found['seconds']:.1f} steps/s, {found['phase']}")


if __name__ == "__main__":
    main()
