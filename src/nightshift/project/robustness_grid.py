"""What `nightshift robustness` plays with, as digests. A stage may ask for them: they need no simulator."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nightshift import config, files
from nightshift.project import graph, packages

UNPERTURBED = "none"
"""Stands for a perturbation where there is none; its strength is 0."""
_STAGE = "evaluate"
"""The stage that plays episodes with a policy as the command does: what is code in its key decides them."""


def played_with(root: Path) -> dict[str, Any]:
    """The code and the versions of packages that decide how an episode is played, as in the key of the evaluation."""
    stages = graph.load(root)
    code = graph.code(stages) & set(stages[_STAGE].deps)
    return {
        "code": {path.as_posix(): _identity(root / path) for path in code},
        "versions": dict(packages.installed(root, {_STAGE: stages[_STAGE]})),
    }


def digest(root: Path, params: config.Params) -> str:
    """Of the grid that params.yaml asks for. Comparisons of two policies are the same if it is, given their weights."""
    settings = params.robustness
    sections = {"env": params.env.model_dump(mode="json"), "robustness": settings.model_dump(mode="json")}
    del sections["robustness"]["films"]
    words = _identity(root / settings.paraphrases) if settings.paraphrases else ""
    return sha256([params.seed, sections, words, played_with(root)])[:16]


def sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _identity(path: Path) -> str:
    return files.identity(path) if path.exists() else "missing"
