"""Whether params.yaml and this machine fit the stages that will run, before the first of them works for hours.

Each stage refuses what it cannot use, but a policy is built only after the demos are collected. A stage is asked for
what it uses and no more: cloning draws no image, and registering needs no GPU. All problems are found at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nightshift import config, envs, policies
from nightshift.cluster.program import ADDRESS_VARIABLE
from nightshift.data import sources
from nightshift.envs.perturbations import randomisation
from nightshift.envs.splits import evaluation_states, planned_training_states
from nightshift.errors import ConfigError, DataError, DeviceError, NightshiftError, Problems, ProjectError
from nightshift.interventions.opening import check_page, check_person
from nightshift.learners.algorithms import check_batch_size
from nightshift.policies import device
from nightshift.policies.base import Policy
from nightshift.policies.blocks import require_blocks
from nightshift.policies.start import check_same_network, no_champion
from nightshift.project import packages, paths
from nightshift.project.graph import Definition
from nightshift.rewards.reward import check_reward
from nightshift.rollouts.validation import check_validation_states
from nightshift.stream import listening
from nightshift.types import INSTRUCTION

Check = Callable[[config.Params], None]

_GB = 1e9
_COPIES_OF_TRAINED = 3
"""Of weights that are trained: gradients and two moments of the optimizer."""


def check(params: config.Params, stages: Iterable[Definition]) -> None:
    """NightshiftError: a single problem as it is, several as Problems."""
    if found := problems(params, stages):
        raise Problems.of(found)


def problems(params: config.Params, stages: Iterable[Definition]) -> list[NightshiftError]:
    """All that stands in the way of these stages, each once."""
    found: dict[str, NightshiftError] = {}
    for each in _checks(list(stages)):
        try:
            each(params)
        except NightshiftError as error:
            found.setdefault(error.what, error)
    return list(found.values())


def check_policy(params: config.Params) -> None:
    """Build the policy without memory for its weights, and give it inputs as the environment would."""
    policy = _weightless(params)
    if params.machine.gradient_checkpointing:
        require_blocks(policy, "machine.gradient_checkpointing")
    if params.machine.compile:
        require_blocks(policy, "machine.compile")
    randomisation.check(params.env)
    told = [task.language for task in envs.tasks(params.env)]
    check_inputs(policy, params.env, told + randomisation.instructions(params.env))


def check_inputs(policy: Policy, env: config.Env, instructions: Sequence[str]) -> None:
    """ConfigError if the policy cannot read what the environment shows it, with these instructions."""
    space = envs.observation_space(env)
    seen = {name: np.zeros((len(instructions), *space[name].shape), space[name].dtype) for name in policy.observations}
    policy.inputs(seen | ({INSTRUCTION: np.array(instructions)} if INSTRUCTION in seen else {}))


def check_disk(params: config.Params) -> None:
    free = shutil.disk_usage(Path.cwd()).free / _GB
    if free < params.machine.free_disk_gb:
        raise ProjectError(
            f"the disk of {Path.cwd()} has {free:.1f} GB left, and machine.free_disk_gb asks for "
            f"{params.machine.free_disk_gb:g}",
            "nightshift gc frees some, and dvc gc --workspace old results; or lower machine.free_disk_gb",
        )


def _checks(stages: list[Definition]) -> Iterator[Check]:
    yield check_disk
    if any(map(_comes_before_policies, stages)):
        yield check_policy
    if any(map(_simulates, stages)):
        yield lambda params: envs.check_cameras(params.env)
        yield lambda params: envs.selected(params.env).check_run(params)
        yield lambda params: randomisation.check(params.env)
    if any(_makes_policies(stage) or _plays(stage) for stage in stages):
        yield lambda params: _check_device(params, learns=any(map(_makes_first_policy, stages)))
    named = {section for stage in stages for section in stage.params}
    for section, each in _BY_SECTION.items():
        if section in named:
            yield each


def _check_sources(params: config.Params) -> None:
    missing = [source for source in sources.resolved(params.dataset.sources) if source not in sources.names()]
    if missing:
        there = ", ".join(sources.names())
        raise DataError(
            f"dataset.sources in params.yaml has {', '.join(missing)}, and there are {there}",
            sources.remedy(missing[0]),
        )


def _check_demos(params: config.Params) -> None:
    for task in envs.tasks(params.env):
        states = planned_training_states(task, params.states).train
        if len(states) < params.collect.demos_per_task:
            raise ConfigError(
                f"collect.demos_per_task is {params.collect.demos_per_task}, but {task.name} has {len(states)} "
                "training states, one for each demo",
                "lower collect.demos_per_task in params.yaml; a LIBERO suite draws more with states.per_task",
            )


def _check_evaluation(params: config.Params) -> None:
    for task in envs.tasks(params.env):
        evaluation_states(task, params.env, params.evaluate.init_states)
    envs.horizons(params.env)
    check_films(params.evaluate.films, "evaluate.films")


def check_films(count: int, name: str) -> None:
    """ProjectError if films are asked for and cannot be encoded; `name` of the parameter."""
    if count:
        packages.require("av", f"{name} is {count}", f"set {name}: 0")


def _check_validation(params: config.Params, algorithm: str) -> None:
    if algorithm in params.algorithms:
        states = {task.name: planned_training_states(task, params.states) for task in envs.tasks(params.env)}
        check_validation_states(states, params.section(algorithm).validation.level, f"{algorithm}.validation.level")


def _check_sft(params: config.Params) -> None:
    check_batch_size(params.sft, params.machine.ranks)
    _check_ranks(params.machine)


def _check_rloo(params: config.Params) -> None:
    _check_validation(params, "rloo")
    if "rloo" in params.algorithms:
        _check_gpus(params.machine)


def _check_ranks(machine: config.Machine) -> None:
    if machine.has_rank_processes:
        needed = f"machine.ranks is {machine.ranks} and machine.strategy {machine.strategy}"
        packages.require("ray", needed, "set machine.ranks: 1 and machine.strategy: data_parallel in params.yaml")
    _check_gpus(machine)


def _check_gpus(machine: config.Machine) -> None:
    if os.environ.get(ADDRESS_VARIABLE):  # a cluster is asked by the stage
        return
    if not machine.has_rank_processes or device.resolve(machine.device).type != "cuda":
        return
    gpus, acting = torch.cuda.device_count(), int(machine.workers > 0)
    if gpus < machine.ranks + acting:
        workers = ", one more for machine.workers" if acting else ""
        raise DeviceError(
            f"machine.ranks is {machine.ranks}, one GPU each{workers}, and this machine has {gpus}",
            "lower machine.ranks in params.yaml, or join a Ray cluster with more GPUs (RAY_ADDRESS)",
        )


def _check_rlpd(params: config.Params) -> None:
    _check_validation(params, "rlpd")
    if "rlpd" in params.algorithms:
        listening.check(params.machine.listen)
        check_reward(params.rlpd.reward, params.env)
        check_person(params.rlpd.interventions, params.machine)
        check_page(params.rlpd.interventions, params.machine)


def _check_start(params: config.Params) -> None:
    """The champion that training starts from exists, and is the network that params.yaml describes."""
    if params.skips(config.START):
        return
    from nightshift.adapters import mlflow_registry  # imports mlflow: only where a champion is asked for

    model = params.section("register").model
    champion = None if packages.on_compute_node() else mlflow_registry.champion(Path.cwd(), model)
    if champion is None:
        raise no_champion(model)
    check_same_network(champion.policy(), _weightless(params))


_BY_SECTION: dict[str, Check] = {
    "start": _check_start,
    "dataset": _check_sources,
    "collect": _check_demos,
    "sft": _check_sft,
    "rloo": _check_rloo,
    "rlpd": _check_rlpd,
    "evaluate": _check_evaluation,
}
"""What is checked if a stage reads this section."""


def _check_device(params: config.Params, *, learns: bool) -> None:
    chosen = device.resolve(params.machine.device)
    if chosen.type != "cuda" or not learns:
        return
    needed = _gpu_bytes(_weightless(params), params.machine)
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise DeviceError(
            f"the GPU has {free / _GB:.1f} GB of memory left, and learning this policy takes more than "
            f"{needed / _GB:.1f}",
            f"end what else uses the GPU (nvidia-smi), or lower {device.POLICY_SIZE} in params.yaml",
        )


def _gpu_bytes(policy: Policy, machine: config.Machine) -> int:
    """What one GPU has to hold at least: where a policy acts, all its weights."""
    parameters = list(policy.parameters())
    weights = _bytes(parameters)
    learning = weights + _COPIES_OF_TRAINED * _bytes(p for p in parameters if p.requires_grad)
    if machine.strategy == "fsdp":
        learning = 0 if machine.cpu_offload else learning // machine.ranks
    return max(weights, learning)


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _weightless(params: config.Params) -> Policy:
    shapes = {name: spec.shape for name, spec in envs.observation_space(params.env).items()}
    with torch.device("meta"):
        return policies.fresh(params.policy, shapes, envs.suite(params.env.suite).action_space.size)


def _comes_before_policies(stage: Definition) -> bool:
    """Then the policy in params.yaml has to be one that can be built; choosing algorithms concerns no policy."""
    return not _reads_policies(stage) and "algorithms" not in stage.params


def _simulates(stage: Definition) -> bool:
    return "env" in stage.params


def _plays(stage: Definition) -> bool:
    """Simulators are opened for an expert or a policy, on the device of params.yaml; drawing states opens none."""
    return _simulates(stage) and ("collect" in stage.params or _reads_policies(stage))


def _reads_policies(stage: Definition) -> bool:
    """Then the policy exists, and policy in params.yaml no longer matters."""
    return any(path.is_relative_to(paths.MODELS) for path in stage.deps)


def _makes_first_policy(stage: Definition) -> bool:
    return _makes_policies(stage) and not _reads_policies(stage)


def _makes_policies(stage: Definition) -> bool:
    return any(path.is_relative_to(paths.MODELS) for path in stage.outs)
