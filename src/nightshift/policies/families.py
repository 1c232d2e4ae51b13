"""The families of policies, by the name that params.yaml and policy.json give them."""

from __future__ import annotations

from collections.abc import Mapping

from nightshift.policies import cnn, gaussian_mlp, vla
from nightshift.policies.base import Policy
from nightshift.policies.openvla_oft import policy as openvla_oft

FAMILIES: Mapping[str, type[Policy]] = {
    gaussian_mlp.FAMILY: gaussian_mlp.GaussianMlp,
    cnn.FAMILY: cnn.Cnn,
    vla.FAMILY: vla.Vla,
    openvla_oft.FAMILY: openvla_oft.OpenVlaOft,
}
