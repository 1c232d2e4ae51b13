"""What each rank of a learner holds of the networks it trains: the one place that differs between one process, data
parallel ranks (learners/data_parallel.py) and, for policies too large for one device, FSDP (learners/fsdp.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor, nn

from nightshift.policies.base import Policy

_Network = TypeVar("_Network", bound=nn.Module)
Trained = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]
"""By name: a network and the optimizer that trains it."""
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the tensor that a tensor of this name, shape and dtype is read into."""


class Strategy(ABC):
    """Every rank makes the same calls in the same order, also a rank that has nothing to add. Here every rank holds
    whole networks."""

    shards = False
    """Whether a rank holds a part of each weight only."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""

    def wrap(self, network: _Network) -> _Network:
        """The network as this rank holds it; called before its optimizer is made."""
        return network

    def passes(self, count: int) -> int:
        """How often this rank runs a network that it has `count` microbatches for; the passes beyond have no data."""
        return count

    def write(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """Replace weights; each value is as this rank holds the parameter."""
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks; a parameter without one has a gradient of zero."""
        self.sum(gradients(parameters))

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the summed gradients down to `max_norm`; their norm before that, over what all ranks hold."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def trained_weights(self, network: nn.Module) -> dict[str, Tensor]:
        """The whole weights that training changes, by name."""
        return _trained_weights(network)

    def state(self, trained: Trained) -> dict[str, Tensor]:
        """Weights that training changes and optimizer moments of whole networks: copies on the CPU, by flat names."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in held(trained).items()}

    def allocate(self, trained: Trained) -> Allocate:
        """For reading the parts of tensors that this rank holds: here whole tensors."""
        return allocate_whole

    def restore(self, tensors: Mapping[str, Tensor], trained: Trained) -> None:
        """Load what `state` returned; hyperparameters come from params.yaml, not from the checkpoint."""
        for name, (network, optimizer) in trained.items():
            _load(network, weights(tensors, name))
            moments: dict[int, dict[str, Tensor]] = {}
            for key, value in _under(tensors, f"{name}.optimizer.").items():
                index, _, moment = key.partition(".")
                moments.setdefault(int(index), {})[moment] = value
            optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


class SingleProcess(Strategy):
    """One process that holds everything: every sum is already complete."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""


def allocate_whole(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)


def held(trained: Trained) -> dict[str, Tensor]:
    """Weights that training changes and optimizer moments, as this rank holds them and not copied, by flat names."""
    tensors: dict[str, Tensor] = {}
    for name, (network, optimizer) in trained.items():
        tensors |= {f"{name}.weights.{key}": value for key, value in _trained_weights(network).items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.optimizer.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return tensors


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of each parameter; one that has none gets a gradient of zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def weights(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of one network in what `Strategy.state` returned."""
    return _under(tensors, f"{name}.weights.")


def _frozen(network: nn.Module) -> Set[str]:
    return network.frozen if isinstance(network, Policy) else frozenset()


def _trained_weights(network: nn.Module) -> dict[str, Tensor]:
    frozen = _frozen(network)
    return {name: tensor for name, tensor in network.state_dict().items() if name not in frozen}


def _load(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """All weights but the frozen ones."""
    frozen = _frozen(network)
    kept = {name: tensor for name, tensor in network.state_dict().items() if name in frozen}
    network.load_state_dict({**kept, **tensors})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
