"""Supervised fine-tuning: clone the demos; the policy that reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from nightshift import config, files, policies
from nightshift.algorithms.sft import Demos, SftLearner
from nightshift.data import dataset_store
from nightshift.data.episode import OBSERVATIONS
from nightshift.errors import DataError
from nightshift.learners import checkpoint
from nightshift.learners.checkpoint import Checkpoint
from nightshift.pipeline.job import Job
from nightshift.policies import gaussian_mlp
from nightshift.policies.base import Policy
from nightshift.project import graph, paths
from nightshift.telemetry import gpu, progress


def run(job: Job, *, seed: int, policy: config.Policy, sft: config.Sft) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    data = dataset_store.read(paths.DATASET)
    learner = SftLearner(_fresh_policy(policy, data), sft)
    generator = torch.Generator().manual_seed(seed)
    job.tracker.dataset("demos", graph.recorded_md5(Path(), paths.DATASET) or "unrecorded", paths.DATASET)
    parts = {part: _demos(learner.policy, data, part) for part in dataset_store.SPLITS}
    _train(job, learner, parts, generator, sft)
    with files.new_folder(paths.SFT_POLICY) as folder:
        policies.save(learner.policy, folder)


def _fresh_policy(policy: config.Policy, data: dataset_store.EpisodeDataset) -> Policy:
    usable = [name for name in data.observations if f"{OBSERVATIONS}{name}" in data.statistics]
    unknown = [name for name in policy.inputs if name not in usable]
    if unknown:
        raise DataError(
            f"the dataset has no observation {', '.join(unknown)} that this policy can read; "
            f"it has {', '.join(usable)}",
            "edit policy.inputs in params.yaml",
        )
    inputs = {name: data.schema.fields[f"{OBSERVATIONS}{name}"].shape[0] for name in policy.inputs}
    fresh = policies.build(
        {
            "family": gaussian_mlp.FAMILY,
            "inputs": inputs,
            "hidden": policy.hidden,
            "chunk": policy.chunk,
            "action_dim": data.schema.fields["actions"].shape[0],
        }
    )
    fresh.normalise_by(data.statistics)
    return fresh


def _demos(policy: Policy, data: dataset_store.EpisodeDataset, part: dataset_store.DatasetSplit) -> Demos:
    steps = data.steps(part, list(policy.spec["inputs"]), policy.chunk)
    return Demos.from_steps(policy, steps.observations, steps.actions, steps.mask)


def _train(
    job: Job,
    learner: SftLearner,
    parts: Mapping[dataset_store.DatasetSplit, Demos],
    generator: torch.Generator,
    sft: config.Sft,
) -> None:
    train, held = parts["train"], parts["validation"]
    start = _resume(job, learner, generator)
    with progress.bar("sft", total=sft.steps, done=start) as advance:
        for step in range(start, sft.steps):
            chosen = torch.randint(len(train), (sft.batch_size,), generator=generator)
            loss = learner.update(train[chosen])
            advance(f"loss {loss:.4f}")
            if (step + 1) % job.machine.checkpoint_every.sft_steps == 0 or step + 1 == sft.steps:
                with torch.no_grad():
                    held_loss = learner.policy.bc_loss(held.features, held.actions, held.mask).item()
                job.tracker.log({"sft/loss": loss, "sft/validation_loss": held_loss, **gpu.sample()}, step + 1)
                tensors = checkpoint.pack(learner.trained, generator)
                checkpoint.save(job.state, Checkpoint(step=step + 1, tensors=tensors, state={}))


def _resume(job: Job, learner: SftLearner, generator: torch.Generator) -> int:
    newest = checkpoint.newest(job.state)
    if newest is None:
        return 0
    checkpoint.unpack(newest.tensors, learner.trained, generator)
    learner.resume(newest.step)
    return newest.step
