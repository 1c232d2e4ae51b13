"""Gradient steps of RLPD per second: 10 critics of 256 × 256 with LayerNorm, batches of 256, state observations.

Ways to make the same update, in one run, round by round in turn:
  loop      a list of ten networks out of torch's layers and a loop over them, one Adam, averages one by one:
            how SAC with an ensemble is usually written
  sb3       stable-baselines3's SAC with ten critics, where it is installed and with --utd 1: it steps the actor with
            every step of the critics. It has no LayerNorm, and takes the minimum over all critics
  batched   the ensemble as one batched computation (`RlpdLearner`)
  graph     the same as one CUDA graph per update (on a GPU, as `RlpdLearner` does by itself)

It prints a table: medians over rounds, and the ratio to the loop with the least and the most of all rounds.

Example: benchmarks/rlpd.py --device cpu --utd 1
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nightshift import config
from nightshift.algorithms.rlpd.learner import RlpdLearner
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.policies.gaussian_mlp import STATE, GaussianMlp
from nightshift.policies.heads import TanhGaussianHead

ROUNDS = 5
CRITICS, STATES, ACTIONS, WIDTH, BATCH = 10, 40, 7, 256, 256
SECONDS = 3.0
"""Of every way in every round, at least."""
PARAMS = config.load(Path(__file__).parent.parent / "params.yaml")


def settings(utd_ratio: int) -> config.Rlpd:
    published = {"num_qs": CRITICS, "num_min_qs": 2, "hidden": [WIDTH, WIDTH], "activation": "relu", "layer_norm": True}
    changes = {"critics": published, "entropy": {"backup": True}, "batch_size": BATCH, "utd_ratio": utd_ratio}
    return config.Rlpd.model_validate(config.merged(PARAMS.rlpd.model_dump(), changes))


def make_policy(device: torch.device) -> GaussianMlp:
    torch.manual_seed(0)
    sizes = {"hidden": [WIDTH, WIDTH], "chunk": 1, "action_dim": ACTIONS}
    return GaussianMlp(inputs={"state": STATES}, activation="relu", head="tanh_gaussian", **sizes).to(device)  # type: ignore[arg-type]


def make_batch(device: torch.device, utd_ratio: int) -> Transitions:
    rows = utd_ratio * BATCH

    def draw(*shape: int) -> Tensor:
        return (2 * torch.rand(*shape) - 1).to(device)

    return Transitions(
        inputs={STATE: draw(rows, STATES)},
        actions=draw(rows, 1, ACTIONS),
        rewards=draw(rows),
        discounts=torch.full((rows,), 0.99, device=device),
        next_inputs={STATE: draw(rows, STATES)},
        bc_actions=draw(rows, 1, ACTIONS),
        bc_mask=torch.zeros(rows, 1, dtype=torch.bool, device=device),
    )


class Loop:
    """SAC with an ensemble, written plainly."""

    def __init__(self, device: torch.device, rlpd: config.Rlpd) -> None:
        self.actor = make_policy(device)
        self.critics = nn.ModuleList([self._critic() for _ in range(rlpd.critics.num_qs)]).to(device)
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = nn.Parameter(torch.zeros((), device=device))
        self._critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=rlpd.critics.learning_rate)
        self._actor_optimizer = torch.optim.Adam(self.actor.net.parameters(), lr=rlpd.actor.learning_rate)
        self._temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=rlpd.entropy.learning_rate)
        self._rlpd = rlpd

    @staticmethod
    def _critic() -> nn.Sequential:
        first = [nn.Linear(STATES + ACTIONS, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
        return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def _act(self, states: Tensor) -> tuple[Tensor, Tensor]:
        head = self.actor.head
        assert isinstance(head, TanhGaussianHead)
        noise = torch.randn(len(states), 1, ACTIONS, device=states.device)
        actions, log_probs = head.rsample(self.actor.outputs({STATE: states}), noise)
        return actions.flatten(1), log_probs.sum((1, 2))

    def _values(self, critics: nn.ModuleList, states: Tensor, actions: Tensor) -> Tensor:
        joint = torch.cat([states, actions], -1)
        return torch.stack([critic(joint).squeeze(-1) for critic in critics])

    def update(self, batch: Transitions) -> None:
        slices = batch.slices(BATCH)
        for part in slices:
            self._update_critics(part)
        self._update_actor(slices[-1])

    def _update_critics(self, part: Transitions) -> None:
        with torch.no_grad():
            actions, log_probs = self._act(part.next_inputs[STATE])
            members = torch.randperm(len(self.critics))[: self._rlpd.critics.num_min_qs]
            values = self._values(self.targets, part.next_inputs[STATE], actions)[members].amin(0)
            target = part.rewards + part.discounts * (values - self.log_temperature.exp() * log_probs)
        found = self._values(self.critics, part.inputs[STATE], part.actions.flatten(1))
        self._critic_optimizer.zero_grad()
        (found - target).square().mean().backward()  # type: ignore[no-untyped-call]
        self._critic_optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                average.lerp_(parameter, self._rlpd.critics.tau)

    def _update_actor(self, part: Transitions) -> None:
        actions, log_probs = self._act(part.inputs[STATE])
        values = self._values(self.critics, part.inputs[STATE], actions).mean(0)
        self._actor_optimizer.zero_grad()
        (self.log_temperature.exp().detach() * log_probs - values).mean().backward()  # type: ignore[no-untyped-call]
        self._actor_optimizer.step()
        entropy = -log_probs.detach().mean()
        self._temperature_optimizer.zero_grad()
        (self.log_temperature.exp() * (entropy + ACTIONS / 2)).backward()  # type: ignore[no-untyped-call]
        self._temperature_optimizer.step()


def stable_baselines(device: torch.device) -> Callable[[], object]:
    """One gradient step of its SAC, the sampling from its replay included."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    class Spaces(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (STATES,))
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,))

    networks = {"n_critics": CRITICS, "net_arch": [WIDTH, WIDTH]}
    sac = SAC("MlpPolicy", Spaces(), buffer_size=5000, batch_size=BATCH, policy_kwargs=networks, device=device)
    sac.set_logger(configure(None, []))
    draw = np.random.default_rng(0)
    for _ in range(sac.buffer_size):
        states, actions = draw.uniform(-1, 1, (2, 1, STATES)), draw.uniform(-1, 1, (1, ACTIONS))
        sac.replay_buffer.add(*states, actions, draw.uniform(-1, 1, 1), np.zeros(1), [{}])
    return lambda: sac.train(1, BATCH)


def ways(device: torch.device, utd_ratio: int) -> dict[str, Callable[[], object]]:
    batch, rlpd = make_batch(device, utd_ratio), settings(utd_ratio)
    loop = Loop(device, rlpd)
    batched = RlpdLearner(make_policy(device), rlpd, seed=0, cuda_graphs=False)
    found: dict[str, Callable[[], object]] = {
        "loop": lambda: loop.update(batch),
        "batched": lambda: batched.update(batch),
    }
    if utd_ratio == 1 and importlib.util.find_spec("stable_baselines3"):
        found["sb3"] = stable_baselines(device)
    if device.type == "cuda":
        graph = RlpdLearner(make_policy(device), rlpd, seed=0)
        found["graph"] = lambda: graph.update(batch)
    return found


def updates_per_second(update: Callable[[], object], device: torch.device) -> float:
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 1
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--utd", type=int, default=20, help="steps of the critics for one of the actor")
    chosen = parser.parse_args()
    device, utd = torch.device(chosen.device), chosen.utd
    torch.set_num_threads(chosen.threads)
    compared = ways(device, utd)
    for update in compared.values():  # compile, allocate, record
        update()
    found: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(ROUNDS):
        for name, update in compared.items():
            found[name].append(utd * updates_per_second(update, device))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device.type}, {where}: {CRITICS} critics, batch {BATCH}, {WIDTH} × {WIDTH}, UTD {utd}")
    print(f"{'':10}{'steps/s':>10}{'decisions/h':>14}{'over loop':>11}{'least':>8}{'most':>8}")
    for name, rates in found.items():
        ratios = [rate / base for rate, base in zip(rates, found["loop"], strict=True)]
        middle = statistics.median(rates)
        columns = f"{middle:10.1f}{3600 * middle / utd:14,.0f}{statistics.median(ratios):11.2f}"
        print(f"{name:10}{columns}{min(ratios):8.2f}{max(ratios):8.2f}")


if __name__ == "__main__":
    main()
