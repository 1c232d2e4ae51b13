"""The families of policies, by the name that params.yaml and policy.json give them.

Another package adds one with the entry points `nightshift.policies` and `nightshift.policy_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint

from nightshift import plugins
from nightshift.errors import DataError, PluginError
from nightshift.policies import cnn, flow, gaussian_mlp, vla
from nightshift.policies.base import Policy
from nightshift.policies.openvla_oft import policy as openvla_oft
from nightshift.policies.pi0 import policy as pi0

FAMILIES: Mapping[str, type[Policy]] = {
    gaussian_mlp.FAMILY: gaussian_mlp.GaussianMlp,
    cnn.FAMILY: cnn.Cnn,
    vla.FAMILY: vla.Vla,
    flow.FAMILY: flow.Flow,
    openvla_oft.FAMILY: openvla_oft.OpenVlaOft,
    pi0.FAMILY: pi0.Pi0,
}


def find(family: str, release: str = "") -> type[Policy]:
    """The class of a family; `release` is the package that a saved policy names as its own."""
    others = plugins.find(plugins.POLICIES, FAMILIES)
    if family in FAMILIES:
        return FAMILIES[family]
    if family in others:
        return _load(others[family])
    if release:
        name, _, version = release.partition(" ")
        raise PluginError(
            f"a policy of the family {family} needs the package {release}, which is not installed here",
            f"pip install {name}=={version}",
        )
    raise DataError(f"unknown policy family {family!r}; there are {', '.join([*FAMILIES, *others])}")


def release(family: str) -> str:
    """The package and version that add a family; empty for one of ours."""
    entry = plug_in(family)
    return plugins.release(entry) if entry else ""


def plug_in(family: str) -> EntryPoint | None:
    """The entry point of a family of another package; None for one of ours."""
    return plugins.find(plugins.POLICIES, FAMILIES).get(family)


def _load(entry: EntryPoint) -> type[Policy]:
    found = plugins.load(entry)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise plugins.unfit(entry, "a subclass of nightshift.policies.base.Policy")
    return found
