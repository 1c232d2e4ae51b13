"""Sections of params.yaml that do not fit each other are refused before any stage has worked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift import config, envs, files, policies
from nightshift.access import TOKEN_VARIABLE
from nightshift.config import merged
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.grid import check_inputs
from nightshift.envs.splits import planned_training_states
from nightshift.errors import ConfigError, DataError, DeviceError, NightshiftError, Problems, ProjectError
from nightshift.learners import checkpoint
from nightshift.pipeline import disk_use, precheck
from nightshift.pipeline.run import Session, ensure, fingerprint, states_to_resume
from nightshift.project import graph, packages, paths, ports
from nightshift.teleop.server import listen
from tests.command import Command
from tests.conftest import REPOSITORY, add_store, edit, install, nightshift, small_params
from tests.data.examples import PROVENANCE, make
from tests.policies.openvla_oft import published, tiny
from tests.stages.test_opponent import edited_policy, register_champion, rename_layers

SEEING: dict[str, Any] = {
    "env": {"cameras": {"names": ["agentview"], "size": 32, "shadows": True}},
    "policy": {
        "family": "vla",
        "inputs": ["agentview", "proprio", "instruction"],
        "patch_size": 16,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "max_words": 4,
        "chunk": 4,
        "head": "gaussian",
        "augmentation": {"crop": 2, "jitter": 0.1},
    },
}

STAGES = graph.load(REPOSITORY)
BEFORE_A_POLICY = ("states", "collect", "dataset", "sft")


def check(chosen: config.Params, *stages: str) -> None:
    """Before these stages, or all."""
    precheck.check(chosen, [STAGES[stage] for stage in stages or STAGES])


def params(**changes: Any) -> config.Params:
    return config.Params.model_validate(merged(merged(small_params(), SEEING), changes))


def test_sections_that_fit_pass() -> None:
    assert precheck.problems(params(), STAGES.values()) == []


CNN: dict[str, Any] = {
    "family": "cnn",
    "inputs": ["agentview", "proprio", "instruction"],
    "channels": [4],
    "hidden": [8],
    "max_words": 4,
    "chunk": 4,
    "head": "gaussian",
    "augmentation": {"crop": 2, "jitter": 0.1},
}
FLOW: dict[str, Any] = {
    "family": "flow",
    "inputs": ["agentview", "proprio", "instruction"],
    "patch_size": 16,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "max_words": 4,
    "chunk": 4,
    "denoising_steps": 2,
    "flow_sde": {"noise_level": 0.5},
    "flow_noise": None,
    "augmentation": {"crop": 2, "jitter": 0.1},
}
MLP: dict[str, Any] = {
    "family": "gaussian_mlp",
    "inputs": ["objects"],
    "hidden": [8],
    "activation": "tanh",
    "layer_norm": False,
    "chunk": 1,
    "head": "gaussian",
}
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"env": {"cameras": {"names": ["overhead"]}}}, "no camera overhead"),
    ({"env": {"cameras": {"size": 40}}}, "patch"),
    ({"env": {"cameras": {"names": []}}}, "policy.inputs has agentview"),
    ({"policy": {"inputs": ["agentview", "touch"]}}, "policy.inputs has touch"),
    ({"policy": {"max_words": 1}}, "the instruction 'reach near' has 2 words"),
    ({"policy": CNN | {"inputs": ["agentview", "touch"]}}, "policy.inputs has touch"),
    ({"policy": CNN | {"max_words": 1}}, "the instruction 'reach near' has 2 words"),
    ({"policy": FLOW | {"inputs": ["agentview", "touch"]}}, "policy.inputs has touch"),
    ({"policy": FLOW | {"patch_size": 5}}, "which patches of 5 do not divide"),
    ({"policy": FLOW | {"max_words": 1}}, "the instruction 'reach near' has 2 words"),
    ({"policy": MLP | {"inputs": ["agentview"]}}, "a gaussian_mlp policy reads state vectors, and agentview is none"),
    (
        {"env": {"randomisation": {"perturbations": ["language_instructions"], "strength": 2.0}}},
        "the instruction 'move until you are at near' has 6 words",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), MISFITS)
def test_what_does_not_fit_is_one_sentence_before_every_stage_that_comes_before_a_policy(
    changes: dict[str, Any], sentence: str
) -> None:
    for stages in [[stage] for stage in BEFORE_A_POLICY] + [list(STAGES)]:
        with pytest.raises(NightshiftError, match=sentence) as refused:
            check(params(**changes), *stages)
        assert refused.value.next_step
        assert "\n" not in refused.value.what


@pytest.mark.parametrize(("changes", "sentence"), MISFITS)
def test_a_policy_that_is_built_refuses_what_is_told_before_it_is(changes: dict[str, Any], sentence: str) -> None:
    """To tell it, no policy of these families is built: torch need not be imported."""
    chosen = params(**changes)
    told = _misfit(chosen)
    assert told == _misfit(chosen, built=True)
    assert told is not None
    assert sentence in told


def test_a_budget_of_tokens_that_no_decision_fits_in_is_refused_before_the_first_stage() -> None:
    with pytest.raises(ConfigError, match=r"machine\.microbatch_tokens is 8, and one decision .* has 13 tokens"):
        check(params(machine={"microbatch_tokens": 8}))


def test_an_existing_policy_does_not_depend_on_the_section_policy() -> None:
    check(params(policy={"inputs": ["touch"]}), "rloo", "evaluate", "register")


def test_a_learner_for_other_machines_without_a_token_is_refused_before_the_first_stage() -> None:
    machine = {"actors": 1, "listen": "0.0.0.0:7777"}
    with pytest.raises(ConfigError, match=r"machine\.listen is 0\.0\.0\.0:7777, and other machines need a token"):
        check(params(machine=machine, algorithms=["rlpd"], policy={"head": "tanh_gaussian"}))
    check(params(machine=machine))


def test_a_port_for_actors_that_is_taken_is_refused_before_the_first_stage_unless_the_projects_own_run_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, 64 * "0")
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        machine = {"actors": 1, "listen": f"127.0.0.1:{port}"}
        chosen = params(machine=machine, algorithms=["rlpd"], policy={"head": "tanh_gaussian"})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on") as refused:
            check(chosen, "rlpd")
        assert refused.value.next_step == "change machine.listen in params.yaml"
        with ports.held(port):
            check(chosen, "rlpd")
    check(chosen, "rlpd")


BY_KEYBOARD: dict[str, Any] = {
    "algorithms": ["rlpd"],
    "policy": {"head": "tanh_gaussian"},
    "machine": {"workers": 0, "actors": 0, "requests_at_once": 1},
    "rlpd": {"interventions": {"source": "keyboard"}},
}


def test_an_input_device_that_is_not_there_is_missed_only_where_rlpd_runs() -> None:
    by_spacemouse = merged(BY_KEYBOARD, {"rlpd": {"interventions": {"source": "spacemouse"}}})
    with pytest.raises(DeviceError, match="SpaceMouse"):
        check(params(**by_spacemouse))
    check(params(**by_spacemouse), *BEFORE_A_POLICY)
    check(params(**{**by_spacemouse, "algorithms": []}))


def test_a_run_without_a_terminal_for_its_person_is_refused_before_the_first_stage_and_a_plan_is_not(
    project: Path,
) -> None:
    values = config.read_yaml(project / paths.PARAMS)
    (project / paths.PARAMS).write_text(yaml.safe_dump(merged(values, BY_KEYBOARD)))
    planned = nightshift(project, "plan")
    assert planned.returncode == 0, planned.stderr
    with Session(project) as session, pytest.raises(DeviceError, match="this process has none"):
        ensure("states", session)
    assert not (project / paths.INIT_STATES).exists()


def test_a_gpu_that_is_not_there_is_missed_where_policies_act_or_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    chosen = params(machine={"device": "cuda"})
    for stages in (["collect"], ["sft"], ["rloo"], ["evaluate"], list(STAGES)):
        with pytest.raises(DeviceError, match="torch finds no GPU"):
            check(chosen, *stages)
    check(chosen, "states", "dataset", "register")


def test_more_ranks_than_gpus_are_refused_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (80_000_000_000, 80_000_000_000))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    chosen = params(machine={"device": "cuda", "ranks": 3, "strategy": "fsdp"})
    with pytest.raises(DeviceError, match=r"machine\.ranks is 3, one GPU each, and this machine has 2"):
        check(chosen)
    two = {"device": "cuda", "ranks": 2, "strategy": "fsdp", "workers": 1}
    check(params(machine=two))
    with pytest.raises(DeviceError, match=r"one more for machine\.workers \(machine\.placement: apart\), and this m"):
        check(params(machine={**two, "placement": "apart"}))
    check(params(machine={**two, "ranks": 1, "strategy": "data_parallel", "placement": "apart"}))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    check(chosen)


@pytest.mark.parametrize(
    ("machine", "copies"),
    [
        ({}, 4),
        ({"ranks": 2}, 4),
        ({"ranks": 2, "strategy": "fsdp"}, 2),
        ({"ranks": 8, "strategy": "fsdp"}, 1),
        ({"ranks": 1, "strategy": "fsdp", "cpu_offload": True}, 1),
    ],
)
def test_a_gpu_has_room_for_its_part_of_weights_gradients_and_moments_and_for_the_weights_of_a_policy_that_acts(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], copies: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 9)
    weights = sum(p.numel() * p.element_size() for p in precheck._weightless(params()).parameters())
    chosen = params(machine={"device": "cuda", **machine})
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (copies * weights, 80_000_000_000))
    check(chosen, "sft")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (copies * weights - 1, 80_000_000_000))
    with pytest.raises(DeviceError, match="memory left"):
        check(chosen, "sft")


@pytest.mark.parametrize("stage", ["sft", "rloo"])
def test_both_stages_that_share_an_update_ask_for_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (80_000_000_000, 80_000_000_000))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"machine\.ranks is 3, one GPU each, and this machine has 2"):
        check(params(machine={"device": "cuda", "ranks": 3, "workers": 0}), stage)


def test_more_ranks_than_a_batch_has_demos_are_refused() -> None:
    chosen = params(machine={"ranks": 3}, sft={"batch_size": 2})
    with pytest.raises(
        ConfigError, match=r"machine\.ranks is 3, and a batch of sft\.batch_size 2 has no demo for each"
    ):
        check(chosen, "sft")
    check(params(machine={"ranks": 2}, sft={"batch_size": 2}), "sft")
    check(chosen.model_copy(update={"sft": chosen.sft.model_copy(update={"steps": 0})}), "sft")


def test_a_policy_that_does_not_fit_on_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10_000, 80_000_000_000))
    with pytest.raises(DeviceError, match=r"the GPU has 0\.0 GB of memory left"):
        check(params(machine={"device": "cuda"}), "sft")


def test_the_gpu_here_is_not_measured_where_the_ranks_of_a_cluster_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10_000, 80_000_000_000))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    check(params(machine={"device": "cuda", "ranks": 2}), "sft")
    with pytest.raises(DeviceError, match="memory left"):
        check(params(machine={"device": "cuda"}), "sft")  # it learns here


@pytest.mark.usefixtures("project_without_code")
@pytest.mark.parametrize("stage", ["rloo", "rlpd"])
def test_a_clone_that_does_not_fit_on_the_gpu_is_refused_before_it_learns(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10_000, 80_000_000_000))
    small = config.Params.model_validate(merged(small_params(), {"machine": {"device": "cuda"}}))
    check(small, stage)
    shapes = {name: spec.shape for name, spec in envs.observation_space(small.env).items()}
    with files.new_folder(paths.SFT_POLICY) as folder:
        policies.save(policies.fresh(params().policy, {**shapes, "agentview": (32, 32, 3)}, 2), folder)
    with pytest.raises(DeviceError, match=r"the GPU has 0\.0 GB of memory left"):
        check(small, stage)
    check(small, "evaluate", "register")


def large_params() -> config.Params:
    changes = {**SEEING, "policy": tiny.section(), "algorithms": ["rloo"], "machine": {"free_disk_gb": 0.0}}
    return config.Params.model_validate(merged(small_params(), changes))


def leave_room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    real = shutil.disk_usage(Path.cwd())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=size))


@pytest.mark.usefixtures("project_without_code")
def test_a_disk_that_policies_and_checkpoints_of_a_run_do_not_fit_on_is_refused_before_the_first_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = large_params()
    sft, rloo = (disk_use.of_stage(stage, precheck._weightless(large), large) for stage in ("sft", "rloo"))
    assert 3 * rloo.checkpoint > 12 * sum(p.nbytes for p in precheck._weightless(large).parameters())
    needed = sft.policy + rloo.policy + 3 * rloo.checkpoint
    leave_room(monkeypatch, needed)
    check(large)
    leave_room(monkeypatch, needed - 1)
    check(large, "sft")
    told = (
        r"takes up to 0\.0 GB more: sft writes a policy of 0\.0 GB and checkpoints of 0\.0 GB, 3 at once; rloo writes"
    )
    with pytest.raises(ProjectError, match=told):
        check(large)


def test_checkpoints_that_a_run_resumes_from_take_no_room_again_and_those_of_other_params_do(
    project_without_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(project_without_code) as session:
        session.params = large = large_params()
        use = disk_use.of_stage("sft", precheck._weightless(large), large)
        state = project_without_code / paths.stage_state("sft", fingerprint("sft", session))
        written = state / "step-00000001" / checkpoint.TENSORS
        written.parent.mkdir(parents=True)
        written.write_bytes(bytes(use.checkpoint))
        leave_room(monkeypatch, use.policy + 2 * use.checkpoint)
        session.precheck(["sft"])
    with Session(project_without_code) as session:
        session.params = large.model_copy(update={"seed": 1})
        with pytest.raises(ProjectError, match="training takes up to"):
            session.precheck(["sft"])


def test_a_stage_does_not_resume_where_a_run_makes_its_inputs_anew(project_without_code: Path) -> None:
    """Its checkpoints of now stay on the disk beside those to come."""
    (project_without_code / paths.STATE / "sft").mkdir(parents=True)
    with Session(project_without_code) as session:
        assert list(states_to_resume(["sft", "rloo"], session)) == ["sft"]
        assert not states_to_resume(["dataset", "sft", "rloo"], session)


@pytest.fixture
def other_disk(project_without_code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on another disk than the project's, which is full."""
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == project_without_code.stat().st_dev:
        pytest.skip("no other disk")
    real = shutil.disk_usage
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: real(path)._replace(free=0) if str(path) == folder else real(path)
        )
        yield Path(folder)


def test_a_full_disk_of_dvcs_cache_is_refused_before_the_first_stage(
    other_disk: Path, project_without_code: Path
) -> None:
    check(params())
    (project_without_code / ".dvc/config.local").write_text(f"[cache]\n    dir = {other_disk / 'cache'}\n")
    with pytest.raises(
        ProjectError, match=f"the disk of {other_disk} has 0.0 GB left, and machine.free_disk_gb asks"
    ) as full:
        check(params())
    assert "dvc cache dir --local" in full.value.next_step


def test_a_full_disk_of_rays_folder_is_refused_where_a_run_starts_ray(
    other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(other_disk))
    check(params(machine={"workers": 0}))
    with pytest.raises(ProjectError, match=f"the disk of {other_disk} has 0.0 GB left") as full:
        check(params(machine={"workers": 2}))
    assert full.value.next_step == (
        "set RAY_TMPDIR to a folder on a disk with more room; or lower machine.free_disk_gb"
    )
    check(params(machine={"workers": 2}), "states", "dataset")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    check(params(machine={"workers": 2}))


def test_versions_that_were_not_tested_are_a_warning_of_run_and_plan(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(REPOSITORY / paths.CONSTRAINTS, project)
    tested = packages.tested(project)["torch"]
    monkeypatch.syspath_prepend(install(tmp_path / "other", torch="9.9.9"))
    told = f"other versions than constraints.txt has: torch 9.9.9 (tested with {tested})"
    done = nightshift(project, "plan")
    assert done.returncode == 0, done.stderr
    assert f"warning: {told}" in done.stderr
    with Session(project) as session:
        session.precheck(["sft"])
        session.precheck(["sft"])
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluate": {"init_states": 300}}, "evaluation init states, 300 are asked for"),
        ({"collect": {"demos_per_task": 1000}}, "collect.demos_per_task is 1000"),
        ({"dataset": {"sources": ["demos", "teleop"]}}, "dataset.sources in params.yaml has teleop"),
        ({"rloo": {"validation": {"level": 1.0e-9}}}, "cannot show a gain at rloo.validation.level"),
        ({"machine": {"free_disk_gb": 1.0e9}}, "machine.free_disk_gb asks for"),
        ({"env": {"tasks": ["fly"]}}, "has no task fly"),
    ],
)
def test_numbers_that_a_later_stage_would_refuse_are_refused_before_the_first(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(NightshiftError, match=sentence) as refused:
        check(params(**changes))
    assert refused.value.next_step
    assert "\n" not in refused.value.what


def test_a_champion_to_start_from_that_is_not_there_or_is_another_network_is_refused_before_the_first_stage(
    project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    small = config.Params.model_validate(small_params() | {"start": "champion"})
    with pytest.raises(NightshiftError, match=r"start in params.yaml is champion, and nightshift-libero-mini has none"):
        check(small)
    register_champion(project, small.section("register").model, "grid", **small_network(small))
    check(small)
    other = config.Params.model_validate(merged(small_params(), {"start": "champion", "policy": {"hidden": [8]}}))
    with pytest.raises(NightshiftError, match="another network than policy there describes"):
        check(other)
    with edited_policy(project, small.section("register").model) as folder:
        rename_layers(folder)
    with pytest.raises(ConfigError, match=r"champion, which cannot be loaded here: policy\.safetensors has not") as old:
        check(small)
    assert old.value.next_step.startswith("start: scratch, or ")


def small_network(chosen: config.Params) -> Any:
    """The spec of the policy that params.yaml describes."""
    return precheck._weightless(chosen).spec


@pytest.mark.usefixtures("project")
def test_imports_stands_for_every_import_there_is() -> None:
    check(params(dataset={"sources": ["demos", "imports"]}))
    with pytest.raises(NightshiftError, match=r"dataset\.sources is imports, and there are none"):
        check(params(dataset={"sources": ["imports"]}))
    (paths.IMPORTS / "teleop").mkdir(parents=True)
    check(params(dataset={"sources": ["imports"]}))


@pytest.mark.usefixtures("project")
def test_a_recorded_demo_from_a_state_that_is_set_aside_for_validation_is_refused() -> None:
    """Its state may have been one to train on when it was recorded."""
    chosen = params(dataset={"sources": ["demos", "teleop"]})
    (task, split), *_ = planned_training_states(chosen.env, chosen.states).items()
    store = EpisodeStore(paths.IMPORTS / "teleop")
    for state in (split.train[-1], None):
        store.put(f"{state}", make(provenance=replace(PROVENANCE, task=task, init_state=state)))
    check(chosen)
    store.put("late", make(provenance=replace(PROVENANCE, task=task, init_state=split.validation[0])))
    with pytest.raises(DataError, match=rf"teleop/late\.\w+ begins at training state {split.validation[0]} of {task}"):
        check(chosen)
    check(params(dataset={"sources": ["demos"]}))


def test_a_decision_that_a_time_limit_would_cut_short_is_refused_where_rlpd_runs() -> None:
    uneven = {"env": {"horizon": 10}, "policy": {"chunk": 4, "head": "tanh_gaussian"}}
    check(params(**uneven, algorithms=["rloo"]))
    with pytest.raises(ConfigError, match=r"policy\.chunk \(4\) does not divide env\.horizon \(10\)"):
        check(params(**uneven, algorithms=["rlpd"]))


def test_a_margin_under_perturbations_is_refused_where_nothing_can_be_perturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate would wait for a comparison for good."""
    asked = params(register={"max_perturbation_drop": 0.1})
    check(asked, "register")
    monkeypatch.setattr(type(envs.suite(asked.env.suite)), "perturbation_kinds", frozenset())
    with pytest.raises(ConfigError, match=r"max_perturbation_drop asks for a comparison under perturbations, and fake"):
        check(asked, "register")
    check(params(), "register")


def test_drawn_training_states_are_counted_before_they_are_drawn() -> None:
    spatial = {"suite": "libero_spatial", "tasks": [], "cameras": {"names": []}}
    few = {"env": spatial, "states": {"per_task": 5, "validation_share": 0.2}, "collect": {"demos_per_task": 5}}
    few = merged(small_params(), few)
    with pytest.raises(NightshiftError, match=r"collect\.demos_per_task is 5, but .* has 4 training states"):
        precheck._check_demos(config.Params.model_validate(few))


def test_all_problems_are_told_at_once_with_what_to_do_about_each() -> None:
    with pytest.raises(Problems) as refused:
        check(params(evaluate={"init_states": 300}, dataset={"sources": ["teleop"]}, policy={"inputs": ["touch"]}))
    assert "3 problems" in refused.value.what
    for sentence in ("300 are asked for", "has teleop", "policy.inputs has touch"):
        assert refused.value.what.count(sentence) == 1
    assert refused.value.what.count("→") == 3


def test_films_that_cannot_be_encoded_here_are_refused_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    check(params(evaluate={"films": 0}))
    with pytest.raises(ProjectError, match=r"evaluate\.films is 2, and av is not installed") as refused:
        check(params(evaluate={"films": 2}), "states", "evaluate")
    assert "evaluate.films: 0" in refused.value.next_step
    check(params(evaluate={"films": 2}), "sft")


WITHOUT_GL = """
import sys
from nightshift.errors import SimulatorError
from tests.pipeline import test_precheck

chosen = test_precheck.params(env={"suite": "libero_mini", "tasks": []}, policy={"max_words": 9})
test_precheck.check(chosen, "dataset", "sft", "register")
assert not {"mujoco", "robosuite", "libero"} & set(sys.modules), "the simulator was imported"
for stages in (["states"], ["collect"], ["rloo"], ["evaluate"], []):
    try:
        test_precheck.check(chosen, *stages)
        print("passed", stages)
    except SimulatorError as error:
        assert "no GL library works here" in error.what, error
"""


@pytest.mark.slow
def test_without_gl_only_stages_that_simulate_are_refused_and_the_others_import_no_simulator() -> None:
    environment = {**os.environ, "MUJOCO_GL": "disable", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    command = [sys.executable, "-c", WITHOUT_GL]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_run_checks_every_stage_to_come_before_the_first_of_them(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    edit(project, "machine", device="cuda")
    with Session(project) as session, pytest.raises(DeviceError, match="torch finds no GPU"):
        ensure("states", session)
    assert not (project / paths.INIT_STATES).exists()


def test_named_stages_are_all_checked_before_the_first_of_them(project: Path) -> None:
    done = nightshift(project, "stage", "states", "no_such_stage")
    assert done.returncode == 1
    assert "there is no stage 'no_such_stage'" in done.stderr + done.stdout
    assert not (project / paths.INIT_STATES).exists()


def test_the_first_stage_does_not_begin(project: Path) -> None:
    edit(project, "policy", inputs=["agentview"])
    done = nightshift(project, "stage", "collect")
    assert done.returncode == 1
    assert "policy.inputs has agentview" in done.stderr + done.stdout
    assert not (project / paths.DEMOS).exists()


def test_dvc_repro_checks_every_stage_to_come_before_the_first_of_them(project: Path) -> None:
    packages.record(project, graph.load(project))  # as `make setup` does
    edit(project, "evaluate", init_states=300)
    done = Command(project, "repro", program="dvc").wait()
    assert done.returncode != 0
    assert "evaluation init states, 300 are asked for" in done.stdout + done.stderr
    assert not (project / paths.INIT_STATES).exists()


def test_plan_and_doctor_tell_all_problems_without_running_anything(project: Path) -> None:
    edit(project, "evaluate", init_states=300)
    edit(project, "dataset", sources=["teleop"])
    for command in ("plan", "doctor"):
        done = nightshift(project, command, COLUMNS="200")
        assert done.returncode == 1
        told = done.stdout + done.stderr
        assert "300 are asked for" in told
        assert "dataset.sources in params.yaml has teleop" in told
        assert "Traceback" not in told
    assert not (project / paths.INIT_STATES).exists()


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_params_that_fit(recipe: Path, tmp_path: Path) -> None:
    """The checkpoint that a recipe names is replaced by a tiny one, which spells the prompt letter by letter."""
    base = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    chosen = merged(base, yaml.safe_load(recipe.read_text()))
    if chosen["policy"].get("checkpoint"):
        chosen["policy"]["checkpoint"] |= {"path": str(published.write(tmp_path)), "unnorm_key": "libero_x"}
        chosen["policy"]["max_tokens"] = 200
    assert _misfit(config.Params.model_validate(chosen)) is None


def test_the_recipes_of_simplevla_rl_differ_in_what_all_weights_on_eight_gpus_need() -> None:
    adapters, whole = (
        yaml.safe_load((REPOSITORY / "recipes" / f"{name}.yaml").read_text())
        for name in ("simplevla_rl", "simplevla_rl_8_gpus")
    )
    changes = {
        "machine": {"workers": 8, "threads": 8, "requests_at_once": 8, "ranks": 8, "strategy": "fsdp"},
        "policy": {"lora": None, "dtype": "float32"},
        "rloo": {"optimizer": {"learning_rate": 5.0e-6}},
    }
    assert merged(adapters, changes) == whole


def _misfit(chosen: config.Params, *, built: bool = False) -> str | None:
    """What of the policy does not fit the environment, as the precheck tells it, or the policy itself."""
    try:
        if built:
            policy = precheck._weightless(chosen)
            check_inputs(policy, chosen.env, precheck._instructions(chosen.env))
        else:
            precheck.check_policy(chosen)
    except NightshiftError as error:
        return error.what
    return None
