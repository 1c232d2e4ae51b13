"""An episode with the step semantics of RLDS, and its safetensors file.

Step t has an observation, the action taken after it, and the reward and discount of that action. The last step has the
final observation; its action, reward and discount are undefined. So N steps are N - 1 transitions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data import tensors
from nightshift.data.tensors import Column, Content
from nightshift.errors import DataError
from nightshift.types import Provenance, Trajectory

OBSERVATIONS = "observations."
EXTRAS = "extras."
_VECTORS = 2
"""Axes of a column of vectors; images have more."""
NO_POLICY = -1
"""The policy version of steps without a learned policy, such as demos."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """N steps of one attempt at a task, and how it ended."""

    observations: Mapping[str, Column]  # each [N, …]
    actions: Column  # [N, A] executed actions
    rewards: Column  # [N]
    discounts: Column  # [N]
    interventions: NDArray[np.bool_]  # [N] a person overrode the policy
    policy_actions: Column  # [N, A] actions chosen by the policy or the expert
    policy_versions: NDArray[np.int64]  # [N] NO_POLICY where no learned policy acted
    terminated: bool  # the task ended: do not bootstrap after the last step
    truncated: bool  # a time limit or a person ended it: bootstrap after the last step
    success: bool
    provenance: Provenance
    extras: Mapping[str, Column] = field(default_factory=dict)  # each [N, …]: other data of steps
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON: other data of the episode

    @property
    def length(self) -> int:
        """The number of steps, including the last."""
        return len(self.actions)

    @property
    def is_first(self) -> NDArray[np.bool_]:
        return np.equal(np.arange(self.length), 0)

    @property
    def is_last(self) -> NDArray[np.bool_]:
        return np.equal(np.arange(self.length), self.length - 1)

    @property
    def is_terminal(self) -> NDArray[np.bool_]:
        return self.is_last & self.terminated

    @property
    def masks(self) -> NDArray[np.float32]:
        """[N - 1] masks of the transitions: 0 exactly where the next step is terminal."""
        return 1 - self.is_terminal[1:].astype(np.float32)

    @property
    def label(self) -> str:
        """Identifies the episode in messages."""
        origin = self.provenance
        start = origin.origin if origin.init_state is None else f"init state {origin.init_state}"
        return f"{origin.task}, {start}"


def from_trajectory(trajectory: Trajectory, provenance: Provenance, policy_version: int = NO_POLICY) -> Episode:
    """The episode of a simulator: success and unstable physics are terminal, and only success is rewarded."""
    terminated = trajectory.success or trajectory.unstable
    steps = trajectory.length + 1
    rewards = np.zeros(steps, np.float32)
    rewards[steps - 2] = trajectory.success
    return Episode(
        observations={name: with_last(seen, trajectory.final[name]) for name, seen in trajectory.observations.items()},
        actions=with_last(trajectory.executed),
        rewards=rewards,
        discounts=np.ones(steps, np.float32),
        interventions=np.zeros(steps, np.bool_),
        policy_actions=with_last(trajectory.actions),
        policy_versions=np.full(steps, policy_version, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=trajectory.success,
        provenance=provenance,
    )


def digest(episode: Episode) -> str:
    """Of everything that was measured and done but images, which take long to read: the same episode has the same."""
    content = hashlib.sha256(episode.provenance.task.encode())
    for name, column in sorted(columns(episode).items()):
        if column.ndim <= _VECTORS:
            content.update(f"{name} {column.dtype} {column.shape} ".encode())
            content.update(np.ascontiguousarray(column).tobytes())
    return content.hexdigest()


def columns(episode: Episode) -> dict[str, Column]:
    """All arrays of an episode by name, each [N, …]."""
    return {
        **{f"{OBSERVATIONS}{name}": column for name, column in episode.observations.items()},
        **{f"{EXTRAS}{name}": column for name, column in episode.extras.items()},
        "actions": episode.actions,
        "rewards": episode.rewards,
        "discounts": episode.discounts,
        "interventions": episode.interventions,
        "policy_actions": episode.policy_actions,
        "policy_versions": episode.policy_versions,
    }


def header(episode: Episode) -> dict[str, Any]:
    """Everything in an episode that is not an array, as JSON."""
    return {
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "success": episode.success,
        "metadata": dict(episode.metadata),
        "provenance": asdict(episode.provenance),
    }


def assemble(arrays: Mapping[str, Column], header: Mapping[str, Any]) -> Episode:
    """The inverse of `columns` and `header`; KeyError or TypeError if they do not form an episode."""
    plain = {name: a for name, a in arrays.items() if not name.startswith((OBSERVATIONS, EXTRAS))}
    return Episode(
        observations={k.removeprefix(OBSERVATIONS): a for k, a in arrays.items() if k.startswith(OBSERVATIONS)},
        extras={k.removeprefix(EXTRAS): a for k, a in arrays.items() if k.startswith(EXTRAS)},
        terminated=header["terminated"],
        truncated=header["truncated"],
        success=header["success"],
        metadata=header["metadata"],
        provenance=Provenance(**header["provenance"]),
        **plain,
    )


def save(episode: Episode, path: Path) -> None:
    tensors.write(path, columns(episode), json.dumps(header(episode)))


def load(path: Path, verify: Callable[[Content], None] | None = None) -> Episode:
    """Load an episode; its arrays are memory-mapped views of the file, all of which `verify` may read first."""
    try:
        return _decode(*tensors.read(path, verify))
    except _DECODING_ERRORS as error:
        raise DataError(f"{path} is not an episode: {error}") from None


def to_bytes(episode: Episode) -> bytes:
    return tensors.to_bytes(columns(episode), json.dumps(header(episode)))


def from_bytes(content: bytes | bytearray | memoryview) -> Episode:
    try:
        return _decode(*tensors.from_bytes(content))
    except _DECODING_ERRORS as error:
        raise DataError(f"these {len(content)} bytes are not an episode: {error}") from None


_DECODING_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


def _decode(arrays: Mapping[str, Column], note: str) -> Episode:
    return assemble(arrays, json.loads(note))


def with_last(column: Column, last: Column | None = None) -> Column:
    """Append the last step: the final observation, or zeros for fields that are undefined there."""
    return np.concatenate([column, np.zeros_like(column[:1]) if last is None else last[None]])
