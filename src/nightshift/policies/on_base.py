"""A policy without the published weights that training left as they were: a reference to them is kept instead.

trained.safetensors   all that training changes: adapters, modules that are trained whole, statistics
adapter/              the adapter again, as peft reads it
policy.json           as of every policy
base.json             where the published checkpoint is, and the sha256 of the weights that are read from it
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nightshift import policies
from nightshift.errors import DataError
from nightshift.policies import families
from nightshift.policies.base import Policy
from nightshift.policies.published import BaseSpec, PublishedPolicy


def save(policy: Policy, folder: Path) -> None:
    """Into a folder that is being written; DataError if the policy did not begin with a published checkpoint."""
    base = policy.base if isinstance(policy, PublishedPolicy) else None
    if base is None:
        raise DataError(
            "the policy does not say which published checkpoint it began with: it cannot be registered as an adapter",
            "set register.weights: whole in params.yaml, or train it again from policy.checkpoint",
        )
    weights = policy.state_dict()
    save_file(policies.on_cpu({n: t for n, t in weights.items() if n not in policy.frozen}), folder / policies.TRAINED)
    policies.save_spec(policy, folder)
    policy.export(folder)
    reference = {
        "path": os.path.abspath(base["path"]),
        "adapter": base["adapter"] and os.path.abspath(base["adapter"]),
        "sha256": _sha256({name: weights[name] for name in policy.frozen}),
    }
    (folder / policies.BASE).write_text(json.dumps(reference, indent=2) + "\n")


def load(folder: Path, spec: Mapping[str, Any]) -> Policy:
    """DataError if the base is not there, or is another one."""
    reference = json.loads((folder / policies.BASE).read_text())
    base = _read_base(BaseSpec(path=reference["path"], adapter=reference["adapter"]), spec)
    policy = policies.build(spec, {**base, **load_file(folder / policies.TRAINED)})
    weights = policy.state_dict()
    if _sha256({name: weights[name] for name in policy.frozen}) != reference["sha256"]:
        raise DataError(
            f"the weights in {reference['path']} are not those that the adapter was trained on: their sha256 is not "
            f"the one in its {policies.BASE}",
            f"put the checkpoint that it was trained on back to {reference['path']}",
        )
    return policy


def _read_base(base: BaseSpec, spec: Mapping[str, Any]) -> dict[str, Tensor]:
    family = families.find(spec["family"])
    assert issubclass(family, PublishedPolicy)
    try:
        network = family.read_network(base, spec["network"])
    except DataError as error:
        raise DataError(
            f"the policy is an adapter on the published checkpoint {base['path']}: {error.what}",
            f"put the checkpoint back to {base['path']}, or a link to it",
        ) from None
    return {f"network.{name}": tensor for name, tensor in network.state_dict().items()}


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and values, in whatever files they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
