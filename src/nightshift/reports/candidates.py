"""The candidates of an evaluation: the policy folders that the stage `evaluate` names as inputs in dvc.yaml."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift import files, policies
from nightshift.config import CHAMPION_LEFT_OUT
from nightshift.errors import DataError
from nightshift.project import graph, paths
from nightshift.reports import history
from nightshift.reports.history import History


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trained policy.

    Example: Candidate(name="rloo", label="GRPO", folder=Path("models/rloo"), policy={"policy.json": "…"}, history=…)
    """

    name: str
    label: str
    """The algorithm, for tables and figures."""
    folder: Path
    policy: Mapping[str, str]
    """sha256 of the files in the folder, without the history of training."""
    history: History | None


def candidates(root: Path) -> list[Candidate]:
    """In the order of dvc.yaml, simplest first: the first is what gains are measured from, and wins ties.

    One more training stage is one more input of `evaluate` and `register` there, and nothing else. One that was skipped
    has no policy.
    """
    folders = [root / path for path in graph.load(root)["evaluate"].deps if path.parent == paths.MODELS]
    return [_candidate(folder) for folder in folders if not (folder / paths.SKIPPED).exists()]


def _candidate(folder: Path) -> Candidate:
    policy = policy_files(folder, f"rm -r {folder} and run again")
    found = history.read(folder)
    algorithm = (found.algorithm if found else "") or folder.name
    label = algorithm.upper().replace("_", " ")
    return Candidate(name=folder.name, label=label, folder=folder, policy=policy, history=found)


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """The champion, as the stage `opponent` took it from the registry."""

    version: str
    folder: Path
    policy: Mapping[str, str]
    """As of `Candidate`."""

    @property
    def weights(self) -> str:
        """Their sha256."""
        return self.policy[policies.WEIGHTS]


def first_with_same_policy(players: Mapping[str, Candidate | Opponent]) -> dict[str, str]:
    """By the name of each: where training kept the policy that it began with, that is the clone."""
    return {
        name: next(first for first, other in players.items() if other.policy == player.policy)
        for name, player in players.items()
    }


def read_opponent(root: Path) -> Opponent | None:
    """The champion that has to play this grid; None if there is none, or if it has played it."""
    folder = root / paths.OPPONENT
    if not (folder / paths.CHAMPION_VERSION).exists():
        return None
    policy = policy_files(folder, "nightshift stage opponent")
    version = json.loads((folder / paths.CHAMPION_VERSION).read_text())["version"]
    return Opponent(version=version, folder=folder, policy=policy)


def policy_files(folder: Path, remedy: str, only: Collection[str] | None = None) -> dict[str, str]:
    """sha256 of a policy's files, without what training or the registry left beside them; `only` these are checked."""
    sums = files.verify_folder(folder, remedy, only)
    return {name: sum_ for name, sum_ in sums.items() if name not in (paths.HISTORY, paths.CHAMPION_VERSION)}


def policies_here(root: Path) -> Iterator[dict[str, str]]:
    """The files of every policy that an evaluation would play now, as the manifests say: no weights are read."""
    stages = graph.load(root)
    for folder in set(stages["evaluate"].deps) - graph.code(stages):
        with contextlib.suppress(DataError):
            yield policy_files(root / folder, "", only=())


def left_out(root: Path) -> dict[str, str] | None:
    """The `version` of the champion, and `why` it cannot play this grid; None if it can, has played it, or there is
    none."""
    path = root / paths.OPPONENT / paths.SKIPPED
    found: dict[str, str] | None = json.loads(path.read_text()).get(CHAMPION_LEFT_OUT) if path.exists() else None
    return found
