"""A stage is one name: its module, its task, its entry in dvc.yaml and its test. Nothing may drift apart."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import grimp
import pytest
import yaml

from nightshift import config
from nightshift.envs import registry
from nightshift.project import graph, paths
from tests.conftest import REPOSITORY, UNITS

GRAPH = graph.load(REPOSITORY)

NOT_IN_THE_KEY = (
    *("config", "errors", "plugins", "types", "files", "interrupts", "spawning"),
    *("pipeline.job", "telemetry", "project", "access", "teleop"),
    *("adapters.tracking", "adapters.mlflow_tracking"),
)
"""Types, plumbing and reporting: they do not decide what a stage computes; at a page a person does."""

OUTPUTS = {
    "states": [paths.INIT_STATES],
    "collect": [paths.DEMOS],
    "dataset": [paths.DATASET],
    "start": [paths.START],
    "opponent": [paths.OPPONENT],
    "sft": [paths.SFT_POLICY],
    "choose": [paths.choice(algorithm) for algorithm in config.ALGORITHMS],
    "rloo": [paths.RLOO_POLICY],
    "rlpd": [paths.RLPD_POLICY],
    "evaluate": [paths.EVALUATION],
    "register": [paths.RECEIPT],
}


PACKAGES = {name: name for name in ("mujoco", "numba", "numpy", "robosuite", "torch")} | {"libero": "hf-libero"}
"""Packages whose version can change a result, by the name of their module."""

PLUG_INS = {
    "nightshift.envs.registry": "plugin-suite",
    "nightshift.policies.families": "plugin-policy",
    "nightshift.rewards.reward": "plugin-reward",
}
"""Modules that look for what other packages add, and the key of versions.yaml that holds which package that is."""

PLAYING = {"collect", "rloo", "rlpd", "evaluate"}
"""Stages whose episodes may be perturbed: sensors.py, which is imported by name, changes images with scipy."""

LOADS_ONLY = {"states": {"torch"}, "collect": {"torch", "plugin-policy"}}
"""Stages that read LIBERO's init states with torch and compute nothing with it; the expert is no family."""


def modules_in(folder: str, prefix: str = "") -> set[str]:
    names = {path.stem for path in (REPOSITORY / folder).glob(f"{prefix}*.py")}
    return {name.removeprefix(prefix) for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("folder", "prefix"), [("src/nightshift/stages", ""), ("tasks", ""), ("tests/stages", "test_")]
)
def test_stage_names_are_the_same_everywhere(folder: str, prefix: str) -> None:
    assert modules_in(folder, prefix) == set(GRAPH)


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_takes_exactly_the_sections_dvc_watches_for_it(stage: str) -> None:
    signature = inspect.signature(importlib.import_module(f"nightshift.stages.{stage}").run)
    keyword_only = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(keyword_only) == sorted(name.replace(".", "_") for name in GRAPH[stage].params)


@pytest.mark.parametrize("stage", ["start", "opponent"])
def test_the_rules_of_the_gate_are_not_in_the_key_of_a_stage_that_asks_for_the_champion(stage: str) -> None:
    assert [name for name in GRAPH[stage].params if name.startswith("register")] == ["register.model"]
    assert Path("src/nightshift/reports/gate.py") not in GRAPH[stage].deps


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_names_the_versions_of_the_packages_that_its_code_computes_with(
    stage: str, imports: grimp.ImportGraph
) -> None:
    modules = _used(f"nightshift.stages.{stage}", imports)
    packages = {name for module in modules for name in imports.find_modules_directly_imported_by(module)}
    computing = {PACKAGES[name] for name in packages & set(PACKAGES)} | {PLUG_INS[m] for m in modules & set(PLUG_INS)}
    computing |= {"scipy"} if stage in PLAYING else set()
    assert set(GRAPH[stage].versions) == computing - LOADS_ONLY.get(stage, set())


def test_how_to_run_is_never_part_of_a_cache_key() -> None:
    assert not [stage for stage, definition in GRAPH.items() if "machine" in definition.params]


def test_outputs_in_dvc_yaml_are_the_paths_the_code_writes() -> None:
    assert {stage: list(definition.outs) for stage, definition in GRAPH.items()} == OUTPUTS


@pytest.mark.parametrize("stage", GRAPH)
def test_dvc_calls_the_stage_of_the_same_name(stage: str) -> None:
    entry = yaml.safe_load((REPOSITORY / paths.DVC_YAML).read_text())["stages"][stage]
    assert entry["cmd"] == f"PATH=$PWD/.venv/bin:$PATH nightshift stage {stage}"


def test_every_policy_that_is_evaluated_can_be_registered() -> None:
    evaluated, registered = ([d for d in GRAPH[s].deps if d.parent == paths.MODELS] for s in ("evaluate", "register"))
    assert evaluated == registered
    assert evaluated[0] == paths.SFT_POLICY, "gains are measured from the clone"


def test_the_training_stages_that_can_be_chosen_are_those_between_the_clone_and_the_evaluation() -> None:
    models = {stage: d.outs for stage, d in GRAPH.items() if any(out.parent == paths.MODELS for out in d.outs)}
    assert models.keys() - {"sft"} == set(config.ALGORITHMS)
    for stage in config.ALGORITHMS:
        assert models[stage] == (paths.MODELS / stage,)
        assert models[stage][0] in GRAPH["evaluate"].deps


@pytest.mark.parametrize("stage", GRAPH)
def test_only_a_training_stages_own_choice_is_in_its_key(stage: str) -> None:
    choices = [dep for dep in GRAPH[stage].deps if dep.is_relative_to(paths.CHOICES)]
    assert choices == ([paths.choice(stage)] if stage in config.ALGORITHMS else [])
    assert ("algorithms" in GRAPH[stage].params) == (stage == "choose")


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("nightshift", cache_dir=None, include_external_packages=True)


@pytest.mark.parametrize("stage", GRAPH)
def test_every_module_a_stage_uses_counts_as_its_code(stage: str, imports: grimp.ImportGraph) -> None:
    missing = {name for name in _used(f"nightshift.stages.{stage}", imports) if not _covered(name, GRAPH[stage].deps)}
    assert not missing, f"add these to the deps of {stage} in dvc.yaml"


def test_every_dependency_in_dvc_yaml_exists() -> None:
    assert not [path for path in graph.code(GRAPH) if not (REPOSITORY / path).exists()]


def _used(stage: str, imports: grimp.ImportGraph) -> set[str]:
    """The stage and all it imports, with the packages they lie in; what stands outside the key is not followed."""
    used: set[str] = set()
    waiting = [stage]
    while waiting:
        module = waiting.pop()
        if module in used or _ignored(module) or not module.startswith("nightshift"):
            continue
        used.add(module)
        waiting += [*imports.find_modules_directly_imported_by(module), module.rpartition(".")[0]]
        if module == registry.__name__:  # it imports suites by name
            waiting += [entry.partition(":")[0] for entry in registry.BUILT_IN.values()]
    return used


def _ignored(module: str) -> bool:
    name = module.partition(".")[2]
    return name in ("", "stages", "pipeline") or any(
        name == other or name.startswith(f"{other}.") for other in NOT_IN_THE_KEY
    )


def _covered(module: str, deps: tuple[Path, ...]) -> bool:
    path = Path("src", *module.split("."))
    candidates = [path.with_suffix(".py"), path / "__init__.py"]
    files = [candidate for candidate in candidates if (REPOSITORY / candidate).exists()]
    return any(file == dep or dep in file.parents for file in files for dep in deps) or _empty(files)


def _empty(files: list[Path]) -> bool:
    """A package whose __init__ holds a docstring at most computes nothing."""
    return all(file.name == "__init__.py" and "import" not in (REPOSITORY / file).read_text() for file in files)


def test_the_files_whose_tests_are_begun_first_exist() -> None:
    assert all((REPOSITORY / "tests" / name).exists() for unit in UNITS for name in unit)
