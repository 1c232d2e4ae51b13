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
TRAINED, BASE = "trained.safetensors", "base.json"
"""In the place of all weights: those that training changed, and where the others are (on_base.py)."""
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
    """Write the policy's two files, and what other programs read of it, into a folder that is being written."""
    save_weights(policy, folder)
    save_spec(policy, folder)
    policy.export(folder)


def save_weights(policy: Policy, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(on_cpu(policy.state_dict()), folder / WEIGHTS)


def save_spec(policy: Policy, folder: Path) -> None:
    (folder / SPEC).write_text(json.dumps({**policy.spec, **_package(policy.spec["family"])}, indent=2) + "\n")


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors takes them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _package(family: str) -> dict[str, str]:
    from nightshift.policies import families

    release = families.release(family)
    return {PACKAGE: release} if release else {}


def load(folder: Path) -> Policy:
    """The policy in a folder; where that has an adapter alone, on the published checkpoint that it names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    spec = json.loads((folder / SPEC).read_text())
    has_base = (folder / BASE).exists()
    weights = folder / (TRAINED if has_base else WEIGHTS)
    try:
        return _on_base(folder, spec) if has_base else build(spec, load_file(weights))
    except SafetensorError:
        raise DataError(f"{weights} is damaged", f"take it and {SPEC} from the same run again") from None
    except RuntimeError:
        raise OtherVersion(  # no folder in `what`: it is kept as a reason, and a download is in another one every time
            f"{weights.name} has not the weights of the {spec['family']} policy that {SPEC} beside it describes, as "
            "this version of Nightshift builds it",
            f"take both files in {folder} from the same run, or use the version that saved them",
        ) from None


def _on_base(folder: Path, spec: Mapping[str, Any]) -> Policy:
    from nightshift.policies import on_base

    return on_base.load(folder, spec)
