"""The section `policy` of the family `residual`. No torch here: `nightshift plan` reads it, too."""

from __future__ import annotations

from typing import Literal

from nightshift.config import Count, GaussianHead, PolicySettings


class ResidualSettings(PolicySettings):
    family: Literal["residual"]
    head: GaussianHead
    width: Count
    """Features of every block."""
    blocks: Count
