"""Policies that denoise their actions step by step, and how the chain of steps gets log-probs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies import flow_matching
from nightshift.policies.base import LOSS_DRAWS, Decision, EncoderPolicy, Inputs
from nightshift.policies.heads import MIN_STD

if TYPE_CHECKING:
    from nightshift import config

CHAIN = "denoising_chain"
"""The latent of that name, [B, N + 1, H, D]: normalised actions from noise to what was played."""
GAUSSIAN_STEPS = "gaussian_steps"
"""The latent of that name, int64 [B, K]: the steps of the chain that have a log-prob."""
Context = TypeVar("Context")
_NOISE_HIDDEN = (128, 64)
"""Widths of the noise network, as in RLinf."""
_GREEDY_SEED = 0
"""Of the noise that `greedy` denoises."""


class FlowSdeSpec(TypedDict):
    noise_level: float


class FlowNoiseSpec(TypedDict):
    min_std: float
    max_std: float
    log_prob: Literal["sum", "mean"]


class DenoisingSpec(TypedDict):
    denoising_steps: int
    flow_sde: FlowSdeSpec | None
    flow_noise: FlowNoiseSpec | None


class Denoising(nn.Module, ABC):
    """N steps from noise to actions. `step` [B] is the number of a step, which may differ from row to row."""

    times: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("times", flow_matching.schedule(steps), persistent=False)

    @property
    @abstractmethod
    def gaussian_steps(self) -> int:
        """K, how many steps of a chain are Gaussian."""

    @abstractmethod
    def draw_steps(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """The numbers [K] of the steps that are Gaussian, in order; the others follow the ODE."""

    @abstractmethod
    def transition(
        self, noisy: Tensor, velocity: Tensor, hidden: Tensor, step: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and std after a Gaussian step, both [B, C, A]; `hidden` [B, C, width] is what the velocity was computed
        from."""

    @abstractmethod
    def joint(self, initial: Tensor, of_steps: Tensor) -> Tensor:
        """What counts as the log-prob (or entropy) of the chain: of its initial noise, and of its Gaussian steps
        together."""

    def ode_step(self, noisy: Tensor, velocity: Tensor, step: int) -> Tensor:
        return flow_matching.ode_step(noisy, velocity, self.times[step] - self.times[step + 1])


class FlowSde(Denoising):
    """One step of the chain, drawn anew for every decision, is one of the SDE (pi_RL's Flow-SDE).

    The log-prob is that of this step: an update computes the velocity once, however long the chain is.
    """

    sigma: Tensor

    def __init__(self, steps: int, spec: FlowSdeSpec) -> None:
        super().__init__(steps)
        sigma = flow_matching.sde_sigma(flow_matching.schedule(steps), spec["noise_level"])
        self.register_buffer("sigma", sigma, persistent=False)

    @property
    def gaussian_steps(self) -> int:
        return 1

    def draw_steps(self, generator: np.random.Generator) -> NDArray[np.int64]:
        return generator.integers(self.steps, size=1)

    def transition(
        self, noisy: Tensor, velocity: Tensor, hidden: Tensor, step: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        step = step[:, None, None]
        time, delta = self.times[step], self.times[step] - self.times[step + 1]
        sigma = temperature * self.sigma[step]
        mean = flow_matching.sde_mean(noisy, velocity, time, delta, sigma)
        return mean, (sigma * delta.sqrt()).expand_as(mean)

    def joint(self, initial: Tensor, of_steps: Tensor) -> Tensor:
        return of_steps


class FlowNoise(Denoising):
    """Every step of the chain is Gaussian with a std that a small network gives (pi_RL's Flow-Noise, ReinFlow)."""

    def __init__(self, steps: int, spec: FlowNoiseSpec, *, width: int, action_dim: int) -> None:
        super().__init__(steps)
        self._spec = spec
        first, second = _NOISE_HIDDEN
        self.std = nn.Sequential(
            nn.Linear(width, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh(), nn.Linear(second, action_dim)
        )

    @property
    def gaussian_steps(self) -> int:
        return self.steps

    def draw_steps(self, generator: np.random.Generator) -> NDArray[np.int64]:
        return np.arange(self.steps)

    def transition(
        self, noisy: Tensor, velocity: Tensor, hidden: Tensor, step: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        delta = (self.times[step] - self.times[step + 1])[:, None, None]
        low, high = math.log(self._spec["min_std"]), math.log(self._spec["max_std"])
        log_std = low + (high - low) * (self.std(hidden).tanh() + 1) / 2
        return flow_matching.ode_step(noisy, velocity, delta), temperature * log_std.exp()

    def joint(self, initial: Tensor, of_steps: Tensor) -> Tensor:
        """Their sum, or as in RLinf the mean over the initial noise and the steps."""
        total = initial + of_steps
        return total / (1 + self.steps) if self._spec["log_prob"] == "mean" else total


def denoising(spec: DenoisingSpec, width: int, action_dim: int) -> Denoising:
    """`width` and `action_dim`: of the features and of the velocity that is read from them."""
    steps, noise = spec["denoising_steps"], spec["flow_noise"]
    if spec["flow_sde"] is not None:
        return FlowSde(steps, spec["flow_sde"])
    assert noise is not None
    return FlowNoise(steps, noise, width=width, action_dim=action_dim)


def denoising_spec(settings: config.Flow | config.Pi0) -> DenoisingSpec:
    sde, noise = settings.flow_sde, settings.flow_noise
    return {
        "denoising_steps": settings.denoising_steps,
        "flow_sde": None if sde is None else {"noise_level": sde.noise_level},
        "flow_noise": None
        if noise is None
        else {"min_std": noise.min_std, "max_std": noise.max_std, "log_prob": noise.log_prob},
    }


class FlowPolicy(EncoderPolicy, Generic[Context]):
    """A policy that denoises its actions: a family only says what the velocity network is.

    `context` sees the observations, once per decision; `velocity` is computed from it for every step of the chain.
    H actions of D dimensions are denoised; the first C, and of them A dimensions, are played.
    """

    denoising: Denoising
    greedy_noise: Tensor
    action_mean: Tensor
    action_std: Tensor

    def register_denoising_buffers(self) -> None:
        """Actions are denoised in standard deviations of the demos. `greedy` always starts from the same draw."""
        self.register_buffer("action_mean", torch.zeros(self.action_dim))
        self.register_buffer("action_std", torch.ones(self.action_dim))
        drawn = np.random.default_rng(_GREEDY_SEED).standard_normal(self.noise_shape, dtype=np.float32)
        self.register_buffer("greedy_noise", torch.tensor(drawn), persistent=False)

    @abstractmethod
    def context(self, inputs: Inputs) -> Context:
        """What the velocity depends on beside noisy actions and time."""

    @abstractmethod
    def velocity(self, noisy: Tensor, times: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The velocity [B, H, D] at `times` [B], and the features [B, H, width] that it is read from."""

    @property
    def noise_dim(self) -> int:
        """D."""
        return self.action_dim

    @property
    def noise_shape(self) -> tuple[int, int]:
        """H and D."""
        return self.horizon, self.noise_dim

    def normalise_actions(self, actions: Tensor, inputs: Inputs) -> Tensor:
        """Actions [B, H, A] as they are denoised."""
        return (actions - self.action_mean) / self.action_std

    def unnormalise_actions(self, denoised: Tensor, inputs: Inputs) -> Tensor:
        """Back to the simulator's, both [B, C, A]."""
        return self.action_mean + self.action_std * denoised

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return list(self.denoising.parameters())

    def normalise_actions_by(self, statistics: Mapping[str, Any]) -> None:
        self.action_mean.copy_(torch.tensor(statistics["mean"]))
        self.action_std.copy_(torch.tensor(statistics["std"]).clamp(min=MIN_STD))

    def greedy(self, inputs: Inputs) -> Tensor:
        """What the ODE makes of one standard normal draw, the same for every decision.

        Not of noise 0: that is the most likely noise and not the most likely action. Between two ways that the demos
        show its velocity is 0, so it would stay on their mean; and no noise that the network was trained on is so near
        to 0.
        """
        context = self.context(inputs)
        rows = len(next(iter(inputs.values())))
        noisy = self.greedy_noise.expand(rows, -1, -1)
        for step in range(self.denoising.steps):
            velocity, _ = self.velocity(noisy, self.denoising.times[step].expand(rows), context)
            noisy = self.denoising.ode_step(noisy, velocity, step)
        return self.unnormalise_actions(self._played(noisy), inputs)

    def sample(
        self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        actions, log_probs, _ = self.decide(inputs, generators, temperature)
        return actions, log_probs

    def decide(self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float) -> Decision:
        """The temperature scales the std of Gaussian steps. The initial noise is standard normal at any temperature,
        since the network has seen no other at t = 1."""
        context = self.context(inputs)
        noises, gaussian = self._draw(generators)
        chain = [noises[:, 0]]
        total = torch.zeros_like(chain[0])
        for number in range(self.denoising.steps):
            step = torch.full((len(noises),), number, device=self.device)
            velocity, mean, std = self._transition(chain[-1], step, context, temperature)
            is_gaussian = (gaussian == number).any(1)[:, None, None]
            sampled = mean + std * noises[:, number + 1]
            chain.append(torch.where(is_gaussian, sampled, self.denoising.ode_step(chain[-1], velocity, number)))
            total += torch.where(is_gaussian, flow_matching.normal_log_prob(sampled, mean, std), 0)
        log_probs = self.denoising.joint(_standard_normal_log_prob(chain[0]), total)
        actions = self.unnormalise_actions(self._played(chain[-1]), inputs)
        latents = {CHAIN: torch.stack(chain, dim=1), GAUSSIAN_STEPS: gaussian}
        return Decision(actions, self._played(log_probs), latents)

    def evaluate_actions(self, inputs: Inputs, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Of the chain that led to `actions`, which is among the inputs."""
        context, chain = self.context(inputs), inputs[CHAIN]
        rows = torch.arange(len(chain), device=chain.device)
        log_probs, entropies = torch.zeros_like(chain[:, 0]), torch.zeros_like(chain[:, 0])
        for step in inputs[GAUSSIAN_STEPS].unbind(1):
            _, mean, std = self._transition(chain[rows, step], step, context, temperature)
            log_probs = log_probs + flow_matching.normal_log_prob(chain[rows, step + 1], mean, std)
            entropies = entropies + flow_matching.normal_entropy(std)
        initial = _standard_normal_log_prob(chain[:, 0])
        initial_entropy = flow_matching.normal_entropy(torch.ones_like(initial))
        both = self.denoising.joint(initial, log_probs), self.denoising.joint(initial_entropy, entropies)
        return self._played(both[0]), self._played(both[1])

    def idle_latents(self, count: int) -> Inputs:
        chain = torch.zeros(count, self.denoising.steps + 1, *self.noise_shape)
        return {CHAIN: chain, GAUSSIAN_STEPS: torch.zeros(count, self.denoising.gaussian_steps, dtype=torch.int64)}

    @property
    def loss_draws(self) -> int:
        """One for the time, the others for the noise."""
        return 1 + math.prod(self.noise_shape)

    def bc_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor:
        """Flow matching: the squared error of the velocity, at one time and with one noise for each decision."""
        draws = inputs[LOSS_DRAWS]
        times, noise = flow_matching.training_times(draws[:, 0]), flow_matching.normal(draws[:, 1:])
        normalised = torch.where(mask[..., None], self.normalise_actions(actions, inputs), 0)
        padded = functional.pad(normalised, (0, self.noise_dim - self.action_dim))
        noisy, target = flow_matching.interpolate(padded, noise.reshape(padded.shape), times)
        velocity, _ = self.velocity(noisy, times, self.context(inputs))
        errors = (velocity - target).square().mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum()

    def _transition(
        self, noisy: Tensor, step: Tensor, context: Context, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The velocity at the beginning of `step` [B], and mean and std after it if it is Gaussian: all [B, C, A]."""
        velocity, hidden = self.velocity(noisy, self.denoising.times[step], context)
        return velocity, *self.denoising.transition(noisy, velocity, hidden, step, temperature)

    def _draw(self, generators: Sequence[np.random.Generator]) -> tuple[Tensor, Tensor]:
        """Standard normal noise [B, N + 1, H, D] for the beginning and every step, and the Gaussian steps [B, K]."""
        shape = (self.denoising.steps + 1, *self.noise_shape)
        noises = [generator.standard_normal(shape, dtype=np.float32) for generator in generators]
        gaussian = [self.denoising.draw_steps(generator) for generator in generators]
        return torch.from_numpy(np.stack(noises)).to(self.device), torch.from_numpy(np.stack(gaussian)).to(self.device)

    def _played(self, denoised: Tensor) -> Tensor:
        """Of what is denoised, the part that is played: [B, C, A]."""
        return denoised[:, : self.chunk, : self.action_dim]


def _standard_normal_log_prob(noise: Tensor) -> Tensor:
    return flow_matching.normal_log_prob(noise, torch.zeros_like(noise), torch.ones_like(noise))
