"""Training that starts from the champion of a real SQLite registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift import config, files, policies
from nightshift.errors import ConfigError, RegistryError
from nightshift.pipeline.job import Job
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.project import paths
from nightshift.stages import sft, start
from tests.stages.test_opponent import grid_of, register_champion


def test_training_starts_from_the_champion_if_it_is_told_to(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    with pytest.raises(RegistryError, match=r"start in params.yaml is champion, and nightshift-libero-mini has none"):
        start.run(job("start"), start="champion", register_model=params.section("register.model"))
    weights = register_champion(registry, params.section("register").model, grid_of(params))
    start.run(job("start"), start="champion", register_model=params.section("register.model"))
    assert files.sha256(paths.START / policies.WEIGHTS) == weights
    fresh = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[16], chunk=1, action_dim=7)
    started = sft._start(fresh).state_dict()
    registered = policies.load(registry / "registered").state_dict()
    assert all(bool((started[name] == registered[name]).all()) for name in registered)
    other = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7)
    with pytest.raises(ConfigError, match="another network than policy there describes"):
        sft._start(other)
