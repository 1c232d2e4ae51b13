"""What decides how episodes are played, as digests in the names of their journals. A stage may ask for them: they need
no simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nightshift import config, files
from nightshift.project import graph, packages, paths

_STAGE = "evaluate"
"""The stage that plays episodes with finished policies: what is code in its key decides them."""


def played_with(root: Path) -> dict[str, Any]:
    """The code and the versions of packages that decide how an episode is played, as in the key of the evaluation."""
    stages = graph.load(root)
    code = graph.code(stages) & set(stages[_STAGE].deps)
    return {
        "code": {path.as_posix(): files.identity_or_missing(root / path) for path in code},
        "versions": dict(packages.installed(root, {_STAGE: stages[_STAGE]})),
    }


def evaluation(root: Path, env: config.Env, evaluate: config.Evaluate) -> str:
    """Digest of all that is in the key of the evaluation besides the policies, and decides episodes."""
    settings = evaluate.model_dump(mode="json", exclude={"films"})
    return files.json_sha256([env.model_dump(mode="json"), settings, played_with(root)])


def journal(digest: str, policy: Mapping[str, str]) -> Path:
    """Where the episodes of one policy in evaluations of this digest are; the policy by the sha256 of its files."""
    return paths.played(files.json_sha256([digest, dict(policy)]))
