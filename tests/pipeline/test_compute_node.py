"""Stages where ray, prefect, dvc, mlflow and git are missing: they run, resume and leave receipts to be adopted."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.entities import Run

from nightshift import files
from nightshift.adapters import mlflow_tracking
from nightshift.errors import DataError, NightshiftError, ProjectError
from nightshift.pipeline import receipt
from nightshift.pipeline.adopt import NODE, adopt
from nightshift.pipeline.run import Session, fingerprint, sections, versions
from nightshift.project import checksums, graph, paths
from tests.compute_node import Node, forking_python, make_site
from tests.conftest import REPOSITORY, add_store, choose, edit, git, install, make_project, nightshift

STAGES = [stage for stage in graph.load(REPOSITORY) if stage != "register"]
"""All that need no registry; `opponent` finds none there."""
RAN = [stage for stage in STAGES if stage not in ("start", "rlpd")]
"""Those that params.yaml does not skip."""
SFT_STEPS = list(range(20, 401, 20))
"""At which a checkpoint is written and metrics are logged."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("packages") / "site")


@pytest.fixture(scope="module")
def python(site: Path) -> Iterator[str]:
    with forking_python(site) as address:
        yield address


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project in which nothing has run; tests take copies of it."""
    root = make_project(tmp_path_factory.mktemp("home") / "project")
    edit(root, "sft", steps=400)
    edit(root, "rloo", iterations=1)
    edit(root, "evaluate", init_states=2)
    git(root, "commit", "-qam", "smaller")
    return root


@pytest.fixture
def node(home: Path, site: Path, python: str, tmp_path: Path) -> Node:
    """A node that got the project's files and has run nothing."""
    node = Node(tmp_path / "node", site, python)
    node.receive(home)
    return node


@pytest.fixture(scope="module")
def done(home: Path, site: Path, python: str, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """A node on which every stage has run, with the archive of its results."""
    node = Node(tmp_path_factory.mktemp("done") / "node", site, python)
    node.receive(home)
    ran = node.run("stage", *STAGES)
    assert ran.returncode == 0, ran.stderr
    packed = node.run("pack", "--to", "results.tar")
    assert packed.returncode == 0, packed.stderr
    return node


def refused(node: Node, *arguments: str) -> str:
    ended = node.run(*arguments)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


# On the node


TRY_TO_IMPORT = """
import importlib
for name in {names}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_node_lacks_what_the_pipeline_needs(node: Node) -> None:
    packages = ("ray", "prefect", "dvc", "mlflow", "git", "gymnasium", "pynvml")
    told = node.python(TRY_TO_IMPORT.format(names=[f"{package}.anything" for package in packages])).stdout.splitlines()
    assert told == [f"No module named '{package}'" for package in packages]


@pytest.mark.slow
def test_stages_and_commands_import_none_of_it(node: Node) -> None:
    modules = ", ".join(["nightshift.cli.app", *(f"nightshift.stages.{stage}" for stage in STAGES)])
    imported = node.python(f"import {modules}")
    assert imported.returncode == 0, imported.stderr


def test_every_stage_runs_and_leaves_a_receipt_with_the_sums_of_what_it_read_and_wrote(done: Node) -> None:
    left = {one.stage: one for one in receipt.read(done.root)}
    assert list(left) == sorted(STAGES)
    for stage, definition in graph.load(done.root).items():
        if stage in left:
            assert set(left[stage].inputs) == {path.as_posix() for path in definition.deps}
            assert set(left[stage].versions) == set(definition.versions)
            sums = {path.as_posix(): checksums.md5(done.root, path) for path in definition.outs}
            assert left[stage].outputs == sums
    assert left["sft"].commit == "unknown", "the code arrived without its history"
    assert logged_steps(done.root, left["sft"].metrics) == SFT_STEPS


def test_a_machine_with_all_packages_counts_as_a_node_if_it_is_told_so(project: Path) -> None:
    ended = nightshift(project, "stage", "states", NIGHTSHIFT_COMPUTE_NODE="1")
    assert ended.returncode == 0, ended.stderr
    assert [one.stage for one in receipt.read(project)] == ["states"]
    assert not (project / paths.MLFLOW_DATABASE).exists()


def test_policies_play_in_processes_where_ray_is_not_installed(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    edit(node.root, "machine", workers=2)
    (node.root / paths.EVALUATION_OUTCOMES).unlink()
    ran = node.run("stage", "evaluate")
    assert ran.returncode == 0, ran.stderr
    outcomes = [(root / paths.EVALUATION_OUTCOMES).read_text() for root in (done.root, node.root)]
    assert outcomes[0] == outcomes[1]


def test_learner_ranks_on_ray_are_refused_before_any_work(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    edit(node.root, "machine", ranks=2)
    edit(node.root, "rloo", iterations=2)
    assert (
        "machine.ranks is 2, machine.strategy data_parallel, machine.placement colocated, and ray is not installed here"
        in refused(node, "stage", "rloo")
    )


def test_registering_says_that_it_needs_mlflow(node: Node) -> None:
    message = refused(node, "stage", "register")
    assert "this needs the package mlflow, which is not installed here" in message
    assert "pip install -e '.[pipeline]'" in message


def test_a_package_that_a_stage_computes_with_is_missed_before_it_works(node: Node, tmp_path: Path) -> None:
    without = Node(node.root, make_site(tmp_path / "site", "scipy"))
    assert "this needs the package scipy, which is not installed here" in refused(without, "stage", "choose", "rloo")
    assert not (node.root / paths.STATE / "rloo").exists()


def test_a_stage_that_was_killed_resumes_by_the_same_command_to_the_same_weights(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    for path in (paths.SFT_POLICY, paths.METRICS, paths.RECEIPTS):
        shutil.rmtree(node.root / path)
    kill_after_checkpoint(node, "sft")
    assert "no stage has left a receipt" in refused(node, "pack", "sft")
    assert node.run("stage", "sft").returncode == 0
    assert sft_receipt(node).outputs == sft_receipt(done).outputs
    assert logged_steps(node.root, sft_receipt(node).metrics) == SFT_STEPS


def kill_after_checkpoint(node: Node, stage: str) -> None:
    kill_when(node, stage, lambda: any((node.root / paths.STATE / stage).glob("*/step-*")))


def kill_when(node: Node, stage: str, reached: Callable[[], bool]) -> None:
    process = node.start("stage", stage)
    while process.poll() is None and not reached():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the stage was done before it could be killed: give it more to do"


def sft_receipt(node: Node) -> receipt.Receipt:
    return stage_receipt(node, "sft")


def logged_steps(root: Path, metrics: Path) -> list[int]:
    lines = [json.loads(line) for line in (root / metrics).read_text().splitlines()]
    return [line["step"] for line in lines if "sft/loss" in line]


def test_packing_takes_the_results_and_nothing_else(done: Node, node: Node) -> None:
    with tarfile.open(done.root / "results.tar") as tar:
        names = {name for name in tar.getnames() if not name.startswith(str(paths.METRICS))}
    outputs = {path.as_posix() for stage in STAGES for path in graph.load(done.root)[stage].outs}
    receipts = {paths.stage_receipt(stage).as_posix() for stage in STAGES}
    assert {name for name in names if not any(name.startswith(f"{out}/") for out in outputs)} == outputs | receipts
    assert "no stage has left a receipt" in refused(node, "pack")
    assert "register has left no receipt" in refused(done, "pack", "register")


def test_packing_leaves_results_of_other_params_out_by_name_and_refuses_them_if_they_are_asked_for(
    done: Node, project: Path, tmp_path: Path
) -> None:
    node = done.copy(tmp_path / "node")
    for root in (node.root, project):
        edit(root, "rloo", iterations=2)
    packed = node.run("pack", "--to", "current.tar")
    assert packed.returncode == 0, packed.stderr
    assert "without the results of rloo, evaluate" in packed.stdout
    new = [one.stage for one, new in adopt(project, node.root / "current.tar", accept_versions=False) if new]
    assert new == [stage for stage in STAGES if stage not in ("rloo", "evaluate")]
    message = refused(node, "pack", "evaluate")
    assert "made of other params, code or inputs than are here now: evaluate" in message
    assert "nightshift stage evaluate" in message


def test_results_can_be_packed_while_a_stage_runs(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    edit(node.root, "evaluate", init_states=3)
    with Session(node.root):
        packed = node.run("pack")
    assert packed.returncode == 0, packed.stderr
    assert "without the results of opponent, evaluate" in packed.stdout


PACK_WHILE_A_STAGE_ENDS = """
import subprocess, sys
from pathlib import Path
from nightshift.pipeline import receipt

add_unfinished = receipt._add_unfinished

def add_when_it_is_done(tar, stage, *where):
    subprocess.run([sys.executable, "-S", "-m", "nightshift", "stage", stage], check=True)
    add_unfinished(tar, stage, *where)

receipt._add_unfinished = add_when_it_is_done
receipt.pack(Path.cwd(), [], Path("results.tar"))
"""


def test_a_stage_that_is_done_while_it_is_packed_is_packed_as_done(done: Node, tmp_path: Path) -> None:
    """It takes its checkpoints with it."""
    node = done.copy(tmp_path / "node")
    shutil.rmtree(node.root / paths.SFT_POLICY)
    (node.root / paths.stage_receipt("sft")).unlink()
    kill_after_checkpoint(node, "sft")
    packed = node.python(PACK_WHILE_A_STAGE_ENDS)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(node.root / "results.tar") as tar:
        names = set(tar.getnames())
    assert {paths.stage_receipt("sft").as_posix(), (paths.SFT_POLICY / files.MANIFEST).as_posix()} <= names
    assert not [name for name in names if name.startswith((paths.STATE / "sft").as_posix())]


def test_inputs_that_were_brought_to_the_node_do_not_make_a_result_outdated(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    for stage in ("states", "collect", "dataset", "start"):
        (node.root / paths.stage_receipt(stage)).unlink()
    assert "without" not in node.run("pack", "--to", "brought.tar").stdout
    assert node.run("pack", "sft").returncode == 0


def leave_out(root: Path, *folders: Path) -> None:
    for folder in folders:
        for path in (path for path in (root / folder).iterdir() if path.name != files.MANIFEST):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_stage_that_does_not_read_a_folder_that_was_left_out_records_it_as_it_was_made(
    done: Node, tmp_path: Path
) -> None:
    node = done.copy(tmp_path / "node")
    leave_out(node.root, paths.DEMOS, paths.DATASET)
    assert receipt.stale(Session(node.root)) == []
    (node.root / paths.stage_receipt("rloo")).unlink()
    assert receipt.stale(Session(node.root)) == ["rloo", "evaluate"]
    ran = node.run("stage", "rloo")
    assert ran.returncode == 0, ran.stderr
    before, after = (stage_receipt(each, "rloo") for each in (done, node))
    assert after.inputs == before.inputs
    assert (after.fingerprint, after.outputs) == (before.fingerprint, before.outputs)


def stage_receipt(node: Node, stage: str) -> receipt.Receipt:
    return next(one for one in receipt.read(node.root) if one.stage == stage)


def test_a_folder_is_packed_whole_until_the_stage_that_reads_it_first_is_done(done: Node, tmp_path: Path) -> None:
    node = done.copy(tmp_path / "node")
    (node.root / paths.stage_receipt("sft")).unlink()
    packed = node.run("pack", "--leave-out", "data/demos", "--leave-out", "data/dataset", "--to", "some.tar.gz")
    assert "data/dataset is not left out: sft, which reads it, is not done" in packed.stdout
    with tarfile.open(node.root / "some.tar.gz", "r:gz") as tar:
        brought = [Path(name) for name in tar.getnames()]
    assert [path for path in brought if path.is_relative_to(paths.DEMOS)] == [paths.DEMOS / files.MANIFEST]
    assert paths.DATASET / "train.safetensors" in brought


def go_on(home: Path, node: Node, root: Path, *left_out: Path) -> Node:
    """Another node, with the project's files and an archive of what was done on the first."""
    options = [option for path in left_out for option in ("--leave-out", str(path))]
    packed = node.run("pack", *options, "--to", "results.tar.xz")
    assert packed.returncode == 0, packed.stderr
    other = node.another(root)
    other.receive(home)
    with tarfile.open(node.root / "results.tar.xz", "r:xz") as tar:
        files.extract(tar, root)
    assert all(files.is_left_out(root / path) for path in left_out)
    return other


def test_nodes_that_go_on_one_after_the_other_without_demos_and_dataset_end_as_one_node_does(
    home: Path, done: Node, node: Node, tmp_path: Path
) -> None:
    ran = node.run("stage", "states", "collect", "dataset", "start")
    assert ran.returncode == 0, ran.stderr
    kill_after_checkpoint(node, "sft")
    second = go_on(home, node, tmp_path / "second", paths.DEMOS)
    resumed_from = max(int(path.name[-8:]) for path in second.root.glob(".state/sft/*/step-*"))
    assert receipt.stale(Session(second.root))[0] == "sft"
    ran = second.run("stage", "sft")
    assert ran.returncode == 0, ran.stderr
    assert resumed_from >= SFT_STEPS[0]
    assert logged_steps(second.root, sft_receipt(second).metrics) == SFT_STEPS
    third = go_on(home, second, tmp_path / "third", paths.DEMOS, paths.DATASET)
    ran = third.run("stage", *receipt.stale(Session(third.root)))
    assert ran.returncode == 0, ran.stderr
    made = {one.stage: (one.fingerprint, one.inputs, one.outputs) for one in receipt.read(third.root)}
    assert made == {one.stage: (one.fingerprint, one.inputs, one.outputs) for one in receipt.read(done.root)}


def test_an_evaluation_that_was_killed_goes_on_on_another_node(home: Path, done: Node, tmp_path: Path) -> None:
    nodes = [done.copy(tmp_path / name) for name in ("first", "whole")]
    for node in nodes:
        edit(node.root, "evaluate", init_states=50)
        assert node.run("stage", "opponent").returncode == 0
    first, whole = nodes
    kill_when(first, "evaluate", lambda: sum(len(one.read_text().splitlines()) for one in journals(first)) >= 10)
    second = go_on(home, first, tmp_path / "second")
    shutil.copy(first.root / paths.PARAMS, second.root / paths.PARAMS)
    (brought,) = journals(second)
    marked = [{**one, "length": 99} for one in files.read_journal(brought)]  # no episode that is played there has it
    files.write_journal(brought, marked)
    outcomes = []
    for node in (second, whole):
        ran = node.run("stage", "evaluate")
        assert ran.returncode == 0, ran.stderr
        outcomes.append(json.loads((node.root / paths.EVALUATION_OUTCOMES).read_text())["sft"])
    assert len(marked) >= 10
    assert [one for one in outcomes[0] if one["length"] == 99] == marked
    assert [{**one, "length": 0} for one in outcomes[0]] == [{**one, "length": 0} for one in outcomes[1]]
    assert not list((second.root / paths.STATE / "evaluate").iterdir())


def journals(node: Node) -> list[Path]:
    """What the clone has played in an evaluation that is not done."""
    return list((node.root / paths.STATE / "evaluate").glob("*/sft.jsonl"))


def test_a_folder_is_left_out_only_if_its_manifest_can_stand_for_it(done: Node, node: Node) -> None:
    message = refused(done, "pack", "--leave-out", "data/demo", "--to", "some.tar")
    assert "data/demo cannot be left out: no stage has an output of this name" in message
    message = refused(done, "pack", "--leave-out", str(paths.choice("rloo")), "--to", "some.tar")
    assert "rloo.json cannot be left out: it has no manifest.json that could stand for it" in message
    assert node.run("stage", "states").returncode == 0
    assert node.run("pack", "--leave-out", str(paths.DEMOS)).returncode == 0, "there are no demos yet"


@pytest.mark.parametrize(
    ("stage", "change", "folder"),
    [("dataset", {"validation_share": 0.5}, paths.DEMOS), ("sft", {"steps": 500}, paths.DATASET)],
)
def test_a_stage_that_reads_a_folder_that_was_left_out_says_so(
    done: Node, tmp_path: Path, stage: str, change: dict[str, Any], folder: Path
) -> None:
    node = done.copy(tmp_path / "node")
    leave_out(node.root, folder)
    edit(node.root, stage, **change)
    message = " ".join(refused(node, "stage", stage).split())
    assert f"of the folder only {files.MANIFEST} is here, the rest was left out of an archive" in message
    assert "bring the folder from where it was made" in message


# At home


def copied(home: Path, root: Path, patch: pytest.MonkeyPatch) -> Path:
    """A copy of a project, and the test inside it."""
    shutil.copytree(home, root, symlinks=True)
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    return root


@pytest.fixture
def project(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which nothing has run."""
    return copied(home, tmp_path / "home", monkeypatch)


@pytest.fixture(scope="module")
def adopted(home: Path, done: Node, migrated_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has adopted all results of the node."""
    root = tmp_path_factory.mktemp("adopted") / "home"
    shutil.copytree(home, root, symlinks=True)
    add_store(root, migrated_store)
    store = f"sqlite:///{root / paths.MLFLOW_DATABASE}"  # other tests leave theirs in the environment
    ended = nightshift(root, "adopt", str(done.root / "results.tar"), MLFLOW_TRACKING_URI=store)
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[1] for line in ended.stdout.splitlines()] == STAGES
    return root


@pytest.fixture
def adopted_copy(adopted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copied(adopted, tmp_path / "home", monkeypatch)


def stage_runs(root: Path) -> dict[str, list[Run]]:
    client = mlflow_tracking.connect(root)
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    found: dict[str, list[Run]] = {}
    for run in client.search_runs([experiment.experiment_id]):
        found.setdefault(run.data.tags[mlflow_tracking.STAGE], []).append(run)
    return found


def test_an_adopted_result_is_fresh(adopted: Path, done: Node) -> None:
    shown = nightshift(adopted, "plan")
    assert shown.returncode == 0, shown.stderr
    marks = {line.split()[0]: line.split()[2] for line in shown.stdout.splitlines() if "○" in line or "●" in line}
    assert marks == dict.fromkeys(RAN, "fresh") | {"register": "stale"}
    lock = yaml.safe_load((adopted / paths.DVC_LOCK).read_text())["stages"]
    for one in receipt.read(done.root):
        assert {entry["path"]: entry["md5"] for entry in lock[one.stage]["outs"]} == one.outputs
        assert {entry["path"]: entry["md5"] for entry in lock[one.stage]["deps"]} == one.inputs


def test_mlflow_has_the_runs_that_the_stages_would_have_made_here(
    adopted: Path, done: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{adopted / paths.MLFLOW_DATABASE}")
    runs = stage_runs(adopted)
    assert set(runs) == {*RAN, "pipeline"}
    (sft,), (evaluate,), (parent,) = runs["sft"], runs["evaluate"], runs["pipeline"]
    assert (sft.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert sft.data.tags[mlflow_tracking.PARENT] == parent.info.run_id
    assert sft.data.params["sft.steps"] == "400"
    client = mlflow_tracking.connect(adopted)
    assert [metric.step for metric in client.get_metric_history(sft.info.run_id, "sft/loss")] == SFT_STEPS
    assert [used.dataset.digest for used in sft.inputs.dataset_inputs] == [sft_receipt(done).inputs["data/dataset"]]
    kept = [entry.path for entry in client.list_artifacts(evaluate.info.run_id, paths.EVALUATION.name)]
    assert f"{paths.EVALUATION.name}/{paths.EVALUATION_REPORT.name}" in kept


def test_adopting_again_changes_nothing(adopted_copy: Path, done: Node) -> None:
    before = (adopted_copy / paths.DVC_LOCK).read_bytes()
    assert [new for _, new in adopt(adopted_copy, done.root, accept_versions=False)] == [False] * len(STAGES)
    assert (adopted_copy / paths.DVC_LOCK).read_bytes() == before
    assert {len(found) for found in stage_runs(adopted_copy).values()} == {1}


def test_a_training_stage_that_is_not_chosen_is_skipped_on_the_node_and_stays_skipped_at_home(
    adopted_copy: Path, done: Node, tmp_path: Path
) -> None:
    node = done.copy(tmp_path / "node")
    for root in (node.root, adopted_copy):
        choose(root)
    ran = node.run("stage", "choose", "rloo", "evaluate")
    assert ran.returncode == 0, ran.stderr
    assert "– rloo  skipped (not in algorithms)" in ran.stdout
    assert [one.stage for one in receipt.read(node.root) if one.skipped] == ["rloo", "rlpd", "start"]
    new = [one.stage for one, new in adopt(adopted_copy, node.root, accept_versions=False) if new]
    assert new == ["choose", "rloo", "evaluate"]
    assert (adopted_copy / paths.RLOO_POLICY / paths.SKIPPED).exists()
    runs = stage_runs(adopted_copy)
    assert (len(runs["evaluate"]), len(runs["rloo"])) == (2, 1), "MLflow has no run of a stage that was skipped"
    with Session(adopted_copy) as session:
        assert not any(session.store.reasons(stage) for stage in STAGES)


def test_other_versions_are_refused_unless_accepted_and_then_stay_on_record(
    adopted_copy: Path, done: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = sft_receipt(done).versions["torch"]
    before = (adopted_copy / paths.DVC_LOCK).read_bytes()
    monkeypatch.syspath_prepend(install(tmp_path / "other", torch="9.9.9"))
    with pytest.raises(ProjectError, match=rf"with other versions .*: torch {there} there, 9\.9\.9 here") as refusal:
        adopt(adopted_copy, done.root, accept_versions=False)
    assert "--accept-versions" in refusal.value.next_step
    assert (adopted_copy / paths.DVC_LOCK).read_bytes() == before
    new = {one.stage for one, new in adopt(adopted_copy, done.root, accept_versions=True) if new}
    assert new == {stage for stage in STAGES if "torch" in graph.load(done.root)[stage].versions}
    newest = stage_runs(adopted_copy)["sft"][0]
    assert newest.data.tags[f"{NODE}.torch"] == there
    lock = yaml.safe_load((adopted_copy / paths.DVC_LOCK).read_text())["stages"]
    assert lock["sft"]["params"]["versions.yaml"]["torch"] == "9.9.9"
    assert next(one for one in receipt.read(adopted_copy) if one.stage == "sft").versions["torch"] == there


def untouched(project: Path) -> bool:
    return not any((project / path).exists() for path in (paths.DVC_LOCK, paths.INIT_STATES, paths.SFT_POLICY))


def other_params(project: Path, _: Path) -> None:
    edit(project, "sft", learning_rate=0.5)


def other_code(project: Path, _: Path) -> None:
    with (project / "src/nightshift/policies/base.py").open("a") as code:
        code.write("# edited\n")


def other_deps(project: Path, _: Path) -> None:
    path = project / paths.DVC_YAML
    path.write_text(path.read_text().replace("      - src/nightshift/cluster/heartbeat.py\n", ""))


def other_input(_: Path, brought: Path) -> None:
    """The dataset that sft was trained on is not the one that is brought with it."""
    path = brought / paths.stage_receipt("dataset")
    left = json.loads(path.read_text())
    (brought / paths.DATASET / "more").touch()
    left["outputs"][str(paths.DATASET)] = checksums.md5(brought, paths.DATASET)
    path.write_text(json.dumps(left))


def damaged_output(_: Path, brought: Path) -> None:
    with (brought / paths.SFT_POLICY / "policy.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"?")


def lost_output(_: Path, brought: Path) -> None:
    shutil.rmtree(brought / paths.SFT_POLICY)


def left_out_output(_: Path, brought: Path) -> None:
    leave_out(brought, paths.DEMOS)


def damaged_receipt(_: Path, brought: Path) -> None:
    (brought / paths.stage_receipt("sft")).write_text('{"stage": "sft"')


def no_receipts(_: Path, brought: Path) -> None:
    shutil.rmtree(brought / paths.RECEIPTS)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (other_params, ProjectError, r"sft on .* params\.yaml: sft\.learning_rate 0\.001 there, 0\.5 here"),
        (other_code, ProjectError, "computed from something else than is here: src/nightshift/policies"),
        (other_deps, ProjectError, "dvc.yaml: the deps of sft"),
        (other_input, ProjectError, "sft on .* something else than is here: data/dataset"),
        (damaged_output, DataError, "models/sft, made by sft on .*, is damaged: its md5 is"),
        (lost_output, DataError, "models/sft, made by sft on .*, is missing"),
        (left_out_output, DataError, "data/demos, made by collect on .*, was left out of what was brought, and is not"),
        (damaged_receipt, DataError, r"the receipt .*sft\.json is damaged"),
        (no_receipts, DataError, "has no receipts of stages"),
    ],
)
def test_a_result_that_does_not_belong_here_is_refused_by_name_before_anything_is_changed(
    project: Path,
    done: Node,
    tmp_path: Path,
    spoil: Callable[[Path, Path], None],
    error: type[NightshiftError],
    words: str,
) -> None:
    brought = done.copy(tmp_path / "brought").root
    spoil(project, brought)
    with pytest.raises(error, match=words) as refusal:
        adopt(project, brought, accept_versions=False)
    assert refusal.value.next_step
    assert untouched(project)


def test_a_result_is_adopted_without_an_output_that_was_left_out_if_it_is_here(
    adopted_copy: Path, done: Node, tmp_path: Path
) -> None:
    brought = done.copy(tmp_path / "brought").root
    leave_out(brought, paths.DEMOS)
    (adopted_copy / paths.DVC_LOCK).unlink()
    new = [one.stage for one, new in adopt(adopted_copy, brought, accept_versions=False) if new]
    assert new == STAGES
    files.verify_folder(adopted_copy / paths.DEMOS, "")


def test_an_input_that_is_not_here_is_called_missing(project: Path, done: Node, tmp_path: Path) -> None:
    assert done.run("pack", "sft", "--to", str(tmp_path / "sft.tar")).returncode == 0
    words = "sft on .* was computed from data/dataset, data/champion/start: missing here"
    with pytest.raises(ProjectError, match=words) as refusal:
        adopt(project, tmp_path / "sft.tar", accept_versions=False)
    assert "bring the results of the stages before it too" in refusal.value.next_step
    assert untouched(project)


def crafted(project: Path, brought: Path, outputs: Sequence[str]) -> receipt.Receipt:
    """A receipt of `states` that fits the project in all but its outputs, each of which is there with its md5."""
    session = Session(project)
    definition = session.graph["states"]
    for output in outputs:
        (brought / output).parent.mkdir(parents=True, exist_ok=True)
        (brought / output).write_text("brought")
    written = receipt.Receipt(
        stage="states",
        fingerprint=fingerprint("states", session),
        params=sections("states", session),
        versions=versions("states", session),
        inputs={path.as_posix(): checksums.md5(project, path) for path in definition.deps},
        outputs={output: checksums.md5(brought, Path(output)) for output in outputs},
        commit="unknown",
        host="node",
        seconds=1.0,
        skipped=False,
    )
    files.write_json(brought / paths.stage_receipt("states"), written.model_dump(mode="json"))
    return written


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (["data/init_states", ".git/hooks/post-commit"], r"than dvc\.yaml: \.git/hooks/post-commit more"),
        (["data/init_states", "src/nightshift/files.py"], r"than dvc\.yaml: src/nightshift/files\.py more"),
        (["data/init_states", "../outside"], r"than dvc\.yaml: \.\./outside more"),
        ([], r"than dvc\.yaml: no data/init_states"),
    ],
)
def test_a_receipt_whose_outputs_are_not_those_of_its_stage_is_refused_and_copies_nothing(
    project: Path, tmp_path: Path, outputs: list[str], words: str
) -> None:
    brought = tmp_path / "brought" / "job"
    crafted(project, brought, outputs)
    with pytest.raises(DataError, match=f"the receipt of states on node names other outputs {words}"):
        adopt(project, brought, accept_versions=False)
    assert untouched(project)
    kept = [project / output for output in outputs if (project / output).is_file()]
    assert all(path.read_text() != "brought" for path in kept)


def test_an_artifact_outside_what_was_brought_is_refused_before_anything_is_changed(
    project: Path, tmp_path: Path
) -> None:
    left = crafted(project, tmp_path / "brought", [paths.INIT_STATES.as_posix()])
    files.append_json(tmp_path / "brought" / left.metrics, {"artifact": "/etc/hostname"})
    with pytest.raises(DataError, match="names the artifact /etc/hostname, which is outside"):
        adopt(project, tmp_path / "brought", accept_versions=False)
    assert untouched(project)


def test_a_receipt_whose_fingerprint_is_no_sha256_is_damaged(project: Path, tmp_path: Path) -> None:
    left = crafted(project, tmp_path / "brought", [paths.INIT_STATES.as_posix()]).model_dump(mode="json")
    files.write_json(tmp_path / "brought" / paths.stage_receipt("states"), left | {"fingerprint": "../../../secret"})
    with pytest.raises(DataError, match=r"the receipt .*states\.json is damaged"):
        adopt(project, tmp_path / "brought", accept_versions=False)


def test_a_file_that_is_no_archive_is_refused(project: Path, done: Node, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.tar does not exist"):
        adopt(project, tmp_path / "nothing.tar", accept_versions=False)
    cut = tmp_path / "cut.tar"
    cut.write_bytes((done.root / "results.tar").read_bytes()[:5000])
    with pytest.raises(DataError, match=r"cut\.tar is no tar archive, or a damaged one"):
        adopt(project, cut, accept_versions=False)
    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(lzma.compress(os.urandom(5000))[:3000] + bytes(3000))
    with pytest.raises(DataError, match=r"damaged\.tar\.xz is no tar archive, or a damaged one"):
        adopt(project, damaged, accept_versions=False)
    assert untouched(project)
    assert not list((project / paths.STATE).glob("adopt-*"))


def test_what_was_brought_may_be_read_only(adopted_copy: Path, done: Node, tmp_path: Path) -> None:
    brought = done.copy(tmp_path / "brought").root
    for path in brought.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    shutil.rmtree(adopted_copy / paths.SFT_POLICY)
    assert [one.stage for one, new in adopt(adopted_copy, brought, accept_versions=False) if new] == ["sft"]
    assert files.identity(adopted_copy / paths.SFT_POLICY) == files.identity(brought / paths.SFT_POLICY)
    assert all(path.stat().st_mode & 0o200 for path in (adopted_copy / paths.SFT_POLICY).rglob("*"))
