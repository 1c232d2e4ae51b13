"""Domain randomisation: which episodes are played in perturbed worlds, and in which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift import config
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.fake import FAKE
from nightshift.envs.libero import cameras as drawing
from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.perturbations.randomisation import randomised
from nightshift.errors import ConfigError
from nightshift.pipeline import precheck
from nightshift.pipeline.job import Job
from nightshift.project import graph, paths
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.provenance import provenance
from nightshift.stages import collect
from nightshift.types import PerturbationSpec, RolloutRequest, Split, Trajectory
from tests.conftest import REPOSITORY, edit

NOISY = config.Randomisation(perturbations=("action_noise", "action_delay"), strength=4.0)


def env(params: config.Params, settings: config.Randomisation | None) -> config.Env:
    return params.env.model_copy(update={"randomisation": settings})


def request(split: Split = "train", state: int = 1, **changes: Any) -> RolloutRequest:
    return RolloutRequest(task="near", split=split, init_state=state, controller="expert", seed=2, **changes)


def played(chosen: config.Env, asked: RolloutRequest) -> Trajectory:
    pool = LocalPool(chosen)
    ((_, (trajectory,)),) = pool.run([asked])
    pool.close()
    return trajectory


def test_without_the_section_requests_are_what_they_were(params: config.Params) -> None:
    assert randomised(env(params, None), request()) == request()


def test_the_evaluation_is_not_randomised(params: config.Params) -> None:
    assert randomised(env(params, NOISY), request("eval")) == request("eval")


def test_validation_plays_worlds_drawn_as_those_of_training(params: config.Params) -> None:
    chosen = env(params, NOISY)
    assert randomised(chosen, request("validation")).perturbations == randomised(chosen, request()).perturbations


def test_a_policy_is_validated_in_the_same_perturbed_worlds_every_time(params: config.Params) -> None:
    """Validations are compared state by state."""
    one, other = (played(env(params, NOISY), request("validation")).request.perturbations for _ in range(2))
    assert one == other != ()


def test_strengths_are_drawn_below_the_highest_by_state_and_the_same_again(params: config.Params) -> None:
    chosen = env(params, NOISY)
    drawn = [randomised(chosen, request(state=state)).perturbations for state in range(200)]
    assert drawn == [randomised(chosen, request(state=state)).perturbations for state in range(200)]
    noise = np.array([specs[0].strength for specs in drawn])
    delays = {specs[1].strength for specs in drawn}
    assert 0 < noise.min() < 0.2 and 3.8 < noise.max() < 4.0
    assert delays == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_an_engine_plays_the_perturbed_world_and_says_so(params: config.Params) -> None:
    calm, noisy = played(env(params, None), request()), played(env(params, NOISY), request())
    assert calm.request.perturbations == ()
    assert [spec.name for spec in noisy.request.perturbations] == ["action_noise", "action_delay"]
    assert not np.array_equal(calm.final["proprio"], noisy.final["proprio"])


def test_demos_of_a_randomised_world_say_what_was_perturbed(project: Path, job: Callable[[str], Job]) -> None:
    edit(project, "env", randomisation={"perturbations": ["action_noise"], "strength": 0.5})
    params = config.load(project / "params.yaml")
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    origins = [episode.provenance.origin for episode in EpisodeStore(paths.DEMOS)]
    assert len(origins) == 8
    assert all(origin.startswith("action_noise 0.") for origin in origins)


def test_the_instruction_of_an_episode_is_the_one_that_was_told() -> None:
    """A clone reads it from there."""
    told = PerturbationSpec(name="language_instructions", strength=1.0, instruction="go there")
    noise = PerturbationSpec(name="action_noise", strength=1.0)
    assert provenance(request(perturbations=(told, noise)), FAKE.tasks(), "").language == "go there"
    (near,) = (task.language for task in FAKE.tasks() if task.name == "near")
    assert provenance(request(perturbations=(noise,)), FAKE.tasks(), "").language == near


def test_what_a_suite_cannot_do_is_refused_before_the_run(project: Path) -> None:
    edit(project, "env", randomisation={"perturbations": ["object_sizes"], "strength": 2.0})
    params = config.load(project / "params.yaml")
    with pytest.raises(ConfigError, match="fake cannot do object_sizes"):
        precheck.check(params, [graph.load(REPOSITORY)["collect"]])


def test_what_no_policy_can_notice_is_refused_before_the_run(project: Path) -> None:
    edit(project, "env", randomisation={"perturbations": ["action_noise", "language_instructions"], "strength": 2.0})
    params = config.load(project / "params.yaml")
    with pytest.raises(ConfigError, match=r"^language_instructions in env.randomisation cannot be noticed"):
        precheck.check(params, [graph.load(REPOSITORY)["collect"]])
    edit(project, "env", randomisation={"perturbations": ["action_noise"], "strength": 2.0})
    precheck.check(config.load(project / "params.yaml"), [graph.load(REPOSITORY)["collect"]])


def test_a_strength_below_one_is_refused_where_strengths_are_whole_numbers(project: Path) -> None:
    edit(project, "env", randomisation={"perturbations": ["action_noise", "action_delay"], "strength": 0.5})
    params = config.load(project / "params.yaml")
    with pytest.raises(ConfigError, match=r"strength is 0\.5, and the strengths of action_delay are whole numbers"):
        precheck.check(params, [graph.load(REPOSITORY)["collect"]])


def test_a_whole_strength_is_never_above_the_highest(params: config.Params) -> None:
    settings = config.Randomisation(perturbations=("action_delay",), strength=3.5)
    drawn = {randomised(env(params, settings), request(state=s)).perturbations[0].strength for s in range(100)}
    assert drawn == {0.0, 1.0, 2.0, 3.0}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[LiberoEnv]:
    """Simulators that were compiled."""
    found = []
    build = LiberoEnv.__init__

    def counted(self: LiberoEnv, *arguments: Any, **keywords: Any) -> None:
        found.append(self)
        build(self, *arguments, **keywords)

    monkeypatch.setattr(LiberoEnv, "__init__", counted)
    return found


def valid(perturbed: Sequence[bool], cameras: tuple[str, ...] = ()) -> list[bool]:
    """Whether the simulator failed, of an episode of each kind, one after the other."""
    mini = config.Env(
        suite="libero_mini",
        tasks=("lift_cube",),
        protocol="openvla-oft",
        horizon=4,
        cameras=config.Cameras(names=cameras, size=32, shadows=False),
    )
    moved = (PerturbationSpec(name="object_positions", strength=1.0),)
    asked = [
        RolloutRequest(
            task="lift_cube",
            split="eval",
            init_state=state,
            controller="expert",
            seed=0,
            perturbations=moved if is_perturbed else (),
        )
        for state, is_perturbed in enumerate(perturbed)
    ]
    pool = LocalPool(mini)
    found = {number: trajectory.valid for number, (trajectory,) in pool.run(asked)}
    pool.close()
    return [found[number] for number in range(len(asked))]


def test_episodes_that_a_perturbed_scene_loses_compile_nothing_anew(
    monkeypatch: pytest.MonkeyPatch, built: list[LiberoEnv]
) -> None:
    """Models take hundreds of megabytes in LIBERO's suites, and stay until the pool is closed."""
    settled = LiberoEnv.check_settled

    def broken_where_altered(self: LiberoEnv, split: Split, init_state: int) -> None:
        if self._lent_by is not None:
            raise RuntimeError("it does not settle")
        settled(self, split, init_state)

    monkeypatch.setattr(LiberoEnv, "check_settled", broken_where_altered)
    assert valid([True, True, True, False]) == [False, False, False, True]
    assert len(built) == 1


@pytest.mark.skipif(not drawing.works(), reason="no GL library works here")
def test_a_simulator_that_cannot_draw_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, built: list[LiberoEnv]
) -> None:
    """A perturbed scene is drawn in the GL context of the simulator that it was made from."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("the GL context is lost")

    monkeypatch.setattr(LiberoFleet, "begin_look", broken)
    assert valid([True, True, True], cameras=("agentview",)) == [False, False, False]
    assert len(built) > 1
