"""Domain randomisation: training and validation are played under the perturbations of env.randomisation."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from nightshift import config, envs
from nightshift.envs.perturbations import paraphrases, registry
from nightshift.errors import ConfigError
from nightshift.types import RolloutRequest

_DOMAIN = 7
"""Separates the draw of a strength from those of the perturbation itself."""


def randomised(env: config.Env, request: RolloutRequest) -> RolloutRequest:
    """The request with its perturbations; as it is if it is of the evaluation, or says itself how it is perturbed.

    Validation plays such worlds too: a policy that learned to solve more of them may solve no more of the plain ones,
    and the clone would be handed on in its place.
    """
    if env.randomisation is None or request.split == "eval" or request.perturbations:
        return request
    drawn = (
        registry.spec(env, name, _strength(env.randomisation, name, request), request.task, None)
        for name in env.randomisation.perturbations
    )
    return replace(request, perturbations=tuple(drawn))


def check(env: config.Env) -> None:
    """ConfigError if the suite cannot do it, or a task has too few paraphrases."""
    if env.randomisation is not None:
        chosen = env.randomisation.perturbations
        highest = env.randomisation.strength
        for name in chosen:
            if registry.find(name).is_whole and highest < 1:
                raise ConfigError(
                    f"env.randomisation.strength is {highest:g}, and the strengths of {name} are whole numbers",
                    f"set it to 1 or more, or leave {name} out",
                )
            strength = float(int(highest)) if registry.find(name).is_whole else highest
            registry.check(env, [name], [strength], None)


def instructions(env: config.Env) -> list[str]:
    """What a policy may be told in training besides the instructions of its tasks."""
    if env.randomisation is None or "instruction" not in _kinds(env.randomisation):
        return []
    sentences = paraphrases.read(env.suite, None)
    return [told for task in envs.tasks(env) for told in sentences[task.name][: int(env.randomisation.strength)]]


def _kinds(settings: config.Randomisation) -> set[str]:
    return {registry.find(name).kind for name in settings.perturbations}


def _strength(settings: config.Randomisation, name: str, request: RolloutRequest) -> float:
    """Uniform between 0 and the highest; a whole number where the perturbation needs one."""
    words = zlib.crc32(name.encode()), zlib.crc32(request.task.encode())
    random = np.random.default_rng([_DOMAIN, *words, request.init_state, request.seed])
    if registry.find(name).is_whole:
        return float(random.integers(0, int(settings.strength), endpoint=True))
    return float(random.uniform(0.0, settings.strength))
