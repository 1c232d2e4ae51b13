"""What ranks learn: each class has the settings and the data of one algorithm, and makes its learner on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from nightshift import config, files
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos, SftLearner, SftOptimizer
from nightshift.algorithms.strategy import Strategy
from nightshift.data import dataset_store
from nightshift.data.dataset_store import CloningSteps
from nightshift.errors import ConfigError, ProjectError
from nightshift.policies.base import Policy
from nightshift.policies.precision import require_float32_where_trained


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """The stage `rloo`."""

    settings: config.Rloo
    demos: CloningSteps | None
    """For the behaviour-cloning loss."""

    def learner(self, policy: Policy, *, seed: int, microbatch_size: int, strategy: Strategy) -> OnPolicyLearner:
        require_float32_where_trained(policy)
        return OnPolicyLearner(
            policy,
            self.settings,
            torch.Generator().manual_seed(seed),
            microbatch_size=microbatch_size,
            demos=None if self.demos is None else _demos(policy, self.demos),
            strategy=strategy,
        )


@dataclass(frozen=True, kw_only=True)
class Cloning:
    """The stage `sft`."""

    settings: config.Sft
    dataset: Path
    """Its absolute path. Every rank reads from it: images of all steps may not fit into the object store."""
    manifest: str
    """The sha256 of its manifest: a node may have an older dataset under the same path."""

    @classmethod
    def of(cls, dataset: Path, settings: config.Sft) -> Cloning:
        """From a dataset that is verified."""
        return cls(settings=settings, dataset=dataset.resolve(), manifest=files.sha256(dataset / files.MANIFEST))

    def learner(self, policy: Policy, *, seed: int, microbatch_size: int, strategy: Strategy) -> SftLearner:
        if self.settings.steps:
            require_float32_where_trained(policy)
        self._check_dataset()
        data = dataset_store.open_verified(self.dataset)
        demos = {
            split: _demos(policy, data.steps(split, policy.observations, policy.horizon))
            for split in dataset_store.SPLITS
        }
        optimizer = SftOptimizer(policy, self.settings, microbatch_size=microbatch_size, strategy=strategy)
        return SftLearner(optimizer, demos, seed=seed)

    def _check_dataset(self) -> None:
        remedy = "give all nodes the project's folder under the same path (NFS, for example)"
        if not (self.dataset / files.MANIFEST).exists():
            raise ProjectError(
                f"a learner rank reads demos from {self.dataset}, which its machine does not see", remedy
            )
        if files.sha256(self.dataset / files.MANIFEST) != self.manifest:
            raise ProjectError(
                f"a learner rank reads demos from {self.dataset}, which is another dataset on its machine", remedy
            )


def check_batch_size(sft: config.Sft, ranks: int) -> None:
    """ConfigError if a rank would have no demo of a batch."""
    if sft.steps and ranks > sft.batch_size:
        raise ConfigError(
            f"machine.ranks is {ranks}, and a batch of sft.batch_size {sft.batch_size} has no demo for each of them",
            "lower machine.ranks or raise sft.batch_size in params.yaml",
        )


def _demos(policy: Policy, steps: CloningSteps) -> Demos:
    return Demos(policy, steps.observe, steps.actions, steps.mask)
