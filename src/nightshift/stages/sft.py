"""Supervised fine-tuning: clone the demos; the policy that reinforcement learning starts from."""

from __future__ import annotations

import contextlib
import time

import torch

from nightshift import config, files, policies
from nightshift.algorithms.sft import SftSteps
from nightshift.data import dataset_store
from nightshift.learners import checkpoint
from nightshift.learners.algorithms import Cloning, check_batch_size
from nightshift.learners.base import Learners, LearnerState
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.opening import learner_spec, open_learners
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import restore, snapshot
from nightshift.policies.start import check_same_network
from nightshift.project import paths
from nightshift.telemetry import gpu, progress

_MOST_STEPS = 20
"""The most gradient steps between two updates of the progress bar: reading a loss waits for the GPU."""
_SECONDS_BETWEEN_SHOWS = 2.0
"""Where steps are slow the progress bar is updated about this often, after fewer than `_MOST_STEPS` steps."""


def run(job: Job, *, seed: int, policy: config.Policy, sft: config.Sft) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    ranks = job.machine.ranks
    check_batch_size(sft, ranks)
    start = snapshot(_start(_fresh_policy(policy, dataset_store.read(paths.DATASET))))
    cloning = Cloning.of(paths.DATASET, sft)
    spec = learner_spec(job.machine, policy=start, algorithm=cloning, seed=seed)
    with contextlib.closing(open_learners(spec, job.machine)) as learners:
        if sft.steps:
            _train(job, learners, sft)
        else:
            job.tracker.log(learners.update([SftSteps(0, validate=True)] * ranks), 0)
        cloned = restore(learners.policy(), torch.device("cpu"))
    with files.new_folder(paths.SFT_POLICY) as folder:
        policies.save(cloned, folder)


def _fresh_policy(policy: config.Policy, data: dataset_store.EpisodeDataset) -> Policy:
    shapes = data.shapes()
    fresh = policies.fresh(policy, shapes, action_dim=data.schema.fields["actions"].shape[0])
    fresh.normalise_by(data.statistics)
    return fresh


def _start(fresh: Policy) -> Policy:
    """The policy that cloning begins with: the champion's weights and normalisation, if the stage `start` took it."""
    files.verify_folder(paths.START, f"nightshift stage start, or copy {paths.START} from where that was done")
    if (paths.START / paths.SKIPPED).exists():
        return fresh
    champion = policies.load(paths.START)
    check_same_network(champion, fresh)
    return policies.build(fresh.spec, champion.state_dict())


def _train(job: Job, learners: Learners[SftSteps], sft: config.Sft) -> None:
    every = job.machine.checkpoint_every.sft_steps
    step, at_once = _resume(job, learners), 1
    with progress.bar("sft", total=sft.steps, done=step) as advance:
        while step < sft.steps:
            count = min(at_once, every - step % every, sft.steps - step)
            step += count
            due = step % every == 0 or step == sft.steps
            started = time.monotonic()
            metrics = learners.update([SftSteps(count, validate=due)] * job.machine.ranks)
            at_once = _steps_at_once((time.monotonic() - started) / count)
            for _ in range(count):
                advance(f"loss {metrics['sft/loss']:.4f}")
            if due:
                job.tracker.log({**metrics, **gpu.sample()}, step)
                _save(job, learners, step)


def _steps_at_once(seconds: float) -> int:
    """For steps that take so many seconds. It changes when the progress bar moves, and nothing else."""
    return int(min(max(_SECONDS_BETWEEN_SHOWS / max(seconds, 1e-6), 1), _MOST_STEPS))


def _save(job: Job, learners: Learners[SftSteps], step: int) -> None:
    learned = learners.state()
    state = {"learner": learned.counters}
    checkpoint.save(job.state, Checkpoint(step=step, tensors=learned.tensors, state=state), learners.write_shards)


def _resume(job: Job, learners: Learners[SftSteps]) -> int:
    """Restore the newest complete checkpoint; the steps that are done."""
    newest = checkpoint.newest(job.state)
    if newest is None:
        return 0
    state = LearnerState(tensors=newest.tensors, counters=newest.state["learner"], shards=newest.shards)
    learners.restore(state)
    return newest.step
