"""Whether params.yaml and this machine fit the stages that will run, before the first of them works for hours.

Each stage refuses what it cannot use, but a policy is built only after the demos are collected. A stage is asked for
what it uses and no more: cloning draws no image, and registering needs no GPU. All problems are found at once.

torch takes longer to import than all of `nightshift plan`, so only a check that cannot do without it imports it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift import config, envs, policies
from nightshift.cluster.program import ADDRESS_VARIABLE, temporary_folder
from nightshift.data import sources
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.grid import check_inputs
from nightshift.envs.perturbations import randomisation, registry
from nightshift.envs.splits import (
    check_demo_states,
    check_none_from_validation,
    check_validation_states,
    evaluation_states,
    planned_training_states,
)
from nightshift.errors import (
    ConfigError,
    DataError,
    DeviceError,
    NightshiftError,
    PluginError,
    Problems,
    ProjectError,
)
from nightshift.interventions.opening import check_device, check_page, check_person
from nightshift.policies import device, readable
from nightshift.policies.start import cannot_be_loaded, check_same_network, no_champion
from nightshift.project import packages, paths
from nightshift.project.graph import Definition
from nightshift.stream import listening
from nightshift.types import INSTRUCTION, Provenance

if TYPE_CHECKING:
    import torch

    from nightshift.pipeline.disk_use import DiskUse
    from nightshift.policies.base import Policy, Shapes

Check = Callable[[config.Params], None]

_log = logging.getLogger(__name__)

_GB = 1e9
_COPIES_OF_TRAINED = 3
"""Of weights that are trained: gradients and two moments of the optimizer."""
_MAKE_ROOM = "nightshift gc frees some, and dvc gc --workspace old results"
_SMALL_FAMILIES = (config.GaussianMlp, config.Cnn, config.Vla, config.Flow)
"""Their weights take megabytes, and their settings tell what they can read."""


def check(
    params: config.Params,
    stages: Iterable[Definition],
    states: Mapping[str, Path] | None = None,
    *,
    in_run: bool = False,
) -> None:
    """Raise the problem that was found, or Problems if there are several. Untested versions are a warning.

    `states`: by stage, the folder of checkpoints that it would resume from. `in_run`: this process will run the stages,
    so that what it has itself counts, too, as a terminal."""
    chosen = list(stages)
    _warn_of_untested(chosen)
    if found := problems(params, chosen, states, in_run=in_run):
        raise Problems.of(found)


def problems(
    params: config.Params,
    stages: Iterable[Definition],
    states: Mapping[str, Path] | None = None,
    *,
    in_run: bool = False,
) -> list[NightshiftError]:
    """All that stands in the way of these stages, each once."""
    found: dict[str, NightshiftError] = {}
    for each in _checks(list(stages), states or {}, in_run=in_run):
        try:
            each(params)
        except NightshiftError as error:
            found.setdefault(error.what, error)
    return list(found.values())


def check_policy(params: config.Params) -> None:
    """ConfigError if the policy cannot be built, or cannot read what the environment shows it."""
    _check_network(params)
    match params.policy:
        case config.GaussianMlp() as settings:
            readable.vectors(settings.inputs, _shapes(params.env), settings.family)
        case config.Cnn() as settings:
            readable.seen(settings, _shapes(params.env))
            _check_words(settings, params.env)
        case config.Vla() | config.Flow() as settings:
            readable.seen_in_patches(settings, _shapes(params.env))
            _check_words(settings, params.env)
        case _:  # one that reads a checkpoint, or of another package: only the policy itself can tell
            _check_built(params)


def _check_words(settings: config.Cnn | config.Vla | config.Flow, env: config.Env) -> None:
    """ConfigError if an instruction has more words than the policy reads."""
    if INSTRUCTION in settings.inputs:
        for text in _instructions(env):
            readable.words(text, settings.max_words)


def _check_built(params: config.Params) -> None:
    from nightshift.policies.precision import require_float32_where_trained

    policy = _weightless(params)
    if params.sft.steps or params.algorithms:
        require_float32_where_trained(policy)
    check_inputs(policy, params.env, _instructions(params.env))


def _check_network(params: config.Params) -> None:
    """What the machine's settings ask of a network; most ask nothing."""
    machine = params.machine
    if not (machine.gradient_checkpointing or machine.compile or machine.microbatch_tokens):
        return
    from nightshift.policies.blocks import decisions_within, require_blocks

    policy = _weightless(params)
    if machine.gradient_checkpointing:
        require_blocks(policy, "machine.gradient_checkpointing")
    if machine.compile:
        require_blocks(policy, "machine.compile")
    if machine.microbatch_tokens is not None:
        decisions_within(policy, machine.microbatch_tokens)


def _check_randomisation(params: config.Params) -> None:
    """ConfigError also if nothing that is recorded would differ: all stages would run again for the same policy."""
    env = params.env
    randomisation.check(env)
    if env.randomisation is not None:
        noticed = registry.reaching(env, {*params.policy.inputs, *env.cameras.names})
        if unnoticed := [name for name in env.randomisation.perturbations if name not in noticed]:
            raise ConfigError(
                f"{', '.join(unnoticed)} in env.randomisation cannot be noticed: policy.inputs has "
                f"{', '.join(params.policy.inputs)}, and env.cameras.names {', '.join(env.cameras.names) or 'nothing'}",
                "leave it out, or add what it changes to policy.inputs: a camera, or instruction",
            )


def _instructions(env: config.Env) -> list[str]:
    """All that a policy may be told."""
    randomisation.check(env)
    return [task.language for task in envs.tasks(env)] + randomisation.instructions(env)


def _check_disks(params: config.Params, stages: Sequence[Definition]) -> None:
    asked = params.machine.free_disk_gb
    remedies = _folders_to_fill(params.machine, stages)
    free = {folder: shutil.disk_usage(folder).free / _GB for folder in remedies}
    if short := [folder for folder, room in free.items() if room < asked]:
        found = [f"the disk of {folder} has {free[folder]:.1f} GB left" for folder in short]
        raise ProjectError(
            f"{' and '.join(found)}, and machine.free_disk_gb asks for {asked:g}",
            "; ".join([*(remedies[folder] for folder in short), "or lower machine.free_disk_gb"]),
        )


def _check_room_for_training(params: config.Params, stages: Sequence[Definition], states: Mapping[str, Path]) -> None:
    """Weights of 7B parameters, and a checkpoint with their moments even more, fill a disk that looks empty."""
    if isinstance(params.policy, _SMALL_FAMILIES):
        return
    policy = _learner(params, stages)
    if policy is None:
        return
    from nightshift.pipeline import disk_use

    training = [stage.name for stage in stages if _makes_policies(stage) and not params.skips(stage.name)]
    uses = [disk_use.of_stage(name, policy, params, states.get(name)) for name in training]
    needed, free = disk_use.most_at_once(uses), shutil.disk_usage(Path.cwd()).free
    if needed > free:
        raise ProjectError(
            f"the disk of {Path.cwd()} has {free / _GB:.1f} GB left, and training takes up to {needed / _GB:.1f} GB "
            f"more: {'; '.join(map(_told, uses))}",
            f"{_MAKE_ROOM}; or move the project to a disk with more room",
        )


def _told(use: DiskUse) -> str:
    kept = f" and checkpoints of {use.checkpoint / _GB:.1f} GB, {use.checkpoints} at once" if use.checkpoints else ""
    there = f", of which {use.written / _GB:.1f} GB are there" if use.written else ""
    return f"{use.stage} writes a policy of {use.policy / _GB:.1f} GB{kept}{there}"


def _folders_to_fill(machine: config.Machine, stages: Sequence[Definition]) -> dict[Path, str]:
    """The project, DVC's cache and what Ray writes to, each with how to get room for it; of those on one disk the
    first."""
    folders = {Path.cwd(): _MAKE_ROOM}
    if not packages.on_compute_node():
        from nightshift.adapters import dvc_store  # it imports dvc, which a compute node does not have

        remedy = "dvc gc --workspace frees old results, or dvc cache dir --local FOLDER names another disk for them"
        folders.setdefault(dvc_store.cache_folder(Path.cwd()), remedy)
    if _starts_ray(machine, stages):
        folders.setdefault(temporary_folder(), "set RAY_TMPDIR to a folder on a disk with more room")
    by_disk: dict[int, tuple[Path, str]] = {}
    for folder, remedy in folders.items():
        there = _existing(folder)
        by_disk.setdefault(there.stat().st_dev, (there, remedy))
    return dict(by_disk.values())


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one around it that is there."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _warn_of_untested(stages: list[Definition]) -> None:
    """Packages that run these stages or compute in them, in another version than was tested."""
    tested = packages.tested(Path.cwd())
    used = dict.fromkeys([*packages.PIPELINE, *(package for stage in stages for package in stage.versions)])
    found = {package: packages.release(package) for package in used if package in tested}
    other = [
        f"{package} {release} (tested with {tested[package]})"
        for package, release in found.items()
        if release not in (packages.NONE, tested[package])
    ]
    if other:
        _log.warning("other versions than %s has: %s; make setup installs those", paths.CONSTRAINTS, ", ".join(other))


def _checks(stages: list[Definition], states: Mapping[str, Path], *, in_run: bool) -> Iterator[Check]:
    yield lambda params: _check_disks(params, stages)
    if any(map(_comes_before_policies, stages)):
        yield check_policy
    if any(map(_simulates, stages)):
        yield lambda params: envs.check_cameras(params.env)
        yield lambda params: envs.selected(params.env).check_machine(params.machine)
        yield lambda params: envs.selected(params.env).check_run(params)
        yield _check_randomisation
    if any(map(_makes_policies, stages)):
        yield lambda params: _check_room_for_training(params, stages, states)
    if any(_makes_policies(stage) or _plays(stage) for stage in stages):
        yield lambda params: _check_device(params, stages)
    named = {section for stage in stages for section in stage.params}
    for section, each in _BY_SECTION.items():
        if section in named:
            yield each
    if "rlpd" in named:
        yield lambda params: _check_input_device(params, in_run=in_run)


def _check_sources(params: config.Params) -> None:
    wanted = sources.resolved(params.dataset.sources)
    missing = [source for source in wanted if source not in sources.names()]
    if missing:
        there = ", ".join(sources.names())
        raise DataError(
            f"dataset.sources in params.yaml has {', '.join(missing)}, and there are {there}",
            sources.remedy(missing[0]),
        )
    recorded = [origin for source in wanted if source != sources.DEMOS for origin in _recorded_here(source)]
    if recorded:
        states = planned_training_states(params.env, params.states)
        check_none_from_validation(recorded, states, "leave it out of dataset.sources")


def _recorded_here(source: str) -> list[tuple[str, Provenance]]:
    """Episodes of an import that began in a training state of ours, as a person's do, each with its file."""
    store = EpisodeStore(paths.IMPORTS / source)
    found = [(f"{store.path(key)}", store.get(key).provenance) for key in store.keys()]  # noqa: SIM118 - no dict
    return [(path, origin) for path, origin in found if origin.init_state is not None]


def _check_demos(params: config.Params) -> None:
    check_demo_states(planned_training_states(params.env, params.states), params.collect)


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
        states, level = planned_training_states(params.env, params.states), params.section(algorithm).validation.level
        check_validation_states(states, level, f"{algorithm}.validation.level")


def _check_sft(params: config.Params) -> None:
    if params.machine.ranks > 1:
        from nightshift.learners.algorithms import check_batch_size

        check_batch_size(params.sft, params.machine.ranks)
    _check_ranks(params.machine)


def _check_rloo(params: config.Params) -> None:
    _check_validation(params, "rloo")
    if "rloo" in params.algorithms:
        _check_gpus(params.machine)


def _check_ranks(machine: config.Machine) -> None:
    if machine.has_rank_processes:
        from nightshift.learners.opening import require_ray

        require_ray(machine)
    _check_gpus(machine)


def _check_gpus(machine: config.Machine) -> None:
    if _learns_on_cluster(machine):  # it is asked by the stage
        return
    if not machine.has_rank_processes or device.resolve(machine.device).type != "cuda":
        return
    import torch

    gpus, acting = torch.cuda.device_count(), int(machine.placement == "apart")
    if gpus < machine.ranks + acting:
        workers = ", one more for machine.workers (machine.placement: apart)" if acting else ""
        raise DeviceError(
            f"machine.ranks is {machine.ranks}, one GPU each{workers}, and this machine has {gpus}",
            "lower machine.ranks in params.yaml, or join a Ray cluster with more GPUs (RAY_ADDRESS)",
        )


def _check_rlpd(params: config.Params) -> None:
    _check_validation(params, "rlpd")
    if "rlpd" in params.algorithms:
        from nightshift.rewards.reward import check_reward

        envs.check_whole_decisions(params.env, params.policy.chunk)
        listening.check(params.machine.listen)
        check_reward(params.rlpd.reward, params.env)
        check_person(params.rlpd.interventions, params.machine)
        check_page(params.rlpd.interventions, params.machine)


def _check_input_device(params: config.Params, *, in_run: bool) -> None:
    if "rlpd" in params.algorithms:
        check_device(params.rlpd.interventions, in_run=in_run)


def _check_margin(params: config.Params) -> None:
    """ConfigError if the gate would wait for a comparison that nobody can make."""
    if params.section("register").max_perturbation_drop is None:
        return
    if not registry.reaching(params.env, params.policy.inputs):
        raise ConfigError(
            f"register.max_perturbation_drop asks for a comparison under perturbations, and {params.env.suite} can do "
            f"none that policy.inputs ({', '.join(params.policy.inputs)}) would notice",
            "set register.max_perturbation_drop: null",
        )


def _check_start(params: config.Params) -> None:
    """The champion that training starts from exists, and is the network that params.yaml describes."""
    if params.skips(config.START):
        return
    from nightshift.adapters import mlflow_registry  # imports mlflow: only where a champion is asked for

    model = params.section("register").model
    champion = None if packages.on_compute_node() else mlflow_registry.champion(Path.cwd(), model)
    if champion is None:
        raise no_champion(model)
    try:
        policy = champion.policy()
    except (DataError, PluginError) as error:
        raise cannot_be_loaded(error) from None
    check_same_network(policy, _weightless(params))


_BY_SECTION: dict[str, Check] = {
    "start": _check_start,
    "dataset": _check_sources,
    "collect": _check_demos,
    "sft": _check_sft,
    "rloo": _check_rloo,
    "rlpd": _check_rlpd,
    "evaluate": _check_evaluation,
    "register": _check_margin,
}
"""What is checked if a stage reads this section."""


def _check_device(params: config.Params, stages: Sequence[Definition]) -> None:
    if device.is_surely_cpu(params.machine.device):
        return
    chosen = device.resolve(params.machine.device)
    if _learns_on_cluster(params.machine):  # on GPUs that the stage asks for
        return
    policy = _learner(params, stages) if chosen.type == "cuda" else None
    if policy is None:
        return
    needed, free = _gpu_bytes(policy, params.machine), device.free_memory(chosen)
    if needed > free:
        raise DeviceError(
            f"the GPU has {free / _GB:.1f} GB of memory left, and learning this policy takes more than "
            f"{needed / _GB:.1f}",
            f"end what else uses the GPU (nvidia-smi), or lower {device.POLICY_SIZE} in params.yaml",
        )


def _learns_on_cluster(machine: config.Machine) -> bool:
    return bool(os.environ.get(ADDRESS_VARIABLE)) and machine.has_rank_processes


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


def _learner(params: config.Params, stages: Sequence[Definition]) -> Policy | None:
    """The policy that these stages train, without memory for its weights; None if they train none."""
    if any(map(_makes_first_policy, stages)):
        return _weightless(params)
    return _weightless_clone() if any(map(_makes_policies, stages)) else None


def _weightless_clone() -> Policy | None:
    """The one that the training stages go on with; None if it cannot be read, which they say themselves."""
    import torch

    try:
        spec = json.loads((paths.SFT_POLICY / policies.SPEC).read_text())
    except (FileNotFoundError, ValueError):
        return None
    with torch.device("meta"):
        return policies.build(spec)


def _weightless(params: config.Params) -> Policy:
    """The policy of params.yaml without memory for its weights."""
    import torch

    with torch.device("meta"):
        return policies.fresh(params.policy, _shapes(params.env), envs.suite(params.env.suite).action_space.size)


def _shapes(env: config.Env) -> Shapes:
    return {name: spec.shape for name, spec in envs.observation_space(env).items()}


def _comes_before_policies(stage: Definition) -> bool:
    """Then the policy in params.yaml has to be one that can be built; choosing algorithms concerns no policy."""
    return not _reads_policies(stage) and "algorithms" not in stage.params


def _simulates(stage: Definition) -> bool:
    return "env" in stage.params


def _plays(stage: Definition) -> bool:
    """Simulators are opened for an expert or a policy, on the device of params.yaml; drawing states opens none."""
    return _simulates(stage) and ("collect" in stage.params or _reads_policies(stage))


def _starts_ray(machine: config.Machine, stages: Sequence[Definition]) -> bool:
    """On this machine, for simulators or ranks."""
    if os.environ.get(ADDRESS_VARIABLE):
        return False
    simulators = machine.workers > 0 and packages.is_installed("ray") and any(map(_plays, stages))
    return simulators or (machine.has_rank_processes and any(map(_makes_policies, stages)))


def _reads_policies(stage: Definition) -> bool:
    """Then the policy exists, and policy in params.yaml no longer matters."""
    return any(path.is_relative_to(paths.MODELS) for path in stage.deps)


def _makes_first_policy(stage: Definition) -> bool:
    return _makes_policies(stage) and not _reads_policies(stage)


def _makes_policies(stage: Definition) -> bool:
    return any(path.is_relative_to(paths.MODELS) for path in stage.outs)
