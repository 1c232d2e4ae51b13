"""Gradient steps of RLPD per second: 10 critics of 256 × 256 with LayerNorm, batches of 256, state observations.

Ways to make the same update, in one run, round by round in turn:
  loop      a list of ten networks out of torch's layers and a loop over them, one Adam, averages one by one:
            how SAC with an ensemble is usually written
  sb3       stable-baselines3's SAC with ten critics and `gradient_steps` = UTD, where it is installed. It differs: no
            LayerNorm, the minimum over all critics, and a step of the actor and one of the temperature with every step
            of the critics, so that it is set up alike with --utd 1 alone. It samples its replay in that time
  batched   the ensemble as one batched computation (`RlpdLearner`)
  graph     the same as one CUDA graph per update (on a GPU, as `RlpdLearner` does by itself)
  products  the matrix products of `batched` and nothing else: what its speed is limited by (on a CPU)

With --cameras instead: a `cnn` that sees two cameras at 64² shares its encoder with the critics.
  eager     operation by operation; the critics train the encoder (actor.start: scratch)
  graph     the same as one CUDA graph (on a GPU)
  frozen    the encoder of a clone, which is not trained; one CUDA graph (on a GPU)

It prints a table: medians over rounds, and the ratio to the loop and to sb3 with the least and the most of all rounds.

Example: benchmarks/rlpd.py --device cpu --utd 1
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nightshift import config
from nightshift.algorithms.rlpd.learner import RlpdLearner
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.policies.cnn import Cnn
from nightshift.policies.gaussian_mlp import STATE, GaussianMlp
from nightshift.policies.heads import TanhGaussianHead

ROUNDS = 5
CRITICS, STATES, ACTIONS, WIDTH, BATCH = 10, 40, 7, 256, 256
CAMERAS, PIXELS, PROPRIO = ("agentview", "wrist"), 64, 9
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
        bc_filter=torch.zeros(rows, 1, dtype=torch.bool, device=device),
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


class Products:
    """The matrix products of an update; every operand lies in memory as BLAS likes it best."""

    def __init__(self, device: torch.device, utd_ratio: int, num_min_qs: int) -> None:
        sizes = [STATES + ACTIONS, WIDTH, WIDTH, 1]
        self._critics = self._layers(CRITICS, sizes, device)
        self._drawn = self._layers(num_min_qs, sizes, device)
        self._actor = self._layers(1, [STATES, WIDTH, WIDTH, 2 * ACTIONS], device)
        self._utd_ratio = utd_ratio

    @staticmethod
    def _layers(count: int, sizes: Sequence[int], device: torch.device) -> list[tuple[Tensor, ...]]:
        """Of each layer: inputs, weights, gradients of outputs, transposed weights."""
        shapes = [
            ((count, BATCH, a), (count, a, b), (count, BATCH, b), (count, b, a)) for a, b in itertools.pairwise(sizes)
        ]
        return [tuple(torch.rand(shape, device=device) for shape in layer) for layer in shapes]

    def update(self) -> None:
        for _ in range(self._utd_ratio):
            self._forward(self._actor)
            self._forward(self._drawn)
            self._forward(self._critics)
            self._weight_gradients(self._critics)
            self._input_gradients(self._critics[1:])
        self._forward(self._actor)
        self._forward(self._critics)
        self._input_gradients(self._critics)
        self._weight_gradients(self._actor)
        self._input_gradients(self._actor[1:])

    def _forward(self, layers: list[tuple[Tensor, ...]]) -> None:
        for inputs, weights, _, _ in layers:
            torch.bmm(inputs, weights)

    def _weight_gradients(self, layers: list[tuple[Tensor, ...]]) -> None:
        for inputs, _, gradients, _ in layers:
            torch.bmm(inputs.transpose(1, 2), gradients)

    def _input_gradients(self, layers: list[tuple[Tensor, ...]]) -> None:
        for _, _, gradients, transposed in layers:
            torch.bmm(gradients, transposed)


def stable_baselines(device: torch.device, utd_ratio: int) -> Callable[[], object]:
    """As many gradient steps of its SAC, the sampling from its replay included."""
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
    return lambda: sac.train(utd_ratio, BATCH)


def ways(device: torch.device, utd_ratio: int) -> dict[str, Callable[[], object]]:
    batch, rlpd = make_batch(device, utd_ratio), settings(utd_ratio)
    loop = Loop(device, rlpd)
    batched = RlpdLearner(make_policy(device), rlpd, seed=0, cuda_graphs=False)
    found: dict[str, Callable[[], object]] = {
        "loop": lambda: loop.update(batch),
        "batched": lambda: batched.update(batch),
    }
    if importlib.util.find_spec("stable_baselines3"):
        found["sb3"] = stable_baselines(device, utd_ratio)
    else:
        print("sb3 is left out: pip install stable-baselines3")
    if device.type == "cuda":
        graph = RlpdLearner(make_policy(device), rlpd, seed=0)
        found["graph"] = lambda: graph.update(batch)
    else:
        found["products"] = Products(device, utd_ratio, rlpd.critics.num_min_qs).update
    return found


def seeing_ways(device: torch.device, utd_ratio: int) -> dict[str, Callable[[], object]]:
    rows, rlpd = utd_ratio * BATCH, settings(utd_ratio)
    batch = replace(
        make_batch(device, utd_ratio), inputs=make_images(rows, device), next_inputs=make_images(rows, device)
    )
    learners = {
        "eager": RlpdLearner(make_seeing_policy(device), with_start(rlpd, "scratch"), seed=0, cuda_graphs=False),
        "frozen": RlpdLearner(make_seeing_policy(device), with_start(rlpd, "clone"), seed=0),
    }
    if device.type == "cuda":
        learners["graph"] = RlpdLearner(make_seeing_policy(device), with_start(rlpd, "scratch"), seed=0)
    return {name: partial(learner.update, batch) for name, learner in learners.items()}


def with_start(rlpd: config.Rlpd, start: str) -> config.Rlpd:
    return config.Rlpd.model_validate(config.merged(rlpd.model_dump(), {"actor": {"start": start}}))


def make_seeing_policy(device: torch.device) -> Cnn:
    torch.manual_seed(0)
    image = (PIXELS, PIXELS, 3)
    inputs: Any = {**dict.fromkeys(CAMERAS, image), "proprio": (PROPRIO,)}
    sizes: Any = {"channels": [32, 64, 64, 64], "hidden": [WIDTH, WIDTH], "chunk": 1, "action_dim": ACTIONS}
    changes: Any = {"max_words": 1, "head": "tanh_gaussian", "augmentation": {"crop": 4, "jitter": 0.0}}
    return Cnn(inputs=inputs, **sizes, **changes).to(device)


def make_images(rows: int, device: torch.device) -> dict[str, Tensor]:
    shape = (rows, PIXELS, PIXELS, 3)
    images = {name: torch.randint(256, shape, dtype=torch.uint8, device=device) for name in CAMERAS}
    return {**images, "proprio": torch.rand(rows, PROPRIO, device=device)}


def updates_per_second(update: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    count, started = 0, clock()
    while clock() - started < SECONDS:
        update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 1
    return count / (clock() - started)


def print_table(rates: Mapping[str, Sequence[float]], utd: int) -> None:
    """`rates`: gradient steps per second by round."""
    bases = [name for name in ("loop", "sb3") if name in rates]
    print(
        f"{'':10}{'steps/s':>10}{'decisions/h':>14}" + "".join(f"{f'over {base} (least - most)':>29}" for base in bases)
    )
    for name, own in rates.items():
        middle = statistics.median(own)
        print(f"{name:10}{middle:10.1f}{3600 * middle / utd:14,.0f}" + "".join(_over(own, rates[b]) for b in bases))


def _over(own: Sequence[float], base: Sequence[float]) -> str:
    ratios = [rate / other for rate, other in zip(own, base, strict=True)]
    return f"{f'{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})':>29}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--utd", type=int, default=20, help="steps of the critics for one of the actor")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count seconds of CPU time: for one thread, on a machine that is in use"
    )
    parser.add_argument("--cameras", action="store_true", help="a policy that sees")
    chosen = parser.parse_args()
    device, utd = torch.device(chosen.device), chosen.utd
    if chosen.cpu_time and device.type == "cuda":
        parser.error("--cpu-time counts no work of a GPU: leave it out, or add --device cpu")
    torch.set_num_threads(chosen.threads)
    compared = (seeing_ways if chosen.cameras else ways)(device, utd)
    for update in compared.values():  # allocate, record
        update()
    rates: dict[str, list[float]] = {name: [] for name in compared}
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    for _ in range(ROUNDS):
        for name, update in compared.items():
            rates[name].append(utd * updates_per_second(update, device, clock))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device.type}, {where}: {CRITICS} critics, batch {BATCH}, {WIDTH} × {WIDTH}, UTD {utd}")
    print_table(rates, utd)


if __name__ == "__main__":
    main()
