"""FSDP2: each rank holds a part of every weight of a policy, of its gradient and of its optimizer moments.

    rank 0  ▓░░   ──▶ gather a block ▓▓▓ ──▶ forward ──▶ drop ──▶ … ──▶ gather it again ──▶ backward ──▶ sum, keep ▓░░
    rank 1  ░▓░                                                                                                  ░▓░
    rank 2  ░░▓                                                                                                  ░░▓

Every pass waits for all ranks, so all of them make the same number of passes (`Strategy.passes`). Critics are small,
and whole on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from nightshift.algorithms import strategy
from nightshift.algorithms.strategy import Allocate, Trained, allocate_whole
from nightshift.learners.data_parallel import DataParallel
from nightshift.policies.base import Policy

_Network = TypeVar("_Network", bound=nn.Module)

_FORWARD_METHODS = ("evaluate_actions", "log_prob", "bc_loss", "critic_features")
"""What a learner calls of a policy; they use weights of its root before and after `forward`."""
_EPS = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


class FullySharded(DataParallel):
    """Shards policies. On a GPU their blocks are gathered and computed in bfloat16, as autocast computes them; the
    sharded weights that the optimizer changes stay float32."""

    shards = True

    def __init__(self, address: str, rank: int, size: int, device: torch.device, *, cpu_offload: bool) -> None:
        super().__init__(address, rank, size, device)
        on_gpu = device.type == "cuda"
        self._mesh = init_device_mesh(device.type, (size,))
        self._device = device
        self._offload = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
        self._precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        self._policies: list[FSDPModule] = []
        # A block may return a view: no caller changes it in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)

    def wrap(self, network: _Network) -> _Network:
        if not isinstance(network, Policy):
            return network
        whole = {parameter for parameter in network.parameters() if not parameter.dim()}  # has no axis to be cut along
        for parameter in whole:
            parameter.data = parameter.data.to(self._device)
        for block in network.transformer_blocks:
            self._shard(block, whole, self._precision)
        # Heads compute in float32, and their weights are used after `forward` too: the root stays gathered until then.
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        root = self._shard(network, whole, precision, reshard_after_forward=False)
        for method in _FORWARD_METHODS:
            register_fsdp_forward_method(network, method)
        self._policies.append(root)
        return network

    def passes(self, count: int) -> int:
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = count
        self.sum([counts])
        return int(counts.max())

    def write(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        super().write(parameters, values)
        self._drop_gathered()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """FSDP has summed those of parameters that it shards, in the backward pass."""
        self.sum([gradient for gradient in strategy.gradients(parameters) if not isinstance(gradient, DTensor)])
        self._drop_gathered()

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        gradients = strategy.gradients(parameters)
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norm = math.hypot(*(float(_gathered(get_total_norm(part))) for part in (sharded, whole) if part))
        scale = min(max_norm / (norm + _EPS), 1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    def trained_weights(self, network: nn.Module) -> dict[str, Tensor]:
        """Gathered one by one, on the CPU of rank 0; the other ranks keep none."""
        found = {}
        for name, tensor in super().trained_weights(network).items():
            gathered = _gathered(tensor.detach())
            if self.rank == 0:
                found[name] = gathered.cpu()
        return found

    def state(self, trained: Trained) -> dict[str, Tensor]:
        """What this rank holds, as DTensors and not copied: for `shards.write`."""
        return strategy.held(trained)

    def allocate(self, trained: Trained) -> Allocate:
        parameters = _Parameters(trained)

        def allocate(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
            like = parameters.sharded(name, size)
            return allocate_whole(name, size, dtype) if like is None else torch.empty_like(like, dtype=dtype)

        return allocate

    def restore(self, tensors: Mapping[str, Tensor], trained: Trained) -> None:
        """From whole tensors, or from those that `allocate` made."""
        parameters = _Parameters(trained)
        own = {name: self._part(tensor, parameters.sharded(name, tensor.shape)) for name, tensor in tensors.items()}
        super().restore(own, trained)
        self._drop_gathered()

    def _shard(
        self,
        module: nn.Module,
        ignored: set[nn.Parameter],
        precision: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool = True,
    ) -> FSDPModule:
        sharded = fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=self._offload,
            ignored_params=ignored,
        )
        sharded.set_gradient_divide_factor(1.0)  # a sum over ranks, not their mean
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    def _drop_gathered(self) -> None:
        """After a change of weights: the root may still be gathered."""
        for policy in self._policies:
            policy.reshard()

    def _part(self, tensor: Tensor, like: DTensor | None) -> Tensor:
        """What this rank holds of a tensor."""
        if like is None or isinstance(tensor, DTensor):
            return tensor
        return distribute_tensor(tensor, self._mesh, like.placements, src_data_rank=None)


class _Parameters:
    """The weight, or the parameter of the moment, that a name of `strategy.held` stands for."""

    def __init__(self, trained: Trained) -> None:
        self._found: dict[str, Tensor] = {}
        for name, (network, optimizer) in trained.items():
            self._found |= {f"{name}.weights.{key}": value for key, value in network.state_dict().items()}
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._found |= {f"{name}.optimizer.{index}": parameter for index, parameter in enumerate(parameters)}

    def sharded(self, name: str, size: torch.Size) -> DTensor | None:
        """None where every rank holds all of it, as of the number of steps."""
        found = self._found.get(name, self._found.get(name.rpartition(".")[0]))
        return found if isinstance(found, DTensor) and found.shape == size else None


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
