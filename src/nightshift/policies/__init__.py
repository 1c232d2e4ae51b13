"""Policies on disk and in memory. A new family is one new module and one line in `FAMILIES`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from nightshift.policies import gaussian_mlp
from nightshift.policies.base import Policy

FAMILIES: Mapping[str, Callable[..., Policy]] = {gaussian_mlp.FAMILY: gaussian_mlp.GaussianMlp}

WEIGHTS = "policy.safetensors"
SPEC = "policy.json"


def build(spec: Mapping[str, Any]) -> Policy:
    """A fresh policy of the family and sizes that `spec` names."""
    arguments = dict(spec)
    family = arguments.pop("family")
    if family not in FAMILIES:
        raise ValueError(f"unknown policy family {family!r}; there are {', '.join(FAMILIES)}")
    return FAMILIES[family](**arguments)


def save(policy: Policy, folder: Path) -> None:
    """Write the policy's two files into a folder that is being written."""
    weights = {name: tensor.detach().contiguous() for name, tensor in policy.state_dict().items()}
    (folder / WEIGHTS).write_bytes(to_bytes(weights))
    (folder / SPEC).write_text(json.dumps(policy.spec, indent=2) + "\n")


def load(folder: Path, **changes: Any) -> Policy:
    """The policy in a folder; `changes` replace entries of its spec, e.g. std=0.1."""
    policy = build({**json.loads((folder / SPEC).read_text()), **changes})
    policy.load_state_dict(from_bytes((folder / WEIGHTS).read_bytes()))
    return policy
