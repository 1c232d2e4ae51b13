"""Reinforcement learning: play groups of episodes, make the actions of the successful ones more likely."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats  # noqa: F401 - the intervals at the end need it: if it is not installed, that is told now
import torch

from nightshift import config, envs, files, policies
from nightshift.algorithms.on_policy import Iteration
from nightshift.data import dataset_store
from nightshift.data.dataset_store import CloningSteps
from nightshift.envs.splits import check_validation_states, split_training_states
from nightshift.learners import checkpoint
from nightshift.learners.algorithms import OnPolicy
from nightshift.learners.base import Learners, LearnerState
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.opening import learner_spec, open_learners
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot
from nightshift.project import paths
from nightshift.rollouts.playing import IterationPlayer
from nightshift.rollouts.sampling import Group, Round, Sampler, success_rate
from nightshift.rollouts.validation import Selection, Validator, without_best
from nightshift.telemetry import gpu, progress
from nightshift.telemetry.stopwatch import Stopwatch

_log = logging.getLogger(__name__)
_ACTING = "acting."
"""Prefix of the tensors of the policy before the last update, which plays the next iteration if the two overlap."""


def run(job: Job, *, seed: int, env: config.Env, states: config.States, rloo: config.Rloo) -> None:
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    files.verify_folder(paths.SFT_POLICY, f"rm -r {paths.SFT_POLICY} and run again")
    cloned = policies.load(paths.SFT_POLICY)
    pool = job.pool(env)  # before the learners: it reserves CPUs on Ray
    splits = {task: split_training_states(task, states) for task in envs.tasks(env)}
    by_name = {task.name: split for task, split in splits.items()}
    check_validation_states(by_name, rloo.validation.level, "rloo.validation.level")
    sampler = Sampler({task: split.train for task, split in splits.items()}, rloo, seed=seed)
    start = snapshot(cloned)
    selection = Selection(Validator(pool, by_name), start)
    on_policy = OnPolicy(settings=rloo, demos=_demos(cloned, rloo))
    spec = learner_spec(job.machine, policy=start, algorithm=on_policy, seed=seed)
    ranks = job.machine.ranks
    with (
        contextlib.closing(open_learners(spec, job.machine)) as learners,
        IterationPlayer(pool, sampler, rloo) as player,
    ):
        history = _resume(job, learners, sampler, player, selection)
        done = len(history)
        with progress.bar("rloo", total=rloo.iterations, done=done) as advance:
            for iteration in range(done, rloo.iterations):
                watch = Stopwatch()
                found = player.play(learners.policy())
                if iteration % rloo.validation.every == 0:
                    _validate(job, selection, learners.policy(), iteration)
                if iteration + 1 < rloo.iterations:
                    player.prefetch(learners.policy())
                with watch.timing("time/update"):
                    update = learners.update(_parts(found, rloo, ranks, iteration))
                metrics = {**_outcome(found), **_faults(found.played), **update}
                history.append(metrics)
                job.tracker.log({**metrics, **found.times, **watch.seconds, **gpu.sample()}, iteration + 1)
                if _checkpoint_due(job, iteration + 1, rloo.iterations):
                    _save(job, learners, player, selection, history)
                advance(f"success {metrics['rollout/success']:.0%}, kl {metrics['update/kl']:.3f}")
                del found  # with images or features gigabytes: not beside those of the next iteration
        _validate(job, selection, learners.policy(), rloo.iterations)
    kept = selection.kept(rloo.validation.level)
    job.tracker.log({"validation/kept_iteration": float(kept.iteration)}, rloo.iterations)
    with files.new_folder(paths.RLOO_POLICY) as folder:
        policies.save(restore(selection.best, torch.device("cpu")) if kept.iteration else cloned, folder)
        learned = {"algorithm": rloo.advantage_estimator, "iterations": history, "kl_limit": rloo.target_kl}
        files.write_json(folder / paths.HISTORY, {**learned, **selection.to_json(rloo.validation.level)})


def _validate(job: Job, selection: Selection, policy: PolicySnapshot, iteration: int) -> None:
    found = selection.validate(policy, iteration)
    job.tracker.log({"validation/success": found.success_rate}, iteration)


def _demos(policy: Policy, rloo: config.Rloo) -> CloningSteps | None:
    """The demos for the behaviour-cloning loss; None without one."""
    if not rloo.bc_weight:
        return None
    return dataset_store.read(paths.DATASET).steps("train", policy.observations, policy.horizon)


def _parts(found: Round, rloo: config.Rloo, ranks: int, iteration: int) -> list[Iteration]:
    return [Iteration(part, iteration / rloo.iterations) for part in _groups(found, rloo, ranks)]


def _groups(found: Round, rloo: config.Rloo, ranks: int) -> list[list[Group]]:
    """The groups that each rank learns from; none if too few were accepted and sampling.when_short is skip."""
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
    """Success rates per task and averaged over tasks, and how many groups were mixed."""
    groups = [group for group in found.played if all(episode.valid for episode in group)]
    rates = [success_rate(group) for group in groups]
    tasks = sorted({group[0].request.task for group in groups})
    per_task = {
        f"rollout/success/{task}": _mean([r for r, g in zip(rates, groups, strict=True) if g[0].request.task == task])
        for task in tasks
    }
    return {
        "rollout/success": _mean(list(per_task.values())),  # a curriculum plays some tasks more often than others
        "rollout/length": _mean([t.length for group in groups for t in group]),
        "rollout/informative_groups": float(sum(0 < rate < 1 for rate in rates)),
        "rollout/accepted": len(found.accepted) / max(len(found.played), 1),
        "rollout/missing_groups": float(found.missing),
        "rollout/surplus_groups": float(len(found.surplus)),
        **per_task,
    }


def _faults(groups: list[Group]) -> dict[str, float]:
    """Episodes in which the simulator failed, and the share of steps in which it clipped the action."""
    episodes = [trajectory for group in groups for trajectory in group]
    steps = sum(t.length for t in episodes)
    return {
        "rollout/invalid": float(sum(not t.valid for t in episodes)),
        "rollout/clipped_actions": sum(t.clipped_steps for t in episodes) / max(steps, 1),
    }


def _mean(values: Sequence[float]) -> float:
    """NaN, which is a gap in every curve, where there is nothing to average."""
    return float(np.mean(values)) if values else math.nan


def _checkpoint_due(job: Job, done: int, iterations: int) -> bool:
    return done % job.machine.checkpoint_every.rloo_iterations == 0 or done == iterations


History = list[dict[str, float]]
"""Metrics of every iteration."""


def _save(
    job: Job, learners: Learners[Iteration], player: IterationPlayer, selection: Selection, history: History
) -> None:
    learned, ahead = learners.state(), player.prefetched_with
    acting = None if ahead is None or ahead.version == selection.best.version else ahead
    state = {
        "history": history,
        "selection": selection.state,
        "learner": learned.counters,
        "sampler": player.sampler_state,
        "acting": None if ahead is None else ahead.version,
    }
    tensors = {**learned.tensors, **_acting_tensors(acting), **selection.tensors}
    checkpoint.save(job.state, Checkpoint(step=len(history), tensors=tensors, state=state), learners.write_shards)


def _acting_tensors(acting: PolicySnapshot | None) -> dict[str, torch.Tensor]:
    return {f"{_ACTING}{name}": tensor for name, tensor in acting.tensors().items()} if acting else {}


def _resume(
    job: Job, learners: Learners[Iteration], sampler: Sampler, player: IterationPlayer, selection: Selection
) -> History:
    """Restore the newest complete checkpoint; without one, training begins."""
    newest = checkpoint.newest(job.state)
    if newest is None:
        return []
    tensors = without_best(newest.tensors)
    learned = {name: tensor for name, tensor in tensors.items() if not name.startswith(_ACTING)}
    learners.restore(LearnerState(tensors=learned, counters=newest.state["learner"], shards=newest.shards))
    sampler.restore(newest.state["sampler"])
    selection.restore(newest.tensors, newest.state["selection"])
    if newest.state["acting"] is not None:
        player.prefetch(_acting(newest, selection))
    return list(newest.state["history"])


def _acting(newest: Checkpoint, selection: Selection) -> PolicySnapshot:
    """The policy of the iteration that was being played; one that is the best so far is in the checkpoint once."""
    best, version = selection.best, newest.state["acting"]
    weights = {n.removeprefix(_ACTING): tensor for n, tensor in newest.tensors.items() if n.startswith(_ACTING)}
    return PolicySnapshot.of(best.spec, weights, version, best.frozen) if weights else best
