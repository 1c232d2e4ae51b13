"""Reinforcement learning: play groups of episodes on Ray, push the policy towards the ones that worked."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from nightshift import config, envs, files, policies
from nightshift.data import store
from nightshift.learners import checkpoint
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.ranks import DemoArrays, Learners, LearnerSpec, LearnerState, open_learners
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot
from nightshift.project import paths
from nightshift.rollouts.playing import Playing
from nightshift.rollouts.sampling import Group, Round, Sampler, success_rate
from nightshift.telemetry import gpu, progress
from nightshift.telemetry.stopwatch import Stopwatch

_log = logging.getLogger(__name__)
_ACTING = "acting."
"""Of the policy that plays the iteration after the checkpoint: the one before the last update, if that overlaps."""


def run(job: Job, *, seed: int, env: config.Env, rloo: config.Rloo) -> None:
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    files.verify_folder(paths.SFT_POLICY, f"rm -r {paths.SFT_POLICY} and run again")
    cloned = policies.load(paths.SFT_POLICY)
    pool = job.pool(env)  # first: it is the one that makes room for itself on Ray
    sampler = Sampler(envs.tasks(env), rloo, seed=seed)
    spec = LearnerSpec(
        policy=snapshot(cloned),
        settings=rloo,
        seed=seed,
        demos=_demos(cloned, rloo),
        microbatch_size=job.machine.microbatch_size,
    )
    ranks = job.machine.ranks
    with contextlib.closing(open_learners(spec, ranks)) as learners, Playing(pool, sampler, rloo) as playing:
        history = _resume(job, learners, sampler, playing, rloo.iterations)
        with progress.bar("rloo", total=rloo.iterations, done=len(history)) as advance:
            for iteration in range(len(history), rloo.iterations):
                watch = Stopwatch()
                found = playing.found(learners.policy())
                if iteration + 1 < rloo.iterations:
                    playing.ahead(learners.policy())
                with watch.timing("time/update"):
                    update = learners.update(_parts(found, rloo, ranks), iteration / rloo.iterations)
                metrics = {**_outcome(found), **_faults(found.played), **update}
                history.append(metrics)
                job.tracker.log({**metrics, **found.times, **watch.seconds, **gpu.sample()}, iteration + 1)
                if _checkpoint_due(job, iteration + 1, rloo.iterations):
                    _save(job, learners, playing, history)
                advance(f"success {metrics['rollout/success']:.0%}, kl {metrics['update/kl']:.3f}")
        with files.new_folder(paths.RLOO_POLICY) as folder:
            policies.save(restore(learners.policy()), folder)
            files.write_json(folder / paths.RLOO_HISTORY.name, history)


def _demos(policy: Policy, rloo: config.Rloo) -> DemoArrays | None:
    """What to go on imitating, if anything."""
    if not rloo.bc_weight:
        return None
    steps = store.read(paths.DATASET).steps("train", list(policy.spec["inputs"]), policy.chunk)
    return policy.features(steps.observations).numpy(), steps.actions, steps.mask


def _parts(found: Round, rloo: config.Rloo, ranks: int) -> list[list[Group]]:
    """What each rank learns from; nothing at all if too little was found and that is to end the iteration."""
    if found.missing:
        _log.warning(
            "%d of %d groups are accepted: min_success_rate, max_success_rate or the simulator left out the others",
            len(found.accepted),
            rloo.groups,
        )
        if rloo.sampling.when_short == "skip":
            return [[] for _ in range(ranks)]
    return found.by_rank(ranks)


def _outcome(found: Round) -> dict[str, float]:
    """How the episodes went, per task and on average over tasks, and how many groups had something to teach."""
    groups = [group for group in found.played if all(episode.valid for episode in group)]
    rates = [success_rate(group) for group in groups]
    tasks = sorted({group[0].request.task for group in groups})
    per_task = {
        f"rollout/success/{task}": _mean([r for r, g in zip(rates, groups, strict=True) if g[0].request.task == task])
        for task in tasks
    }
    return {
        "rollout/success": _mean(list(per_task.values())),  # a curriculum plays some more often than others
        "rollout/length": _mean([t.length for group in groups for t in group]),
        "rollout/informative_groups": float(sum(0 < rate < 1 for rate in rates)),
        "rollout/accepted": len(found.accepted) / max(len(found.played), 1),
        "rollout/missing_groups": float(found.missing),
        "rollout/surplus_groups": float(len(found.surplus)),
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


def _checkpoint_due(job: Job, done: int, iterations: int) -> bool:
    return done % job.machine.checkpoint_every.rloo_iterations == 0 or done == iterations


def _save(job: Job, learners: Learners, playing: Playing, history: list[dict[str, float]]) -> None:
    learned = learners.state()
    ahead = playing.begun_with or learners.policy()
    acting = {f"{_ACTING}{name}": values for name, values in ahead.weights.items()}
    tensors = {name: torch.tensor(values) for name, values in {**learned.tensors, **acting}.items()}
    state = {"history": history, "learner": learned.counters, "sampler": playing.sampler_state, "acting": ahead.version}
    checkpoint.save(job.state, Checkpoint(step=len(history), tensors=tensors, state=state))


def _resume(
    job: Job, learners: Learners, sampler: Sampler, playing: Playing, iterations: int
) -> list[dict[str, float]]:
    """Put the newest complete checkpoint back; the history tells how many iterations are done."""
    newest = checkpoint.newest(job.state)
    if newest is None:
        return []
    tensors = {name: tensor.numpy() for name, tensor in newest.tensors.items()}
    acting = {k.removeprefix(_ACTING): v for k, v in tensors.items() if k.startswith(_ACTING)}
    learners.restore(LearnerState(tensors=tensors, counters=newest.state["learner"]))
    sampler.restore(newest.state["sampler"])
    if newest.step < iterations:
        spec, version = learners.policy().spec, newest.state["acting"]
        playing.ahead(PolicySnapshot(spec=spec, weights=acting, version=version))
    return list(newest.state["history"])
