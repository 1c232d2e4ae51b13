"""Control steps per second through HTTP against in process, and the latency of a step: python benchmarks/robot.py

The same zero actions from the same start on libero_mini's lift_cube, in rounds that take turns. The server is a process
of its own, as `nightshift robot serve` runs it. The robot has to be commanded 20 times a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).parent.parent.resolve())  # and not this folder, which has a libero.py

import numpy as np

from nightshift import config, envs
from nightshift.envs.base import Env
from nightshift.envs.robot.client import fetch_description
from nightshift.errors import SimulatorError


class Setting(NamedTuple):
    cameras: tuple[str, ...] = ("agentview",)
    shadows: bool = False
    chunk: int = 1
    """Control steps between two images: those that a policy decides about at once."""


SETTINGS = {
    "state": Setting(cameras=()),
    "camera, shadows": Setting(shadows=True),
    "camera": Setting(),
    "camera, chunks of 8": Setting(chunk=8),
}
"""Images are of 128²."""
NEEDED = 20.0


def simulated(cameras: tuple[str, ...], *, shadows: bool) -> config.Env:
    drawn = config.Cameras(names=cameras, size=128, shadows=shadows)
    return config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=60, cameras=drawn)


def serve(env: config.Env, port: int) -> None:
    from nightshift.robot_server import app
    from nightshift.robot_server.controller import Controller
    from nightshift.robot_server.simulated import SimulatedArm

    with ThreadPoolExecutor(1) as thread:
        arm = thread.submit(SimulatedArm, env, watchdog_s=60.0).result()
        app.serve(Controller(arm), thread, ("127.0.0.1", port))


def through_http(env: config.Env, url: str) -> config.Env:
    deadline = time.monotonic() + 300
    while True:
        try:
            described = fetch_description(url, 60.0)
            break
        except SimulatorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    scale = described.action_scale or (0.05, 0.5)
    names = config.RobotLimits.model_fields
    robot = config.Robot(
        url=url,
        description=described.digest,
        scale=config.RobotScale(position=scale[0], rotation=scale[1]),
        limits=config.RobotLimits(**{name: getattr(described.limits, name) for name in names}),
        deadline_s=60.0,
        attempts=1,
        reset_deadline_s=60.0,
        image_age_s=1.0,
        reset="script",
        success="server",
        answer_within_s=60.0,
    )
    return env.model_copy(update={"suite": "robot", "robot": robot})


def latencies(env: Env, setting: Setting, steps: int) -> list[float]:
    """Seconds of every control step, with the images before it."""
    still = np.zeros(7, np.float32)
    env.reset("train", 0)
    found = []
    for step in range(steps):
        started = time.perf_counter()
        if setting.cameras and step % setting.chunk == 0:
            env.camera_images(setting.cameras)
        env.step(still)
        found.append(time.perf_counter() - started)
    return found


def measure(name: str, rounds: int, steps: int) -> None:
    setting = SETTINGS[name]
    env = simulated(setting.cameras, shadows=setting.shadows)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(env, port), daemon=True)
    process.start()
    try:
        remote = through_http(env, f"http://127.0.0.1:{port}")
        made = {"in process": envs.make(envs.tasks(env)[0], env), "HTTP": envs.make(envs.tasks(remote)[0], remote)}
        times: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(rounds):
            for way, each in made.items():
                times[way] += latencies(each, setting, steps)
    finally:
        process.terminate()
        process.join()
    for way, found in times.items():
        median, slow = np.percentile(np.array(found) * 1e3, [50, 99])
        rate = len(found) / sum(found)
        print(f"{name:20} {way:12} {rate:8.1f} steps/s   median {median:6.2f} ms   99 % {slow:6.2f} ms")
    worst = len(times["HTTP"]) / sum(times["HTTP"])
    print(f"{name:20} {worst / NEEDED:.1f} times the 20 steps/s that a robot needs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS))
    chosen = parser.parse_args()
    for setting in chosen.only or SETTINGS:
        measure(setting, chosen.rounds, chosen.steps)
