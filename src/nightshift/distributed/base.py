"""The seam between a stage and the processes that simulate for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.types import RolloutRequest, Trajectory


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """A policy as it travels: the JSON that builds it and its weights."""

    spec: Mapping[str, Any]
    weights: Mapping[str, NDArray[np.float32]]


class Pool(Protocol):
    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        """Play every request; yields (position in `requests`, its episodes) as they come in, in any order."""
        ...

    def close(self) -> None: ...
