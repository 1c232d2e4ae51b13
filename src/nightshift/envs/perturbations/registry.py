"""Perturbations by name, and whether a suite can do what is asked, said before anything is played.

A new perturbation is a class (base.py) and one line in `BUILT_IN`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from functools import cache

from nightshift import config, envs
from nightshift.envs.perturbations import paraphrases
from nightshift.envs.perturbations.base import MAX_STRENGTH, EpisodeKey, Perturbation
from nightshift.errors import ConfigError
from nightshift.types import INSTRUCTION, PerturbationSpec, RolloutRequest

_HERE = "nightshift.envs.perturbations"
BUILT_IN = {
    "camera_viewpoints": "camera:CameraViewpoints",
    "field_of_view": "camera:FieldOfView",
    "light_conditions": "light:LightConditions",
    "background_textures": "textures:BackgroundTextures",
    "object_colors": "objects:ObjectColors",
    "object_sizes": "objects:ObjectSizes",
    "object_positions": "objects:ObjectPositions",
    "confounding_objects": "objects:ConfoundingObjects",
    "robot_initial_states": "robot:RobotInitialStates",
    "action_delay": "actions:ActionDelay",
    "action_noise": "actions:ActionNoise",
    "gripper_slips": "actions:GripperSlips",
    "sensor_noise": "sensors:SensorNoise",
    "language_instructions": "language:LanguageInstructions",
}
"""Where the class of each is; it is imported when it is asked for."""


def names() -> list[str]:
    return list(BUILT_IN)


@cache
def find(name: str) -> type[Perturbation]:
    if name not in BUILT_IN:
        raise ConfigError(
            f"there is no perturbation {name!r}; there are {', '.join(BUILT_IN)}", "nightshift robustness --list"
        )
    module, _, attribute = BUILT_IN[name].partition(":")
    found: type[Perturbation] = getattr(importlib.import_module(f"{_HERE}.{module}"), attribute)
    return found


def of_suite(suite: str) -> list[str]:
    """Those that the suite can do."""
    kinds = envs.suite(suite).perturbation_kinds
    return [name for name in BUILT_IN if find(name).kind in kinds]


def reaching(env: config.Env, observations: Collection[str]) -> list[str]:
    """Those that the suite can do and that change what a policy with these observations sees or does."""
    cameras = set(envs.selected(env).cameras) & set(observations)
    sensed = {
        "any": True,
        "images": bool(cameras),
        "agentview": "agentview" in cameras,
        "instruction": INSTRUCTION in observations,
    }
    return [name for name in of_suite(env.suite) if sensed[find(name).sense]]


def check(env: config.Env, chosen: Sequence[str], strengths: Sequence[float], file: str | None) -> None:
    """ConfigError if the suite cannot do one of `chosen`, a strength is out of range, it has none of them, or a task
    has no paraphrase for even the lowest."""
    for name in chosen:
        found = find(name)
        if name not in of_suite(env.suite):
            can = ", ".join(of_suite(env.suite)) or "none"
            raise ConfigError(f"{env.suite} cannot do {name}: it can do {can}", "choose among those")
        own = [strength for strength in strengths if has_strength(found, strength)]
        for strength in own or strengths:
            check_strength(found, strength)
        if found.kind == "instruction":
            paraphrases.check(paraphrases.read(env.suite, file), envs.tasks(env), int(min(own)))


def levels(env: config.Env, name: str, strengths: Sequence[float], file: str | None) -> list[float]:
    """Those of `strengths` that it has: some have whole numbers only, or as many as there are paraphrases.

    A file of paraphrases that cannot be used is an error, as is one that misses a task.
    """
    found = find(name)
    there = [strength for strength in strengths if has_strength(found, strength)]
    if found.kind != "instruction":
        return there
    if not file and not paraphrases.has(env.suite):
        return []
    sentences = paraphrases.read(env.suite, file)
    paraphrases.check(sentences, envs.tasks(env), 1)
    most = min(len(sentences[task.name]) for task in envs.tasks(env))
    return [strength for strength in there if strength <= most]


def has_strength(found: type[Perturbation], strength: float) -> bool:
    """Some have whole numbers only."""
    return not found.is_whole or strength == int(strength)


def check_strength(found: type[Perturbation], strength: float) -> None:
    if not 0 <= strength <= MAX_STRENGTH:
        raise ConfigError(
            f"{found.name} has the strength {strength:g}, which is out of range", f"choose 0 to {MAX_STRENGTH:g}"
        )
    if not has_strength(found, strength):
        raise ConfigError(
            f"{found.name} has the strength {strength:g}, but its strengths are whole numbers",
            f"choose among {', '.join(str(level) for level in range(1, int(MAX_STRENGTH) + 1))}, or leave it out",
        )


def spec(env: config.Env, name: str, strength: float, task: str, file: str | None) -> PerturbationSpec:
    """For a request: with the paraphrase, where it is one of the instruction."""
    if find(name).kind != "instruction" or not strength:
        return PerturbationSpec(name=name, strength=strength)
    told = paraphrases.read(env.suite, file)[task][int(strength) - 1]
    return PerturbationSpec(name=name, strength=strength, instruction=told)


def drawn(request: RolloutRequest) -> list[Perturbation]:
    """The perturbations of a request in their order; those of strength 0 change nothing and are left out."""
    key = EpisodeKey(request.task, request.init_state, request.seed)
    return [find(one.name)(one, key) for one in request.perturbations if one.strength]
