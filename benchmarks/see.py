"""Rollouts of a policy that sees: our engine against simulators that draw every step, in one run on the same machine.

The peer is what LIBERO's and SimpleVLA-RL's workers do: LIBERO's `SubprocVectorEnv`, a process and a GL context per
simulation, both cameras drawn after every control step, and the same policy asked for all of them once per chunk.
One JSON line with shadows and one without: decisions per second of both and their ratio (medians over rounds that take
turns, with the least and the most), our control steps and frames per second, where our time went, GPU utilisation.

Example: benchmarks/see.py --simulators 16 --requests 48
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Python looks for modules beside the script first, where benchmarks/libero.py would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

from nightshift import config, envs, policies
from nightshift.envs.libero.env import CONTROL_HZ
from nightshift.envs.libero.problem import Problem
from nightshift.envs.libero.setup import prepare, quiet
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.policies import device
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import INFERENCE, LOOK, SIMULATION, EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.telemetry import gpu
from nightshift.types import INSTRUCTION, RolloutRequest, Trajectory

CORES = len(os.sched_getaffinity(0))
TASK = LIBERO_MINI.tasks()[0]
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
SIZE, CHUNK, HORIZON = 128, 8, 48
GROUP = 8
SHADOWS = {"both": (False, True), "on": (True,), "off": (False,)}
POLICY = config.Vla(
    family="vla",
    inputs=("agentview", "wrist", "proprio", INSTRUCTION),
    patch_size=16,
    width=256,
    depth=4,
    heads=8,
    max_words=12,
    chunk=CHUNK,
    head="gaussian",
    augmentation=config.Augmentation(crop=0, jitter=0.0),
)


def environment(*, shadows: bool) -> config.Env:
    cameras = config.Cameras(names=tuple(CAMERAS), size=SIZE, shadows=shadows)
    return config.Env(
        suite=LIBERO_MINI.name, tasks=(TASK.name,), protocol="openvla-oft", horizon=HORIZON, cameras=cameras
    )


def fresh_policy(env: config.Env) -> Policy:
    """Random weights: what it does is worthless, how long it takes is not."""
    torch.manual_seed(0)
    shapes = {name: spec.shape for name, spec in envs.observation_space(env).items()}
    return policies.fresh(POLICY, shapes, LIBERO_MINI.action_space.size)


class Ours:
    """The engine, with as many groups at once as asked for."""

    def __init__(self, env: config.Env, policy: Policy, where: torch.device, requests: int) -> None:
        settings = EngineSettings(device=where, threads=CORES, requests_at_once=requests)
        self.pool = LocalPool(env, settings)
        self._policy = snapshot(policy)
        self._requests = [
            RolloutRequest(task=TASK.name, split="train", init_state=n, controller="sample", seed=n, count=GROUP)
            for n in range(requests)
        ]

    def __call__(self) -> dict[str, float]:
        before, started = self.pool.spent(), time.perf_counter()
        played: list[Trajectory] = [e for _, group in self.pool.run(self._requests, self._policy) for e in group]
        seconds = time.perf_counter() - started
        after = self.pool.spent()
        decisions = sum(-(-episode.length // CHUNK) for episode in played)
        spent = {name: (after[name] - before.get(name, 0.0)) / seconds for name in (SIMULATION, LOOK, INFERENCE)}
        return {
            "decisions": decisions / seconds,
            "steps": sum(episode.length for episode in played) / seconds,
            "frames": len(CAMERAS) * (decisions + len(played)) / seconds,
            **spent,
        }


class Peer:
    """LIBERO's vector environment, drawing both cameras after every step."""

    def __init__(self, simulators: int, *, shadows: bool) -> None:
        """Before this process has a GPU or a GL context: LIBERO forks, and neither survives that."""
        prepare()
        from libero.libero.envs.venv import SubprocVectorEnv

        self.simulators = simulators
        self._states = LIBERO_MINI.load_init_states(TASK, "train")[:simulators]
        make = partial(drawing_env, LIBERO_MINI.problem(TASK), shadows)
        self._envs: Any = SubprocVectorEnv([make] * simulators)
        self._envs.reset()

    def __call__(self, policy: Policy) -> float:
        """Decisions per second."""
        seen = self._envs.set_init_state(self._states)
        started = time.perf_counter()
        for _ in range(HORIZON // CHUNK):
            for actions in _act(policy, seen):
                seen, _, _, _ = self._envs.step(actions)
        return len(self._states) * (HORIZON // CHUNK) / (time.perf_counter() - started)

    def close(self) -> None:
        self._envs.close()


def _act(policy: Policy, seen: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """The actions of a chunk, one step after the other."""
    images = {ours: np.stack([one[f"{theirs}_image"] for one in seen]) for ours, theirs in CAMERAS.items()}
    proprio = np.zeros((len(seen), 8), np.float32)
    actions = policy.act({**images, "proprio": proprio, INSTRUCTION: np.full(len(seen), TASK.language)})
    return iter(actions.swapaxes(0, 1))


def drawing_env(problem: Problem, shadows: bool) -> Any:
    """LIBERO's own environment with its own renderer."""
    prepare()
    import importlib

    import libero.libero
    import mujoco
    from libero.libero.envs.env_wrapper import ControlEnv

    importlib.import_module(str(problem.objects))
    libero.libero._assets_path_cache = str(problem.assets)
    with quiet():
        env = ControlEnv(
            bddl_file_name=str(problem.bddl),
            scene_xml=str(problem.scene),
            controller="OSC_POSE",
            control_freq=CONTROL_HZ,
            use_camera_obs=True,
            has_renderer=False,
            has_offscreen_renderer=True,
            camera_names=list(CAMERAS.values()),
            camera_heights=SIZE,
            camera_widths=SIZE,
            hard_reset=False,
            ignore_done=True,
            horizon=2**31,
        )
        env.reset()
    if not shadows:
        flags = env.env.sim._render_context_offscreen.scn.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
    return env


@contextmanager
def utilisation(samples: list[float]) -> Iterator[None]:
    """Of the first GPU, five times a second."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            samples.extend(value for name, value in gpu.sample().items() if name == "gpu/0/utilisation_percent")

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def compare(peer: Peer, where: torch.device, requests: int, rounds: int, *, shadows: bool) -> dict[str, Any]:
    env = environment(shadows=shadows)
    policy = fresh_policy(env)
    ours = Ours(env, policy, where, requests)
    policy = policy.to(where)
    ours(), peer(policy)  # builds models and contexts
    mine: list[dict[str, float]] = []
    theirs: list[float] = []
    busy: list[float] = []
    for _ in range(rounds):
        with utilisation(busy):
            mine.append(ours())
        theirs.append(peer(policy))
    peer.close()
    ours.pool.close()
    ratios = [one["decisions"] / other for one, other in zip(mine, theirs, strict=True)]
    return {
        "name": f"see/{'shadows' if shadows else 'no shadows'}",
        "ours": round(statistics.median(one["decisions"] for one in mine), 1),
        "peer": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        **{name: round(statistics.median(one[name] for one in mine), 3) for name in mine[0] if name != "decisions"},
        "gpu_percent": round(statistics.mean(busy)) if busy else None,
        "simulators": peer.simulators,
        "groups_at_once": requests,
        "cores": CORES,
        "device": str(where),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulators", type=int, default=CORES, help="processes of the peer")
    parser.add_argument("--requests", type=int, default=3 * CORES, help="groups of ours at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shadows", choices=SHADOWS, default="both")
    chosen = parser.parse_args()
    peers = {shadows: Peer(chosen.simulators, shadows=shadows) for shadows in SHADOWS[chosen.shadows]}
    where = device.resolve("auto")
    for shadows, peer in peers.items():
        line = compare(peer, where, chosen.requests, chosen.rounds, shadows=shadows)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
