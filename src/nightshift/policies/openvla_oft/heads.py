"""Action heads of OpenVLA-OFT: 256 tokens per action dimension, or continuous actions.

Both work with normalised actions in [-1, 1], which `ActionScale` turns into those of the simulator.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.heads import ActionHead
from nightshift.policies.openvla_oft.network import ACTION_TOKENS
from nightshift.policies.openvla_oft.norm_stats import Bounds, BoundsSpec

Gripper = Literal["simulator", "openvla"]
"""-1 opens and 1 closes, as in LIBERO; or 1 opens and 0 closes, as in OpenVLA's data."""
_INITIAL_LOG_SCALE = -3.0
"""Of the Laplace distribution, as in RIPT-VLA."""


class ActionScale(nn.Module):
    """Normalised actions and those of the simulator.

    Published code also takes the gripper's sign. Here LIBERO's gripper does: taken earlier, many tokens would become
    one action, and the log-prob of an action that was played could not be computed again.
    """

    def __init__(self, action_dim: int, gripper: Gripper) -> None:
        super().__init__()
        self.bounds = Bounds(action_dim)
        self._gripper = gripper

    def to_simulator(self, normalised: Tensor) -> Tensor:
        return self._turned(self.bounds.unscale(normalised))

    def to_normalised(self, actions: Tensor) -> Tensor:
        return self.bounds.scale(self._turned(actions, inverse=True))

    def _turned(self, actions: Tensor, *, inverse: bool = False) -> Tensor:
        if self._gripper == "simulator":
            return actions
        arm, gripper = actions[..., :-1], actions[..., -1:]
        return torch.cat([arm, (1 - gripper) / 2 if inverse else 1 - 2 * gripper], dim=-1)


class OpenVlaHead(ActionHead):
    def __init__(self, action_dim: int, gripper: Gripper, published: BoundsSpec | None) -> None:
        """`published` are the bounds of a checkpoint, which the demos' statistics do not replace."""
        super().__init__()
        self.action_scale = ActionScale(action_dim, gripper)
        self._published = published is not None
        if published is not None:
            self.action_scale.bounds.set(published)

    def normalise_by(self, statistics: Mapping[str, Any]) -> None:
        if not self._published:
            self.action_scale.bounds.set_to_demos(statistics)

    def bc_loss(self, outputs: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        targets = torch.where(mask[..., None], actions, 0)  # before any arithmetic: the gradient of a masked NaN is NaN
        clipped = self.action_scale.to_normalised(targets).clamp(-1, 1)  # q01 and q99 leave some outside, as in OpenVLA
        errors = self._errors(outputs, clipped).mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum()

    @abstractmethod
    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[B, C, A], of normalised targets in [-1, 1]."""


class ActionTokensHead(OpenVlaHead):
    """OpenVLA's action tokens: 256 edges between -1 and 1 make 255 bins, whose centres are the actions.

    Tokens run against the actions: token 255 is the lowest. Tokens 0 (exactly 1 in the data) and 1 are the same
    action, so the probability of that action is the sum of theirs. Temperature divides the logits.
    """

    outputs_per_dim = ACTION_TOKENS
    edges: Tensor

    def __init__(self, action_dim: int, gripper: Gripper, published: BoundsSpec | None) -> None:
        super().__init__(action_dim, gripper, published)
        edges = torch.linspace(-1, 1, ACTION_TOKENS, dtype=torch.float64)
        self.register_buffer("edges", edges.float(), persistent=False)
        self.register_buffer("centres", ((edges[:-1] + edges[1:]) / 2).float(), persistent=False)

    centres: Tensor

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return []

    def actions(self, tokens: Tensor) -> Tensor:
        """Of the simulator, [B, C, A], for tokens 0 to 255."""
        return self.action_scale.to_simulator(self.centres[self._bins_of(tokens)])

    def greedy(self, outputs: Tensor) -> Tensor:
        return self.actions(outputs.argmax(-1))

    def sample_tokens(self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float) -> Tensor:
        shape = outputs.shape[1:3]
        uniform = np.stack([generator.random(shape, dtype=np.float32) for generator in generators])
        # Inverse-CDF sampling. In double precision the product stays below the total: no token beyond the last.
        cumulative = (outputs / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        threshold = torch.from_numpy(uniform).to(outputs.device)[..., None] * cumulative[..., -1:]
        return (cumulative <= threshold).sum(-1)

    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        actions = self.actions(self.sample_tokens(outputs, generators, temperature))
        return actions, self.log_prob(outputs, actions, temperature)

    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor:
        bins = self._nearest(self.action_scale.to_normalised(actions))
        return self._bin_log_probs(outputs, temperature).gather(-1, bins[..., None]).squeeze(-1)

    def entropy(self, outputs: Tensor, temperature: float) -> Tensor:
        log_probs = self._bin_log_probs(outputs, temperature)
        return -(log_probs.exp() * log_probs).sum(-1)

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the token that OpenVLA's tokenizer gives a target: the number of edges up to it decides."""
        edges = torch.bucketize(targets, self.edges, right=True)
        return functional.cross_entropy(outputs.movedim(-1, 1), ACTION_TOKENS - edges, reduction="none")

    def _bin_log_probs(self, outputs: Tensor, temperature: float) -> Tensor:
        """[B, C, A, 255], from the lowest action to the highest."""
        log_probs = (outputs / temperature).log_softmax(-1)
        highest = log_probs[..., :2].logsumexp(-1, keepdim=True)
        return torch.cat([highest, log_probs[..., 2:]], dim=-1).flip(-1)

    def _bins_of(self, tokens: Tensor) -> Tensor:
        return (ACTION_TOKENS - 1 - tokens).clamp(max=len(self.centres) - 1)

    def _nearest(self, normalised: Tensor) -> Tensor:
        count = len(self.centres)
        return ((normalised + 1) * (count / 2)).floor().long().clamp(0, count - 1)


class LaplaceHead(OpenVlaHead):
    """The continuous head: an action regressed with the L1 loss, and a Laplace distribution around it to explore with.

    One learned scale per dimension, times the temperature, in units of normalised actions. Densities are those of the
    simulator's actions.
    """

    outputs_per_dim = 1

    def __init__(self, action_dim: int, gripper: Gripper, published: BoundsSpec | None) -> None:
        super().__init__(action_dim, gripper, published)
        self.log_scale = nn.Parameter(torch.full((action_dim,), _INITIAL_LOG_SCALE))

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return [self.log_scale]

    def greedy(self, outputs: Tensor) -> Tensor:
        return self.action_scale.to_simulator(outputs.squeeze(-1))

    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        shape = outputs.shape[1:3]
        noise = np.stack([generator.laplace(size=shape).astype(np.float32) for generator in generators])
        scale = self._log_scale(temperature).exp()
        normalised = outputs.squeeze(-1) + scale * torch.from_numpy(noise).to(outputs.device)
        actions = self.action_scale.to_simulator(normalised)
        return actions, self.log_prob(outputs, actions, temperature)

    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor:
        log_scale = self._log_scale(temperature)
        distance = (self.action_scale.to_normalised(actions) - outputs.squeeze(-1)).abs() / log_scale.exp()
        return -distance - log_scale - math.log(2) - self._log_slope()

    def entropy(self, outputs: Tensor, temperature: float) -> Tensor:
        entropy = 1 + math.log(2) + self._log_scale(temperature) + self._log_slope()
        return entropy.expand(outputs.shape[:3])

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - targets).abs()

    def _log_scale(self, temperature: float) -> Tensor:
        return self.log_scale + math.log(temperature)

    def _log_slope(self) -> Tensor:
        """Of the simulator's action as a function of the normalised one, [A]."""
        zero = torch.zeros_like(self.log_scale)
        return (self.action_scale.to_simulator(zero + 1) - self.action_scale.to_simulator(zero)).abs().log()


HEADS: Mapping[str, type[ActionTokensHead] | type[LaplaceHead]] = {"tokens": ActionTokensHead, "l1": LaplaceHead}
"""By their name in params.yaml."""
