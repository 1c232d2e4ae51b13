"""Reinforcement learning: play groups of episodes on Ray, push the policy towards the ones that worked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from nightshift import checkpoint, config, envs, files, paths, policies
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.checkpoint import Checkpoint
from nightshift.data import store
from nightshift.distributed.schedule import Schedule
from nightshift.distributed.worker import snapshot
from nightshift.job import Job
from nightshift.policies.base import Policy
from nightshift.telemetry import gpu, progress
from nightshift.types import RolloutRequest, Trajectory

Group = list[Trajectory]


def run(job: Job, *, seed: int, env: config.Env, rloo: config.Rloo) -> None:
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    files.verify_folder(paths.SFT_POLICY, f"rm -r {paths.SFT_POLICY} and run again")
    policy = policies.load(paths.SFT_POLICY)
    torch.manual_seed(seed)  # a critic begins at random
    learner = OnPolicyLearner(policy, rloo, torch.Generator().manual_seed(seed), demos=_demos(policy, rloo))
    schedule = Schedule(envs.tasks(env), seed=seed, group_size=rloo.group_size, temperature=rloo.temperature)
    history = _resume(job, learner)
    with progress.bar("rloo", total=rloo.iterations, done=len(history)) as advance:
        for iteration in range(len(history), rloo.iterations):
            groups = _rollouts(job, env, schedule.requests(iteration, rloo.groups), policy)
            complete = [group for group in groups if all(t.valid for t in group)]
            metrics = {**_outcome(complete), **_faults(groups), **learner.update(complete, iteration / rloo.iterations)}
            history.append(metrics)
            job.tracker.log({**metrics, **gpu.sample()}, iteration + 1)
            _save(job, learner, history)
            advance(f"success {metrics['rollout/success']:.0%}, kl {metrics['update/kl']:.3f}")
    with files.new_folder(paths.RLOO_POLICY) as folder:
        policies.save(policy, folder)
        files.write_json(folder / paths.RLOO_HISTORY.name, history)


def _demos(policy: Policy, rloo: config.Rloo) -> Demos | None:
    """What to go on imitating, if anything."""
    if not rloo.imitation:
        return None
    steps = store.read(paths.DATASET).steps("train", list(policy.spec["inputs"]), policy.chunk)
    return Demos.seen_by(policy, steps.observations, steps.actions, steps.mask)


def _rollouts(job: Job, env: config.Env, requests: list[RolloutRequest], policy: Policy) -> list[Group]:
    """Every group, in the order asked for, whoever was done first."""
    results = dict(job.pool(env).run(requests, snapshot(policy)))
    return [results[index] for index in range(len(requests))]


def _outcome(groups: list[Group]) -> dict[str, float]:
    """How the episodes went, overall and per task, and how many groups had something to teach."""
    rates = [_mean([t.success for t in group]) for group in groups]
    tasks = sorted({group[0].request.task for group in groups})
    per_task = {
        f"rollout/success/{task}": _mean([r for r, g in zip(rates, groups, strict=True) if g[0].request.task == task])
        for task in tasks
    }
    return {
        "rollout/success": _mean(rates),
        "rollout/length": _mean([t.length for group in groups for t in group]),
        "rollout/informative_groups": float(sum(0 < rate < 1 for rate in rates)),
        **per_task,
    }


def _faults(groups: list[Group]) -> dict[str, float]:
    """Episodes that tell nothing, since the simulator failed, and the share of steps in which it clipped the action."""
    episodes = [trajectory for group in groups for trajectory in group]
    steps = sum(t.length for t in episodes)
    return {
        "rollout/invalid": float(sum(not t.valid for t in episodes)),
        "rollout/clipped_actions": sum(t.clipped_steps for t in episodes) / max(steps, 1),
    }


def _mean(values: Sequence[float]) -> float:
    """Not a number, and a gap in every curve, where there is nothing to average."""
    return float(np.mean(values)) if values else math.nan


def _save(job: Job, learner: OnPolicyLearner, history: list[dict[str, float]]) -> None:
    tensors = checkpoint.pack(learner.trained, learner.generator)
    state = {"history": history, "learner": learner.state}
    checkpoint.save(job.state, Checkpoint(step=len(history), tensors=tensors, state=state))


def _resume(job: Job, learner: OnPolicyLearner) -> list[dict[str, float]]:
    """Put the newest complete checkpoint back; the history tells how many iterations are done."""
    newest = checkpoint.newest(job.state)
    if newest is None:
        return []
    checkpoint.unpack(newest.tensors, learner.trained, learner.generator)
    learner.restore(newest.state["learner"])
    return list(newest.state["history"])
