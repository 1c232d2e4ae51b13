"""The interface that every policy family implements."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.types import Array, Observation

Inputs = Mapping[str, Tensor]
"""A policy's own tensors by name, each [B, …], in the smallest dtype that holds them: images stay uint8."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of observations by name, e.g. {"state": (8,), "agentview": (128, 128, 3), "instruction": ()}."""

LOSS_DRAWS = "loss_draws"
"""Among the inputs of `bc_loss` where a policy's `loss_draws` is above 0: numbers between 0 and 1, [B, loss_draws]."""


class Decision(NamedTuple):
    """What a policy sampled for B observations."""

    actions: Tensor  # [B, C, A]
    log_probs: Tensor  # [B, C, A]
    latents: Inputs  # by name, each [B, …]: what else the update needs of it; empty for most families


class Policy(nn.Module, ABC):
    """A torch module that acts in chunks. B observations at a time, C actions per chunk, A dimensions.

    `inputs` makes tensors on the CPU; every other method takes them on the policy's own device. `temperature` scales
    the spread that `sample` draws with; `greedy` is the limit of 0, except where a policy draws noise that has no
    temperature (a flow policy's first).
    """

    @classmethod
    @abstractmethod
    def from_config(cls, settings: Any, shapes: Shapes, action_dim: int) -> Self:
        """A fresh policy by its family's section of params.yaml; `shapes` has every observation it can read."""

    @classmethod
    def with_weights(cls, weights: Mapping[str, Tensor], **spec: Any) -> Self:
        """The policy of this spec with these weights. A family whose random weights take long to draw overrides it."""
        policy = cls(**spec)
        policy.load_state_dict(weights)
        return policy

    @property
    @abstractmethod
    def spec(self) -> Mapping[str, Any]:
        """JSON from which `policies.build` makes the same architecture again."""

    @property
    def architecture(self) -> Mapping[str, Any]:
        """The part of `spec` that must agree for weights to fit: all but how decisions are recorded."""
        return self.spec

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Of the observations that `inputs` reads, by name."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Actions per decision."""

    @property
    def horizon(self) -> int:
        """H, the actions that the network predicts per decision, and that cloning shows it: the chunk, or more, of
        which the first are played."""
        return self.chunk

    @property
    @abstractmethod
    def action_dim(self) -> int:
        """A."""

    @property
    @abstractmethod
    def critic_size(self) -> int:
        """F, the number of features that a critic sees."""

    @abstractmethod
    def std_parameters(self) -> Sequence[nn.Parameter]:
        """Those of the spread of `sample`; `greedy` does not depend on them."""

    @property
    def frozen(self) -> Set[str]:
        """Names of the weights that no training changes: they are neither in checkpoints nor sent twice."""
        return frozenset()

    @property
    def transformer_blocks(self) -> Sequence[nn.Module]:
        """Modules whose activations can be computed again in the backward pass, instead of being kept for it, and that
        FSDP gathers one after another."""
        return ()

    @property
    def compiled_modules(self) -> Sequence[nn.Module]:
        """Modules that are compiled one by one: the transformer blocks, or what holds them if all of it compiles."""
        return self.transformer_blocks

    @property
    def tokens_per_decision(self) -> int:
        """Tokens that its transformer computes at most for one decision of an update, with those of images, prompt and
        actions, which count as often as they are computed; 0 for a policy that is none."""
        return 0

    @abstractmethod
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Normalise inputs and actions by the dataset's statistics, by field: mean, std, min, max."""

    @abstractmethod
    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        """Observations [B, …] as this policy's own tensors."""

    @abstractmethod
    def greedy(self, inputs: Inputs) -> Tensor:
        """The actions [B, C, A] without chance: the most likely ones, where the family knows them."""

    @abstractmethod
    def sample(
        self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Sampled actions and their log-probs, both [B, C, A]. Row i draws from generator i alone, so that a sample
        does not depend on the rows beside it."""

    def decide(self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float) -> Decision:
        """As `sample`, with the latents. They are recorded with the decision."""
        return Decision(*self.sample(inputs, generators, temperature), latents={})

    @property
    def update_observations(self) -> Sequence[str]:
        """The names of the observations that an update reads: all, but for those that latents stand for."""
        return self.observations

    def update_inputs(self, observations: Observation, latents: Inputs) -> dict[str, Tensor]:
        """Inputs of decisions that were recorded, from their `update_observations` and latents [B, …]."""
        return {**self.inputs(observations), **latents}

    def idle_latents(self, count: int) -> Inputs:
        """Latents of `count` decisions, with the names, shapes and dtypes of those that `decide` gives.

        For a pass that counts for nothing: a rank without data runs the policy where others run it on theirs.
        """
        return {}

    @abstractmethod
    def evaluate_actions(self, inputs: Inputs, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-density of `actions` and entropy of their distribution, dimension by dimension: both [B, C, A].

        The latents of the decision, where there are any, are among the inputs.
        """

    @abstractmethod
    def bc_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor:
        """The behaviour-cloning loss of `actions` [B, H, A], a mean over the actions where `mask` [B, H] is true.

        Masked actions may be NaN: they have no influence on the loss or its gradient.
        """

    @property
    def loss_draws(self) -> int:
        """How many random numbers `bc_loss` takes for each decision; 0 where the loss is not random.

        The learner draws them for a whole batch, so that the size of its microbatches has no influence.
        """
        return 0

    @abstractmethod
    def critic_features(self, inputs: Inputs) -> Tensor:
        """What a critic sees of the observations: [B, F], without a gradient."""

    @property
    def augmentation_draws(self) -> int:
        """How many random numbers `augment` takes for each observation."""
        return 0

    def augment(self, inputs: Inputs, draws: Tensor) -> Inputs:
        """Inputs as cloning sees them, changed where that does not change the right action.

        `draws` [B, augmentation_draws] between 0 and 1 decide how: the learner draws them for a whole batch, so that
        the size of its microbatches has no influence.
        """
        return inputs

    @property
    def observations(self) -> Sequence[str]:
        """The names of the observations that `inputs` reads."""
        return list(self.shapes)

    def export(self, folder: Path) -> None:
        """Write what other programs read of a trained policy, beside its own files; most families have nothing."""
        return

    def log_prob(self, inputs: Inputs, actions: Tensor, temperature: float) -> Tensor:
        """Log-density of `actions` [B, C, A], dimension by dimension: [B, C, A]."""
        return self.evaluate_actions(inputs, actions, temperature)[0]

    @property
    def device(self) -> torch.device:
        """Of its inputs. Buffers tell it: parameters that FSDP offloads are on the CPU between two passes."""
        return next(itertools.chain(self.buffers(), self.parameters())).device

    def act(self, observations: Observation) -> Array:
        """The greedy actions [B, C, A] for observations as a simulator or a robot gives them."""
        with torch.inference_mode():
            actions: Array = self.greedy(to_device(self.inputs(observations), self.device)).float().cpu().numpy()
        return actions


class EncoderPolicy(Policy):
    """A policy whose network has a part, `encode`, that critics can share."""

    def __init__(self, *, chunk: int, action_dim: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._action_dim = action_dim

    @property
    def chunk(self) -> int:
        return self._chunk

    @property
    def action_dim(self) -> int:
        return self._action_dim

    @abstractmethod
    def encode(self, inputs: Inputs) -> Tensor:
        """What the rest of the network and critics see of the observations, in float32 and with a gradient."""

    def critic_view(self, encoded: Tensor) -> Tensor:
        """What `encode` gives as a critic's features [B, F]."""
        return encoded

    def critic_features(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return self.critic_view(self.encode(inputs))


def observation_dtype(shape: tuple[int, ...]) -> np.dtype[Any]:
    """Of an observation of this shape: vectors are float32, images uint8, and what has no axis is a text."""
    return np.dtype({0: np.str_, 1: np.float32}.get(len(shape), np.uint8))


def with_loss_draws(policy: Policy, inputs: Inputs, draws: Tensor) -> Inputs:
    """The inputs of `bc_loss`; `draws` [B, loss_draws] between 0 and 1."""
    return {**inputs, LOSS_DRAWS: draws} if policy.loss_draws else inputs


def to_device(inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
