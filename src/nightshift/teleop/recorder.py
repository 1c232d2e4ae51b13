"""An episode in the making: its steps in memory, and a journal on disk by which a crash is known afterwards."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nightshift import files
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.types import INSTRUCTION, Array, Observation, Provenance

SIMULATOR, SERVER, PERSON = "simulator", "server", "person"
"""Who says how an episode ended."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One control step: what was executed, and what the policy would have done."""

    executed: Array  # [A]
    policy_action: Array  # [A]
    by_person: bool
    """A person overrode the policy; without a policy there is nothing to override."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an episode ended, and who says so."""

    success: bool
    judge: str
    unstable: bool = False


@dataclass(kw_only=True)
class Recorder:
    """N observations and N - 1 decisions so far."""

    number: int
    """That the episode gets in its source."""
    task: str
    init_state: int
    who: str
    journal: Path
    policy_version: int = NO_POLICY
    observations: list[Observation] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def begin(self, observation: Observation) -> None:
        """Before the first step. From here on the journal says that there is an episode to lose."""
        self.observations = [_kept(observation)]
        self.journal.unlink(missing_ok=True)
        header = {"number": self.number, "task": self.task, "init_state": self.init_state, "who": self.who}
        files.append_json(self.journal, header)

    def add(self, decision: Decision, after: Observation) -> None:
        self.decisions.append(decision)
        self.observations.append(_kept(after))
        files.append_json(self.journal, decision.executed.tolist())

    def retake(self, observation: Observation) -> None:
        """What there is to see before the next step, if something has moved since the last one."""
        self.observations[-1] = _kept(observation)

    @property
    def steps(self) -> int:
        return len(self.decisions)

    @property
    def actions(self) -> Array:
        """[T, A] as executed."""
        return np.stack([decision.executed for decision in self.decisions])

    @property
    def interventions(self) -> int:
        return sum(decision.by_person for decision in self.decisions)

    def forget(self) -> None:
        """The episode is on disk, or its pilot threw it away: there is nothing left to lose."""
        self.journal.unlink(missing_ok=True)

    def episode(
        self, ending: Ending, provenance: Provenance, images: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> Episode:
        """`images`: each [N, H, W, 3]. Success and unstable physics are terminal; only success is rewarded."""
        terminated = ending.success or ending.unstable
        steps = self.steps + 1
        rewards = np.zeros(steps, np.float32)
        rewards[steps - 2] = ending.success
        names = self.observations[0]
        return Episode(
            observations={**{name: np.stack([seen[name] for seen in self.observations]) for name in names}, **images},
            actions=with_last(self.actions),
            rewards=rewards,
            discounts=np.ones(steps, np.float32),
            interventions=np.array([*(decision.by_person for decision in self.decisions), False]),
            policy_actions=with_last(np.stack([decision.policy_action for decision in self.decisions])),
            policy_versions=np.full(steps, self.policy_version, np.int64),
            terminated=terminated,
            truncated=not terminated,
            success=ending.success,
            provenance=provenance,
            metadata=metadata,
        )


def unsaved_episode(journal: Path, saved: Container[int]) -> str:
    """Which episode a session ended in the middle of, in words; empty if in none, or if its number is among those that
    are saved: a kill may leave the journal of an episode that is on disk."""
    if not journal.exists():
        return ""
    try:
        first, *steps = journal.read_text().splitlines()
        header = json.loads(first)
        if header.get("number") in saved:
            return ""
        return f"of {header['task']} from init state {header['init_state']} by {header['who']}, {len(steps)} steps"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "whose journal cannot be read"


def _kept(observation: Observation) -> Observation:
    """Copies of the vectors: simulators overwrite theirs."""
    return {name: np.array(values) for name, values in observation.items() if name != INSTRUCTION}
