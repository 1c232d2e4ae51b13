"""Supervised fine-tuning: clone the demos; the policy that reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nightshift import config, files, policies
from nightshift.algorithms.sft import DemoLoader, Demos, SftLearner
from nightshift.data import dataset_store
from nightshift.learners import checkpoint
from nightshift.learners.checkpoint import Checkpoint
from nightshift.pipeline.job import Job
from nightshift.policies import device
from nightshift.policies.base import Policy
from nightshift.policies.blocks import compile_blocks, recompute_activations
from nightshift.policies.start import check_same_network
from nightshift.project import paths
from nightshift.telemetry import gpu, progress

_SHOW_EVERY = 20
"""Steps between two losses on the progress bar: reading one waits for the GPU."""
_GENERATOR = "generator"
"""The name of the random generator's state in a checkpoint."""
_SEEDS_APART = 2**32
"""More than a run has steps, so that no step of two seeds has the same augmentation."""


def run(job: Job, *, seed: int, policy: config.Policy, sft: config.Sft) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    data = dataset_store.read(paths.DATASET)
    with device.out_of_memory_advice(device.POLICY_SIZE):
        start = _start(_fresh_policy(policy, data)).to(device.resolve(job.machine.device))
    if job.machine.gradient_checkpointing:
        recompute_activations(start)
    if job.machine.compile:
        compile_blocks(start)
    learner = SftLearner(start, sft, microbatch_size=job.machine.microbatch_size)
    parts = {part: _demos(learner.policy, data, part) for part in dataset_store.SPLITS}
    with device.out_of_memory_advice("machine.microbatch_size or sft.batch_size"):
        if sft.steps:
            _train(job, learner, parts, seed, sft)
        else:
            job.tracker.log({"sft/validation_loss": learner.loss(parts["validation"])}, 0)
    with files.new_folder(paths.SFT_POLICY) as folder:
        policies.save(learner.policy, folder)


def _fresh_policy(policy: config.Policy, data: dataset_store.EpisodeDataset) -> Policy:
    shapes = data.shapes()
    fresh = policies.fresh(policy, shapes, action_dim=data.schema.fields["actions"].shape[0])
    fresh.normalise_by(data.statistics)
    return fresh


def _start(fresh: Policy) -> Policy:
    """The policy that cloning begins with: the champion if the stage `start` took it, with its own normalisation."""
    if not (paths.START / paths.CHAMPION_VERSION).exists():
        return fresh
    files.verify_folder(paths.START, "nightshift stage start")
    champion = policies.load(paths.START)
    check_same_network(champion, fresh)
    return champion


def _demos(policy: Policy, data: dataset_store.EpisodeDataset, part: dataset_store.DatasetSplit) -> Demos:
    steps = data.steps(part, policy.observations, policy.horizon)
    return Demos(policy, steps.observe, steps.actions, steps.mask)


def _train(
    job: Job,
    learner: SftLearner,
    parts: Mapping[dataset_store.DatasetSplit, Demos],
    seed: int,
    sft: config.Sft,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = _resume(job, learner, generator)
    pin = learner.policy.device.type == "cuda"
    shown = ""
    with (
        DemoLoader(parts["train"], sft.batch_size, generator, pin=pin) as loader,
        progress.bar("sft", total=sft.steps, done=start) as advance,
    ):
        for step in range(start, sft.steps):
            # Seeded by the step, so that a checkpoint need not hold its state.
            augmentation = torch.Generator().manual_seed(seed * _SEEDS_APART + step)
            loss = learner.update(loader.take(), augmentation)
            if step % _SHOW_EVERY == 0:
                shown = f"loss {loss.item():.4f}"
            advance(shown)
            if (step + 1) % job.machine.checkpoint_every.sft_steps == 0 or step + 1 == sft.steps:
                metrics = {"sft/loss": loss.item(), "sft/validation_loss": learner.loss(parts["validation"])}
                job.tracker.log({**metrics, **gpu.sample()}, step + 1)
                tensors = {_GENERATOR: loader.state, **learner.tensors()}
                checkpoint.save(job.state, Checkpoint(step=step + 1, tensors=tensors, state={}))


def _resume(job: Job, learner: SftLearner, generator: torch.Generator) -> int:
    newest = checkpoint.newest(job.state)
    if newest is None:
        return 0
    generator.set_state(newest.tensors[_GENERATOR])
    learner.resume(newest.tensors, newest.step)
    return newest.step
