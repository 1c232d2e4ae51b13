"""The latency of the teleop page on loopback, and its pictures per second, beside a busy core.

    MUJOCO_GL=osmesa python benchmarks/teleop.py            # libero_mini at 256², software rendering
    MUJOCO_GL=osmesa python benchmarks/teleop.py --idle     # without the busy process
    MUJOCO_GL=osmesa python benchmarks/teleop.py --record   # where both cameras are recorded at 256²

A process stands in for the page: it sends a command every 50 ms, and sometimes a changed one. Latency is from sending a
changed command to the moment at which the simulator has executed it; the round trip is until the page hears of it.
These need cores on which nothing else runs. The processor's time of a picture and of a control step comes first: other
load hardly changes it.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent.resolve())  # and not this folder, which has a libero.py

import numpy as np
from websockets.sync.client import connect

from nightshift import config
from nightshift.access import Access
from nightshift.envs.base import Fleet
from nightshift.envs.libero.compiling import compile_control_step
from nightshift.project import paths
from nightshift.teleop.library import Library
from nightshift.teleop.mirror import SCENE, to_jpeg
from nightshift.teleop.server import SessionServer, open_server
from nightshift.teleop.session import PICTURE_SIZE, Setup

PERIOD = 0.05
TIMES = 40
SPAWN = multiprocessing.get_context("spawn")
CHANGE_EVERY = 7
"""Commands of which one is changed; not a divisor of anything, so that changes come at any phase of control."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    compile_control_step()
    params = config.load(paths.PARAMS)
    recorded = {"names": ("agentview", "wrist"), "size": PICTURE_SIZE, "shadows": False} if options.record else {}
    env = params.env.model_copy(update={"cameras": params.env.cameras.model_copy(update=recorded)})
    setup = Setup(env=env, states=params.states, commit="benchmark")
    with tempfile.TemporaryDirectory() as folder, SPAWN.Pool(1) as page:
        os.chdir(folder)
        report_parts(setup)
        library = Library("benchmark", {"actions": (-1.0, 1.0)})
        with running(open_server(setup, library, Access(None), ("127.0.0.1", 0), time.monotonic)) as port:
            page.apply(wait_for_picture, (port,))
            with busy_core(wanted=not options.idle):
                before = time.process_time()
                measured = page.apply(measure, (port, options.seconds))
                measured["busy"] = (time.process_time() - before) / options.seconds
        library.close()
    report(measured, setup.views)


def report_parts(setup: Setup) -> None:
    """The processor's time of what is done for every picture and every control step."""
    fleet = setup.make_fleet(next(iter(setup.tasks.values())))
    with ThreadPoolExecutor(1) as thread:  # the GL context belongs to it
        thread.submit(_report_parts, fleet, setup.views).result()


def _report_parts(fleet: Fleet, views: list[str]) -> None:
    lane, active = np.zeros(1, np.int64), np.ones(1, np.bool_)
    action = np.full((1, fleet.action_space.size), 0.1, np.float32)
    fleet.reset("train", [0])
    scene = fleet.render(0)
    assert scene is not None, "no GL library works here"
    parts: dict[str, Callable[[], object]] = {
        "control step": lambda: fleet.step(action, active),
        "picture of scene": lambda: fleet.render(0),
        **{f"picture of {view}": partial(fleet.look, lane, [view]) for view in views if view != SCENE},
        "JPEG": lambda: to_jpeg(scene),
    }
    for name, part in parts.items():
        print(f"{name:32} {_milliseconds(part):.1f} ms of a core")
    fleet.close()


def _milliseconds(part: Callable[[], object]) -> float:
    part()
    before = time.process_time()
    for _ in range(TIMES):
        part()
    return (time.process_time() - before) / TIMES * 1000


@contextmanager
def busy_core(*, wanted: bool) -> Iterator[None]:
    process = SPAWN.Process(target=_spin, daemon=True)
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
def running(server: SessionServer) -> Iterator[int]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.port
    finally:
        server.stop()
        thread.join()


def wait_for_picture(port: int) -> None:
    """Making a GL context takes seconds."""
    with connect(f"ws://127.0.0.1:{port}/socket", max_size=None) as socket:
        socket.send(json.dumps({"type": "hello"}))
        while not isinstance(socket.recv(timeout=600), bytes):
            pass


def measure(port: int, seconds: float) -> dict[str, Any]:
    """Fly for so many seconds. The clocks of the server and of this process are the same one."""
    found: dict[str, Any] = {"latency": [], "round_trip": [], "frames": {}, "age": [], "steps": 0}
    with connect(f"ws://127.0.0.1:{port}/socket", max_size=None) as socket:

        def say(**message: Any) -> None:
            socket.send(json.dumps(message))

        say(type="hello")
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
    print(f"{'server':32} {found['busy']:.2f} cores")
    print(f"{'control':32} {found['steps'] / found['seconds']:.1f} steps/s, {found['phase']}")


if __name__ == "__main__":
    main()
