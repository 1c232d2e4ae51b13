"""Policies on disk and in memory. A new family is one new module, its section in config, and one line in families.py.

torch is imported by what needs it, and no earlier: the processes of the scripted expert do without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift.errors import DataError, OtherVersion

if TYPE_CHECKING:
    from torch import Tensor

    from nightshift import config
    from nightshift.policies.base import Policy, Shapes

WEIGHTS = "policy.safetensors"
SPEC = "policy.json"
PACKAGE = "package"
"""In that file: the package and version that add the family; not there for one of ours."""


def fresh(settings: config.Policy, shapes: Shapes, action_dim: int) -> Policy:
    """An untrained policy of the family that params.yaml names, for observations of these shapes."""
    from nightshift.policies import families

    return families.find(settings.family).from_config(settings, shapes, action_dim)


def build(spec: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> Policy:
    """A policy of the family and sizes that `spec` names: with these weights, or untrained."""
    from nightshift.policies import families

    arguments = dict(spec)
    family, release = arguments.pop("family"), arguments.pop(PACKAGE, "")
    chosen = families.find(family, release)
    try:
        return chosen(**arguments) if weights is None else chosen.with_weights(weights, **arguments)
    except (TypeError, KeyError) as error:
        lacks = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise OtherVersion(
            f"the description of this policy is none of the family {family} in this version of Nightshift: {lacks}",
            "train it again, or use the version that saved it",
        ) from None


def save(policy: Policy, folder: Path) -> None:
    """Write the policy's two files into a folder that is being written."""
    from safetensors.torch import save as to_bytes

    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    (folder / WEIGHTS).write_bytes(to_bytes(weights))
    (folder / SPEC).write_text(json.dumps({**policy.spec, **_package(policy.spec["family"])}, indent=2) + "\n")
    policy.export(folder)


def _package(family: str) -> dict[str, str]:
    from nightshift.policies import families

    release = families.release(family)
    return {PACKAGE: release} if release else {}


def load(folder: Path) -> Policy:
    """The policy in a folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    spec = json.loads((folder / SPEC).read_text())
    try:
        return build(spec, from_bytes((folder / WEIGHTS).read_bytes()))
    except (RuntimeError, SafetensorError):
        raise DataError(
            f"{folder / WEIGHTS} is damaged, or has not the weights of the {spec['family']} policy that {SPEC} beside "
            "it describes",
            "take both files from the same run",
        ) from None
