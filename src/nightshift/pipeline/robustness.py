"""A policy under perturbations: a grid of perturbations, strengths and tasks, played episode by episode.

Every finished episode is in a journal under `.state/robustness`, by the weights of the policy and by what decides how
it is played. So a killed grid goes on where it was, a wider grid plays what is new, and a second policy is compared
with one that has played before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nightshift import config, envs, files, policies
from nightshift.config import CHAMPION
from nightshift.envs.grid import cameras_in, cells, check_inputs, misfit
from nightshift.envs.perturbations import registry
from nightshift.errors import Busy, ConfigError, DataError
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import snapshot
from nightshift.project import locks, packages, paths, playing, robustness_grid
from nightshift.reports import films
from nightshift.reports import robustness as report
from nightshift.reports.gate import Robustness
from nightshift.reports.robustness import PerturbedOutcome
from nightshift.rollouts.base import Pool
from nightshift.rollouts.opening import open_pool_for
from nightshift.telemetry import progress
from nightshift.types import INSTRUCTION, PerturbationSpec, RolloutRequest, Trajectory

_log = logging.getLogger(__name__)

_NAME_A_POLICY = "name the folder of a policy, such as models/sft"

Key = tuple[str, float, str, str, int]
"""Perturbation, strength, instruction in other words, task and init state."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A policy that plays the grid."""

    name: str
    """Example: models/sft"""
    weights: str
    """sha256; `spec` likewise, of policy.json."""
    spec: str
    policy: Policy


def find(root: Path, params: config.Params, which: str) -> Entrant:
    """The policy in a folder, or behind an alias or a version number of the registry."""
    folder = Path(which)
    if folder.is_dir():
        sums = files.verify_folder(folder, _NAME_A_POLICY)
        if not {policies.WEIGHTS, policies.SPEC} <= sums.keys():
            raise _holds_no_policy(folder)
        identity = {"weights": sums[policies.WEIGHTS], "spec": sums[policies.SPEC]}
        return Entrant(name=which, **identity, policy=policies.load(folder))
    return _registered(root, params, which)


def _holds_no_policy(folder: Path) -> DataError:
    skipped = folder / paths.SKIPPED
    if not skipped.exists():
        return DataError(f"{folder} holds no policy: it has no {policies.WEIGHTS} and {policies.SPEC}", _NAME_A_POLICY)
    why = json.loads(skipped.read_text())["skipped"]
    return DataError(
        f"{folder} holds no policy: its stage was skipped ({why})", f"edit params.yaml and run it, or {_NAME_A_POLICY}"
    )


def _registered(root: Path, params: config.Params, which: str) -> Entrant:
    packages.require("mlflow", f"{which} is no folder here but a name of the registry", "name the folder of a policy")
    from nightshift.adapters import mlflow_registry  # a compute node lacks it, and has policies in folders

    model = params.section("register").model
    version = mlflow_registry.look_up(mlflow_registry.connect(root), model, which)
    policy = mlflow_registry.load(root, model, str(version.version))  # refuses a version without these tags
    return Entrant(
        name=f"version {version.version}",
        weights=version.tags[mlflow_registry.WEIGHTS],
        spec=version.tags[mlflow_registry.SPEC],
        policy=policy,
    )


def evaluate(root: Path, which: str = CHAMPION, against: str = "", *, retry_lost: bool = False) -> dict[str, Any]:
    """Play the grid with a policy, and with another one to compare it with; write and return the report.

    `retry_lost` plays episodes again that were lost to the simulator.
    """
    with locks.held(root / paths.ROBUSTNESS_LOCK, partial(_busy, root)):  # two would write the same journal and report
        return _evaluate(root, which, against, retry_lost)


def _busy(root: Path, holder: str) -> Busy:
    what = f"another nightshift robustness (process {holder}) is working in {root}"
    return Busy(what, f"wait for it, or kill {holder}")


def _evaluate(root: Path, which: str, against: str, retry_lost: bool) -> dict[str, Any]:
    params = config.load(root / paths.PARAMS)
    _warn_without_encoder(params.robustness.films)
    entrants = [find(root, params, name) for name in (which, against) if name]
    for entrant in entrants:
        if why := misfit(params.env, entrant.policy):
            raise ConfigError(f"{entrant.name} cannot play here: {why}", "choose another, or edit env in params.yaml")
    chosen = perturbations(params, entrants)
    requests = grid(params, chosen)
    for entrant in entrants:
        _check_paraphrases(params.env, entrant, requests)
    asked = robustness_grid.digest(root, params)  # as it is now: params.yaml may be edited meanwhile
    pool = open_pool_for(requests, params.machine, params.env)
    try:
        outcomes = [play(root, pool, params, entrant, requests, retry_lost) for entrant in entrants]
        found = {"grid": asked, **_report(params, chosen, entrants, outcomes)}
        with files.new_folder(root / paths.ROBUSTNESS) as folder:
            found["films"] = _film(pool, params, entrants[0], outcomes[0], folder)
            files.write_json(folder / paths.ROBUSTNESS_REPORT.name, found)
    finally:
        pool.close()
    return found


def _warn_without_encoder(count: int) -> None:
    if count and not packages.is_installed(films.ENCODER):
        _log.warning(
            "robustness.films is %d, and %s is not installed here: failures are shown as stills", count, films.ENCODER
        )


def _check_paraphrases(env: config.Env, entrant: Entrant, requests: Sequence[RolloutRequest]) -> None:
    """ConfigError if the policy cannot read one: some read a limited number of words or tokens."""
    told = sorted({spec.instruction for request in requests for spec in request.perturbations if spec.instruction})
    if not told or INSTRUCTION not in entrant.policy.observations:
        return
    try:
        check_inputs(entrant.policy, env, told)
    except ConfigError as error:
        raise ConfigError(
            f"{entrant.name} cannot read a paraphrase: {error.what}",
            "write shorter ones and name their file in robustness.paraphrases, or name perturbations without "
            "language_instructions in robustness.perturbations",
        ) from None


def perturbations(params: config.Params, entrants: Sequence[Entrant]) -> Mapping[str, Sequence[float]]:
    """Those of params.yaml, checked; if it names none, all that the suite can do and the policies can notice. Each in
    the strengths that it has."""
    env, settings = params.env, params.robustness
    if settings.perturbations:
        registry.check(env, settings.perturbations, settings.strengths, settings.paraphrases)
        _check_noticed(env, settings.perturbations, entrants)
    names = settings.perturbations or _noticed(env, entrants)
    levels = {name: registry.levels(env, name, settings.strengths, settings.paraphrases) for name in names}
    for name in settings.perturbations:
        if missing := [strength for strength in settings.strengths if strength not in levels[name]]:
            _log.warning("%s has no strength %s: played in %s", name, _numbers(missing), _numbers(levels[name]))
    found = {name: own for name, own in levels.items() if own}
    if not found:
        raise _nothing_to_play(env.suite, settings.strengths)
    return found


def _noticed(env: config.Env, entrants: Iterable[Entrant]) -> list[str]:
    """Those that the suite can do and one of the policies can notice."""
    return registry.reaching(env, {name for entrant in entrants for name in entrant.policy.observations})


def _check_noticed(env: config.Env, chosen: Iterable[str], entrants: Sequence[Entrant]) -> None:
    """ConfigError if no policy can notice one of them: its rate would be the unperturbed one, and its gate open."""
    noticed = _noticed(env, entrants)
    if unnoticed := [name for name in chosen if name not in noticed]:
        reads = "; ".join(f"{one.name} reads {', '.join(sorted(one.policy.observations))}" for one in entrants)
        raise ConfigError(
            f"{', '.join(unnoticed)} in robustness.perturbations cannot be noticed: {reads}",
            f"leave it out, or name any of {', '.join(noticed)}",
        )


def _nothing_to_play(suite: str, strengths: Iterable[float]) -> ConfigError:
    """Rather than to play unperturbed episodes alone, on a robot perhaps."""
    can = ", ".join(registry.of_suite(suite))
    why = f"of {can} none reaches the policy in the strengths {_numbers(strengths)}" if can else f"{suite} can do none"
    return ConfigError(
        f"no perturbation can be played here: {why}", "edit env.suite or robustness.strengths in params.yaml"
    )


def _numbers(strengths: Iterable[float]) -> str:
    return ", ".join(f"{strength:g}" for strength in strengths)


def grid(params: config.Params, chosen: Mapping[str, Sequence[float]]) -> list[RolloutRequest]:
    """Every held-out state of every task without a perturbation, then under each of `chosen` in its strengths."""
    env, settings = params.env, params.robustness
    states = cells(env, settings.init_states, "robustness.init_states")
    calm = [_request(params, task, state, ()) for task, state in states]
    return calm + [
        _request(params, task, state, (registry.spec(env, name, strength, task, settings.paraphrases),))
        for name, strengths in chosen.items()
        for strength in strengths
        for task, state in states
    ]


def _request(params: config.Params, task: str, state: int, perturbed: tuple[PerturbationSpec, ...]) -> RolloutRequest:
    seed = int(np.random.SeedSequence([params.seed, state]).generate_state(1)[0])
    return RolloutRequest(
        task=task, split="eval", init_state=state, controller="greedy", seed=seed, perturbations=perturbed
    )


def play(
    root: Path,
    pool: Pool,
    params: config.Params,
    entrant: Entrant,
    requests: Sequence[RolloutRequest],
    retry_lost: bool,
) -> list[PerturbedOutcome]:
    """One outcome per request, in its order. What the journal has is not played again, unless it was lost and
    `retry_lost` is asked for."""
    journal = root / paths.robustness_journal(digest(root, params, entrant), entrant.weights)
    known = _known(journal, requests)
    if retry_lost:
        known = {key: outcome for key, outcome in known.items() if outcome["valid"]}
    todo = [request for request in requests if _key(request) not in known]
    with progress.bar(f"robustness {entrant.name}", total=len(requests), done=len(requests) - len(todo)) as advance:
        for _, (trajectory,) in pool.run(todo, snapshot(entrant.policy)) if todo else ():
            key, outcome = _key(trajectory.request), _outcome(trajectory)
            known[key] = outcome
            files.append_json(journal, {"key": key, "outcome": outcome})
            advance(f"{outcome['perturbation']} {outcome['strength']:g}")
    return [known[_key(request)] for request in requests]


def _known(journal: Path, requests: Iterable[RolloutRequest]) -> dict[Key, PerturbedOutcome]:
    """The outcomes of these requests that the journal has.

    An invalid one counts, since its simulator fails every time, if any of its perturbation is valid. If none is, the
    simulator itself may be broken, or may have been.
    """
    wanted = set(map(_key, requests))
    found: dict[Key, PerturbedOutcome] = {
        key: line["outcome"] for line in files.read_journal(journal) if (key := tuple(line["key"])) in wanted
    }
    can_be_played = {outcome["perturbation"] for outcome in found.values() if outcome["valid"]}
    return {key: outcome for key, outcome in found.items() if outcome["perturbation"] in can_be_played}


def digest(root: Path, params: config.Params, entrant: Entrant) -> str:
    """Of what decides an episode besides its key and the weights."""
    env = params.env
    cameras = cameras_in(env, entrant.policy.observations)
    states = {task.name: envs.init_states_digest(task, "eval") for task in envs.tasks(env)}
    conditions = envs.conditions(env, cameras)
    content = [env.suite, params.seed, states, conditions, entrant.spec, playing.played_with(root)]
    return files.json_sha256(content)[:16]


def _key(request: RolloutRequest) -> Key:
    (spec,) = request.perturbations or (PerturbationSpec(name=robustness_grid.UNPERTURBED, strength=0.0),)
    return spec.name, spec.strength, spec.instruction, request.task, request.init_state


def _outcome(trajectory: Trajectory) -> PerturbedOutcome:
    name, strength, _, task, state = _key(trajectory.request)
    return {
        "perturbation": name,
        "strength": strength,
        "reached": trajectory.reached.get(name, strength),
        "task": task,
        "init_state": state,
        "success": trajectory.success,
        "length": trajectory.length,
        "valid": trajectory.valid,
    }


def _report(
    params: config.Params,
    chosen: Iterable[str],
    entrants: Sequence[Entrant],
    outcomes: Sequence[Sequence[PerturbedOutcome]],
) -> dict[str, Any]:
    settings = params.robustness
    players = [
        {"name": entrant.name, "weights": entrant.weights, **report.summary(played)}
        for entrant, played in zip(entrants, outcomes, strict=True)
    ]
    found: dict[str, Any] = {
        "suite": params.env.suite,
        "tasks": [task.name for task in envs.tasks(params.env)],
        "init_states": settings.init_states,
        "strengths": list(settings.strengths),
        "perturbations": {name: _described(name) for name in chosen},
        "limited": report.limited(outcomes[0]),
        "policies": players,
        "against": None,
    }
    if len(entrants) > 1:
        found["against"] = {"perturbations": report.comparison(*outcomes)}
        found["against"] |= _gate(found, params.section("register").max_perturbation_drop)
    return found


def _gate(found: Mapping[str, Any], margin: float | None) -> dict[str, Any]:
    """Where the first policy is lower than the second by more than the margin of the gate, if it has one."""
    compared = Robustness.of(found)
    return {"margin": margin, "fallen": {} if margin is None or not compared else compared.fallen(margin)}


def _described(name: str) -> Mapping[str, str]:
    found = registry.find(name)
    return {"summary": found.summary, "source": found.source}


def _film(
    pool: Pool, params: config.Params, entrant: Entrant, outcomes: Sequence[PerturbedOutcome], folder: Path
) -> list[dict[str, Any]]:
    """Typical failures, played once more. Without a GL library: no films."""
    chosen = report.typical_failures(outcomes, params.robustness.films)
    requests = [replace(_again(params, one), frames_every=1) for one in chosen]
    made = []
    (folder / paths.FILMS).mkdir()
    for index, (trajectory,) in pool.run(requests, snapshot(entrant.policy)) if requests else ():
        if trajectory.frames is not None and trajectory.valid:
            one = chosen[index]
            file = Path(paths.FILMS) / f"{one['perturbation']}-{one['strength']:g}-{one['task']}.mp4"
            films.write(folder / file, trajectory.frames, envs.suite(params.env.suite).control_hz)
            made.append({**one, **_unseen(requests[index]), "success": trajectory.success, "file": file.as_posix()})
    return sorted(made, key=lambda film: film["file"])


def _unseen(request: RolloutRequest) -> dict[str, Any]:
    """Of the perturbation, what a film cannot show: it is of the scene, not of what the policy reads."""
    (spec,) = request.perturbations
    return {"told": spec.instruction, "is_of_sensors": registry.find(spec.name).kind == "observation"}


def _again(params: config.Params, outcome: PerturbedOutcome) -> RolloutRequest:
    file = params.robustness.paraphrases
    spec = registry.spec(params.env, outcome["perturbation"], outcome["strength"], outcome["task"], file)
    return _request(params, outcome["task"], outcome["init_state"], (spec,))
