"""On-policy training on Ray: where an iteration's time goes, how rollouts scale, and what sending weights costs.

One JSON line each, {name, ours, peer, ratio, …}; medians over rounds that take turns, with the least and the most:
  iteration    `ours` is the share of an iteration in which workers neither simulate, infer, record nor wait for
               transfers, and the update does not run: idle and orchestration; the other shares stand beside it, `peer`
               is the goal
  scaling      episodes per second with two workers, over one (`peer`)
  broadcast    seconds until 8 processes each hold a copy of 100 MB of weights of their own: put into the object store
               once and copied from there by each, as the pool does it, or pickled for each and unpickled there
               (`peer`); `argument` is the plain call that hands each the weights, which Ray puts anew every time
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Python looks for modules beside the script first, where benchmarks/libero.py would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

import ray
import torch

from nightshift import config, envs, policies
from nightshift.algorithms.on_policy import Iteration
from nightshift.envs.splits import split_training_states
from nightshift.learners.algorithms import OnPolicy
from nightshift.learners.base import LearnerSpec
from nightshift.learners.local import LocalLearner
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts.playing import IterationPlayer
from nightshift.rollouts.pool import RayPool
from nightshift.rollouts.sampling import Sampler
from nightshift.types import RolloutRequest

ROUNDS = 5
GROUPS = 8
"""Enough to keep two workers busy."""
GOAL = 0.10
MEGABYTES = 100
RECEIVERS = 8
STORE_BYTES = 3 * 2**30

PARAMS = config.load(Path(__file__).parent.parent / "params.yaml")
STATES = {task: split_training_states(task, PARAMS.states).train for task in envs.tasks(PARAMS.env)}


def fresh_policy() -> PolicySnapshot:
    """Random weights of the default size: what it does is worthless, how long it takes is not."""
    shapes = {name: spec.shape for name, spec in envs.observation_space(PARAMS.env).items()}
    return snapshot(policies.fresh(PARAMS.policy, shapes, envs.suite(PARAMS.env.suite).action_space.size))


def report(name: str, ours: Sequence[float], peer: Sequence[float], **more: Any) -> None:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    line = {
        "name": name,
        "ours": round(statistics.median(ours), 4),
        "peer": round(statistics.median(peer), 4),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
    print(json.dumps({**line, **more}), flush=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def iteration(policy: PolicySnapshot) -> None:
    """Default iterations with two workers. Outcomes are made up after playing, so that there is something to learn."""
    pool = RayPool(2, PARAMS.env)
    settings = PARAMS.rloo.model_copy(update={"target_kl": 1e9, "advantage_estimator": "rloo_batch"})
    microbatch_size = PARAMS.machine.microbatch_size
    spec = LearnerSpec(
        policy=policy,
        algorithm=OnPolicy(settings=settings, demos=None),
        seed=0,
        microbatch_size=microbatch_size,
        gradient_checkpointing=False,
        compile=False,
        strategy="data_parallel",
        cpu_offload=False,
        device=torch.device("cpu"),
    )
    learner = LocalLearner(spec)
    rounds = []
    with IterationPlayer(pool, Sampler(STATES, settings, seed=0), settings) as player:
        player.play(policy)  # compiles
        for _ in range(ROUNDS):
            whole, (found, update) = timed(lambda: _iterate(player, learner))
            rounds.append({**found.times, "update": update, "whole": whole})
    pool.close()
    lost = [1 - (r["time/play"] * (1 - r["time/share_idle"]) + r["update"]) / r["whole"] for r in rounds]
    shares = {
        name: round(statistics.median(r["time/play"] * r[f"time/share_{name}"] / r["whole"] for r in rounds), 4)
        for name in ("simulation", "inference", "record", "transfer")
    }
    update = round(statistics.median(r["update"] / r["whole"] for r in rounds), 4)
    report("iteration", lost, [GOAL] * ROUNDS, **shares, update=update, seconds=round(rounds[-1]["whole"], 2))


def _iterate(player: IterationPlayer, learner: LocalLearner[Iteration]) -> tuple[Any, float]:
    found = player.play(learner.policy())
    half_solved = [[replace(episode, success=episode.member % 2 == 0) for episode in group] for group in found.accepted]
    update, _ = timed(lambda: learner.update([Iteration(half_solved, 0.0)]))
    return found, update


def scaling(policy: PolicySnapshot) -> None:
    rates: dict[int, list[float]] = {1: [], 2: []}
    pool = RayPool(2, PARAMS.env)
    sampler = Sampler(STATES, PARAMS.rloo, seed=0)
    list(pool.run(sampler.begin().wave()[:GROUPS], policy))  # both compile
    for _ in range(ROUNDS):
        requests = sampler.begin().wave()[:GROUPS]
        for workers, rate in rates.items():
            pool.capacity.wanted = workers
            seconds, played = timed(partial(_all, pool, requests, policy))
            rate.append(sum(len(group) for _, group in played) / seconds)
    pool.close()
    report("scaling", rates[2], rates[1], unit="episodes per second")


def _all(pool: RayPool, requests: Sequence[RolloutRequest], policy: PolicySnapshot) -> list[Any]:
    return list(pool.run(requests, policy))


class Receiver:
    """A process that keeps the weights it got last."""

    def __init__(self) -> None:
        self._weights: Any = None

    def copy(self, weights: Any) -> None:
        """What lies in the object store is shared and read-only; who trains or plays needs its own."""
        self._weights = {name: values.copy() for name, values in weights.items()}

    def unpickle(self, pickled: bytes) -> None:
        self._weights = pickle.loads(pickled)


def broadcast() -> None:
    weights = {f"layer{index}": np.random.default_rng(index).random(MEGABYTES * 2**17 // 8) for index in range(8)}
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
    receivers = [ray.remote(num_cpus=0)(Receiver).remote() for _ in range(RECEIVERS)]
    ways: dict[str, Callable[[], Any]] = {
        "once": lambda: _once(receivers, weights),
        "pickled": lambda: ray.get([receiver.unpickle.remote(pickle.dumps(weights)) for receiver in receivers]),
        "argument": lambda: ray.get([receiver.copy.remote(weights) for receiver in receivers]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for send in ways.values():
        send()  # memory is touched for the first time
    for _ in range(ROUNDS):
        for name, send in ways.items():
            seconds[name].append(timed(send)[0])
    ray.shutdown()
    argument = round(statistics.median(seconds["argument"]), 4)
    more = {"unit": "seconds; a ratio below 1 is faster", "argument": argument, "megabytes": MEGABYTES}
    report("broadcast", seconds["once"], seconds["pickled"], **more)


def _once(receivers: Sequence[Any], weights: Any) -> Any:
    reference = ray.put(weights)
    return ray.get([receiver.copy.remote(reference) for receiver in receivers])


if __name__ == "__main__":
    chosen = fresh_policy()
    iteration(chosen)
    scaling(chosen)
    broadcast()
