"""How much one driver can take: the real Ray pool with simulators that only wait.

A simulator here sleeps for the time of a control step and computes nothing, so hundreds of them fit on a small machine,
and what remains is the pool: sending requests, collecting episodes. `ideal` is what the simulators could do if the
driver took no time. One JSON line per number of simulators, without images and with two 128² cameras: requests,
episodes and megabytes per second through the driver, the share of the ideal, and the CPU time of the driver per
request. The driver is saturated where the share of the ideal falls while its CPU time approaches the wall-clock time.

Example: benchmarks/scale.py --workers 8 --simulators 64 128 256 512
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Python looks for modules beside the script first, where benchmarks/libero.py would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

from nightshift import config, policies
from nightshift.envs import fake
from nightshift.envs.base import ActionSpace, Fleet, Steps
from nightshift.envs.sequential_fleet import step_by_step
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.pool import RayPool
from nightshift.types import Array, Observation, RolloutRequest, Scene, Split, Task, Trajectory

GROUP, CHUNK, HORIZON, SIZE = 8, 8, 48, 128
CAMERAS = ("agentview", "wrist")
STEP_SECONDS = 0.02
"""Of a control step of one group: eight simulations of libero_mini on one core."""
ROUNDS_PER_SIMULATOR = 3


@dataclass
class WaitingFleet:
    """Simulators that sleep. Cameras show the same picture all the time."""

    task: Task
    action_space: ActionSpace = fake.ACTIONS
    count: int = 0

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        self.count = len(init_states)
        return self._observation()

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        time.sleep(STEP_SECONDS)
        nothing = np.zeros(self.count, np.bool_)
        return Steps(self._observation(), nothing, nothing)

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        return step_by_step(self, actions, active)

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        return {camera: np.zeros((len(lanes), SIZE, SIZE, 3), np.uint8) for camera in cameras}

    def sibling(self) -> Fleet:
        return WaitingFleet(self.task)

    def scene(self, lane: int) -> Scene:
        raise NotImplementedError

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        return None

    def close(self) -> None:
        """Nothing to close."""

    def _observation(self) -> Observation:
        return {"proprio": np.zeros((self.count, 3), np.float32)}


def make_fleet(task: Task, env: config.Env) -> Fleet:
    return WaitingFleet(task)


def policy(cameras: Sequence[str]) -> PolicySnapshot:
    """As small as a policy can be: it must cost the workers next to nothing."""
    shapes: dict[str, tuple[int, ...]] = {"proprio": (3,), **dict.fromkeys(cameras, (SIZE, SIZE, 3))}
    chosen: config.Policy = config.GaussianMlp(
        family="gaussian_mlp",
        inputs=("proprio",),
        hidden=(4,),
        activation="tanh",
        layer_norm=False,
        chunk=CHUNK,
        head="gaussian",
    )
    if cameras:
        chosen = config.Cnn(
            family="cnn",
            inputs=("proprio", *cameras),
            channels=(1, 1, 1, 1),
            hidden=(4,),
            max_words=1,
            chunk=CHUNK,
            head="gaussian",
            augmentation=config.Augmentation(crop=0, jitter=0.0),
        )
    return snapshot(policies.fresh(chosen, shapes, fake.ACTIONS.size))


def measure(simulators: int, workers: int, cameras: Sequence[str]) -> dict[str, Any]:
    groups = simulators // GROUP
    at_once = groups // workers
    drawn = config.Cameras(names=tuple(cameras), size=SIZE, shadows=False)
    env = config.Env(suite=fake.NAME, tasks=(), protocol="openvla-oft", horizon=HORIZON, cameras=drawn)
    settings = EngineSettings(device=torch.device("cpu"), threads=at_once, requests_at_once=at_once)
    pool = RayPool(workers, env, settings, make_fleet=make_fleet)
    requests = [
        RolloutRequest(task="near", split="train", init_state=n % 100, controller="greedy", seed=n, count=GROUP)
        for n in range(ROUNDS_PER_SIMULATOR * groups)
    ]
    sent = policy(cameras)
    list(pool.run(requests[:groups], sent))  # starts the workers
    started, cpu = time.perf_counter(), time.process_time()
    megabytes = sum(_megabytes(one) for _, played in pool.run(requests, sent) for one in played)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    pool.close()
    ideal = groups / (HORIZON * STEP_SECONDS)
    return {
        "name": f"scale/{'images' if cameras else 'states'}/{simulators}",
        "ours": round(len(requests) / seconds, 2),
        "peer": round(ideal, 2),
        "ratio": round(len(requests) / seconds / ideal, 3),
        "episodes_per_second": round(len(requests) * GROUP / seconds, 1),
        "megabytes_per_second": round(megabytes / seconds, 1),
        "driver_ms_per_request": round(1000 * cpu / len(requests), 2),
        "driver_busy": round(cpu / seconds, 3),
        "workers": workers,
        "groups_per_worker": at_once,
    }


def _megabytes(episode: Trajectory) -> float:
    arrays = (
        *episode.observations.values(),
        *episode.final.values(),
        episode.actions,
        episode.executed,
        episode.log_probs,
    )
    return sum(array.nbytes for array in arrays) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--simulators", type=int, nargs="+", default=[64, 128, 256, 512])
    chosen = parser.parse_args()
    if min(chosen.simulators) < GROUP * chosen.workers:
        parser.error(f"{chosen.workers} workers need at least {GROUP * chosen.workers} simulators: {GROUP} are a group")
    for cameras in ((), CAMERAS):
        for simulators in chosen.simulators:
            sys.stdout.write(json.dumps(measure(simulators, chosen.workers, cameras)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
