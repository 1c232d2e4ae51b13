"""What training stages write to the disk of the project, told from the shapes of their policy before they run.

    sft    weights, moments                                     learner
    rloo   weights, moments, those of the critic,               learner
           the policy that acts (staleness 1), the best one     whole, also where the learner is sharded
    rlpd   weights, moments, those of critics and temperature, averages, policies that were ordered ahead, the best one

Weights are those that training changes. Small things are counted as more than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nightshift import config
from nightshift.algorithms.critic import ValueNetwork
from nightshift.algorithms.rlpd.critics import CriticEnsemble
from nightshift.learners import checkpoint
from nightshift.policies.base import Policy
from nightshift.policies.heads import HeadPolicy

Sizes = list[int]
"""Bytes of each tensor."""

_NUMBER = 8
"""Bytes of a tensor of one number, as of the steps that an optimizer counts for each parameter."""
_GENERATOR = 5056
"""The state of torch's generator on the CPU."""
_SCALARS = 5
"""Tensors of one number each in rlpd: temperature, its moments and steps, and a counter."""
_IN_FILE = 256
"""Of a tensor in the header of a safetensors file: name, shape and place."""
_IN_SHARD = 2048
"""Of a tensor's part that one rank writes: an archive of its own, and where it is."""
_STATE = 2**17
"""Cursors, spec and manifest."""
_ROUND = 2**12
"""Metrics of an iteration, or of a round of episodes, in the history."""


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Of one training stage, in bytes."""

    stage: str
    policy: int
    """That the stage hands on."""
    checkpoint: int
    """One of them."""
    checkpoints: int
    """How many of them there are at most: a new one is written before the oldest one goes."""
    written: int = 0
    """Of checkpoints that are on the disk already, from which the stage resumes."""

    @property
    def to_come(self) -> int:
        """That checkpoints take at most, beyond those that are there."""
        return max(self.checkpoints * self.checkpoint - self.written, 0)


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """Of a checkpoint."""

    learner: Sizes
    """Tensors that ranks may share out."""
    beside: Sizes
    """Policies that are whole."""
    count: int
    """Checkpoints that the stage writes."""
    rounds: int
    """In the history at the end."""


def of_stage(stage: str, policy: Policy, params: config.Params, state: Path | None = None) -> DiskUse:
    """`policy` needs no memory for its weights; `state` is where the stage keeps its checkpoints."""
    contents = _BY_STAGE[stage](policy, params)
    is_sharded = stage != "rlpd" and params.machine.strategy == "fsdp"
    parts = params.machine.ranks * _IN_SHARD if is_sharded else _IN_FILE
    text = _STATE + contents.rounds * _ROUND
    return DiskUse(
        stage=stage,
        policy=_policy_bytes(policy) + text,
        checkpoint=_with_headers(contents.learner, parts) + _with_headers(contents.beside, _IN_FILE) + text,
        checkpoints=min(contents.count, checkpoint.KEPT + 1),
        written=0 if state is None else checkpoint.size_on_disk(state),
    )


def most_at_once(uses: Iterable[DiskUse]) -> int:
    """Stages run one after another: policies stay, and the checkpoints of a stage go when it is done."""
    policies, most = 0, 0
    for use in uses:
        policies += use.policy
        most = max(most, policies + use.to_come)
    return most


def _policy_bytes(policy: Policy) -> int:
    exported = _trained_weights(policy) if policy.spec.get("lora") else []  # adapters are written for peft, too
    return _with_headers([*_sizes(policy.state_dict().values()), *exported], _IN_FILE)


def _with_headers(sizes: Sizes, each: int) -> int:
    return sum(sizes) + each * len(sizes)


def _sft(policy: Policy, params: config.Params) -> _Contents:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    learner = [_GENERATOR, *_trained_weights(policy), *_moments(trained)]
    count = _periods(params.sft.steps, params.machine.checkpoint_every.sft_steps)
    return _Contents(learner=learner, beside=[], count=count, rounds=0)


def _rloo(policy: Policy, params: config.Params) -> _Contents:
    rloo = params.rloo
    of_std = {id(parameter) for parameter in policy.std_parameters()}
    trained = [p for p in policy.parameters() if (rloo.learn_std if id(p) in of_std else p.requires_grad)]
    learner = [_GENERATOR, *_trained_weights(policy), *_moments(trained)]
    if rloo.advantage_estimator == "gae":
        with torch.device("meta"):
            critic = ValueNetwork(policy.critic_size, rloo.critic.hidden)
        learner += [*_sizes(critic.state_dict().values()), *_moments(critic.parameters())]
    acting_and_best = (rloo.sampling.staleness + 1) * _trained_weights(policy)
    count = _periods(rloo.iterations, params.machine.checkpoint_every.rloo_iterations)
    return _Contents(learner=learner, beside=acting_and_best, count=count, rounds=rloo.iterations)


def _rlpd(policy: Policy, params: config.Params) -> _Contents:
    if not isinstance(policy, HeadPolicy):  # the stage refuses it
        return _Contents(learner=[], beside=[], count=0, rounds=0)
    rlpd = params.rlpd
    with torch.device("meta"):
        critics = CriticEnsemble(policy.critic_size + policy.chunk * policy.action_dim, rlpd.critics)
    encoder = policy.encoder_parameters()
    shared = {id(parameter) for parameter in encoder}
    acting = [parameter for parameter in policy.parameters() if id(parameter) not in shared]
    trained_encoder = encoder if rlpd.actor.start == "scratch" else []
    by_critics = [*critics.parameters(), *trained_encoder]
    networks = [*_trained_weights(policy), *_sizes(critics.parameters()), *_moments([*acting, *by_critics])]
    averages = [*_sizes(by_critics), *_sizes(policy.parameters())]
    return _Contents(
        learner=[_GENERATOR, *_SCALARS * [_NUMBER], *networks, *averages],
        beside=(1 + rlpd.staleness) * _trained_weights(policy),  # the best one, and those that were ordered ahead
        count=checkpoint.KEPT + 1,
        rounds=_periods(rlpd.steps, rlpd.episodes_at_once),
    )


_BY_STAGE: Mapping[str, Callable[[Policy, config.Params], _Contents]] = {"sft": _sft, "rloo": _rloo, "rlpd": _rlpd}


def _trained_weights(policy: Policy) -> Sizes:
    return _sizes(tensor for name, tensor in policy.state_dict().items() if name not in policy.frozen)


def _moments(parameters: Iterable[nn.Parameter]) -> Sizes:
    """Adam's: two means of each parameter, and its number of steps."""
    return [size for parameter in _sizes(parameters) for size in (parameter, parameter, _NUMBER)]


def _sizes(tensors: Iterable[Tensor]) -> Sizes:
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def _periods(steps: int, every: int) -> int:
    """The last one may be shorter."""
    return -(-steps // every)
