"""The grid of `nightshift robustness`, as a digest. A stage may ask for it: it needs no simulator."""

from __future__ import annotations

from pathlib import Path

from nightshift import config, files
from nightshift.project.playing import played_with

UNPERTURBED = "none"
"""Stands for a perturbation where there is none; its strength is 0."""


def digest(root: Path, params: config.Params) -> str:
    """Of the grid that params.yaml asks for. Comparisons of two policies are the same if it is, given their weights."""
    settings = params.robustness
    sections = {"env": params.env.model_dump(mode="json"), "robustness": settings.model_dump(mode="json")}
    del sections["robustness"]["films"]
    words = files.identity_or_missing(root / settings.paraphrases) if settings.paraphrases else ""
    return files.json_sha256([params.seed, sections, words, played_with(root)])[:16]
