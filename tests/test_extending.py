"""What other packages add: the examples of docs/extending.md, installed by pip, in the stages that use them."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mlflow.tracking import MlflowClient

from nightshift import config, envs, policies
from nightshift.cli import data_commands
from nightshift.cluster import version_check
from nightshift.config import merged
from nightshift.data import dataset_store, formats
from nightshift.data.episode import Episode, from_trajectory
from nightshift.envs import registry
from nightshift.errors import ConfigError, DataError, NightshiftError, PluginError
from nightshift.pipeline import run
from nightshift.pipeline.run import Session
from nightshift.project import paths
from nightshift.rewards.reward import open_reward
from nightshift.rollouts.experts import decide
from tests.conftest import REPOSITORY, add_store, make_project, small_params
from tests.data.test_decisions import DISCOUNT, PROVENANCE, trajectory
from tests.stages.test_rlpd import SMALL as RLPD

EXAMPLES = REPOSITORY / "examples"
MODULES = ("nightshift_slider", "nightshift_residual", "nightshift_hurry", "nightshift_csv")
POLICY = {
    "family": "residual",
    "inputs": ["block", "target"],
    "chunk": 1,
    "head": "tanh_gaussian",
    "width": 16,
    "blocks": 1,
}
PARAMS: dict[str, Any] = {
    "algorithms": ["rloo", "rlpd"],
    "env": {"suite": "slider", "horizon": 30},
    "states": {"validation_share": 0.06},
    "policy": POLICY,
    "dataset": {"sources": ["demos", "by_hand"]},
    "sft": {"steps": 50},
    "rloo": {"iterations": 1, "groups": 2, "learn_std": False},
    "rlpd": {**RLPD, "steps": 30, "training_starts": 20, "reward": "hurry", "validation": {"every": 30}},
    "evaluate": {"init_states": 3},
}
ENV = config.Env.model_validate(small_params()["env"])
COST = np.float32(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example packages, without network."""
    sources = tmp_path_factory.mktemp("sources")
    shutil.copytree(EXAMPLES, sources, dirs_exist_ok=True)
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(folder)]
    packages = [str(project.parent) for project in sorted(sources.glob("*/pyproject.toml"))]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(site: Path) -> Iterator[Path]:
    """The packages are on the path of this module's tests."""
    with on_path(site):
        yield site


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        registry.find.cache_clear()
        yield
    registry.find.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]


def write_demos(folder: Path) -> Path:
    """Two demos of the slider as somebody else might have them."""
    env = config.Env.model_validate(merged(small_params(), PARAMS)["env"])
    (task,) = envs.tasks(env)
    simulator = envs.make(task, env)
    folder.mkdir()
    for number in range(2):
        observation, rows, solved = simulator.reset("train", number), [], False
        while not solved:
            action = decide("slider", simulator.scene())
            rows.append([*observation["block"], *observation["target"], *action])
            observation, solved = simulator.step(action)
        with (folder / f"{number}.csv").open("w", newline="") as file:
            names = {"block": 4, "target": 2, "action": 2}
            csv.writer(file).writerows([[f"{name}.{i}" for name, size in names.items() for i in range(size)], *rows])
    return folder


@pytest.fixture(scope="module")
def rewarded() -> list[Episode]:
    """Every episode that the reward made while the stages ran."""
    return []


@pytest.fixture(scope="module")
def rewarded_demos() -> list[Episode]:
    """Every demo that it made then."""
    return []


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    migrated_store: Path,
    installed: Path,
    rewarded: list[Episode],
    rewarded_demos: list[Episode],
) -> Path:
    """A project that uses all four, with demos imported by the format, whose stages have all run."""
    root = make_project(tmp_path_factory.mktemp("extending") / "project")
    add_store(root, migrated_store)
    (root / "params.yaml").write_text(yaml.safe_dump(merged(small_params(), PARAMS)))
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        keep_made_by(patch, "episode", rewarded)
        keep_made_by(patch, "demo", rewarded_demos)
        demos = write_demos(root.parent / "demos")
        data_commands.import_episodes(demos, "csv", "by_hand", "slide", skip_broken=False)
        with Session(root) as session:
            done = {stage: run.ensure(stage, session).status for stage in session.graph}
    assert {stage for stage, status in done.items() if status == "ran"} == set(done) - {"start"}
    return root


def keep_made_by(patch: pytest.MonkeyPatch, method: str, kept: list[Episode]) -> None:
    reward = type(open_reward("hurry", ENV))
    make = getattr(reward, method)

    def made(*arguments: Any) -> Episode:
        kept.append(make(*arguments))
        return kept[-1]

    patch.setattr(reward, method, made)


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")


@pytest.fixture
def project(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(finished, monkeypatch)
    return finished


def stale(root: Path) -> dict[str, str]:
    """The stages that are stale because of a version, each with the first reason."""
    found = {status.name: status.reasons for status in run.statuses(root) if not status.skipped}
    return {name: reasons[0] for name, reasons in found.items() if reasons and str(paths.VERSIONS) in reasons[0]}


def test_episodes_of_a_format_of_another_package_are_in_the_dataset(project: Path) -> None:
    dataset = dataset_store.read(project / paths.DATASET)
    sources = [episode.provenance.source for split in dataset_store.SPLITS for episode in dataset.episodes(split)]
    assert (sources.count("csv"), sources.count("expert")) == (2, 4)


def test_the_suite_of_another_package_and_its_version_are_conditions_of_the_evaluation(project: Path) -> None:
    report = json.loads((project / paths.EVALUATION_REPORT).read_text())
    assert report["grid"]["suite"] == "slider"
    assert report["conditions"]["versions"]["nightshift-slider"] == "1.0"


def test_rlpd_learned_from_the_reward_of_another_package(project: Path, rewarded: list[Episode]) -> None:
    rounds = json.loads((project / paths.RLPD_POLICY / paths.HISTORY).read_text())["iterations"]
    assert len(rewarded) == len(rounds) * PARAMS["rlpd"]["episodes_at_once"]
    for episode in rewarded:
        ended = np.float32(episode.success) - COST
        assert (episode.rewards[-2], set(episode.rewards[:-2].tolist())) == (ended, {float(-COST)})


def test_demos_have_the_reward_of_another_package_too(project: Path, rewarded_demos: list[Episode]) -> None:
    demos = dataset_store.read(project / paths.DATASET).episodes("train")
    for demo, episode in zip(demos, rewarded_demos, strict=True):
        np.testing.assert_allclose(episode.rewards[:-1], demo.rewards[:-1] - COST, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("installed")
def test_a_demo_and_experience_of_the_same_steps_have_the_same_return() -> None:
    """Also with chunks: a decision's reward is the discounted sum over its control steps."""
    reward, played = open_reward("hurry", ENV), trajectory(5, 2, success=True)
    decisions = reward.episode(played, PROVENANCE, DISCOUNT).rewards[:-1]
    steps = reward.demo(from_trajectory(trajectory(5, 1, success=True), PROVENANCE)).rewards[:-1]
    assert (len(decisions), len(steps)) == (3, 5)
    in_decisions = np.sum(decisions * DISCOUNT ** (2 * np.arange(3)))
    assert in_decisions == pytest.approx(np.sum(steps * DISCOUNT ** np.arange(5)), abs=1e-6)


def test_the_registry_and_the_policy_say_which_package_the_family_is_of(project: Path) -> None:
    assert json.loads((project / paths.SFT_POLICY / policies.SPEC).read_text())["package"] == "nightshift-residual 1.0"
    client = MlflowClient(f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    (version,) = client.search_model_versions("name = 'nightshift-libero-mini'")
    assert re.match(r"nightshift-residual 1\.0 \(code [0-9a-f]{12}; torch [0-9.]+\)", version.tags["policy.package"])


def test_nothing_is_stale_until_a_package_changes(project: Path) -> None:
    assert stale(project) == {}


@pytest.mark.parametrize(
    ("package", "key", "expected"),
    [
        ("nightshift_slider", "plugin-suite", {"states", "collect", "rloo", "rlpd", "opponent", "evaluate"}),
        ("nightshift_residual", "plugin-policy", {"sft", "rloo", "rlpd", "opponent", "evaluate", "register"}),
        ("nightshift_hurry", "plugin-reward", {"rlpd"}),
        ("nightshift_csv", "", set()),
    ],
)
def test_another_version_of_a_package_makes_the_stages_stale_that_use_it(
    project: Path, site: Path, package: str, key: str, expected: set[str]
) -> None:
    metadata = site / f"{package}-1.0.dist-info" / "METADATA"
    before = metadata.read_text()
    metadata.write_text(before.replace("\nVersion: 1.0\n", "\nVersion: 1.1\n"))
    try:
        found = stale(project)
    finally:
        metadata.write_text(before)
    assert set(found) == expected
    assert all(f"{key} {package.replace('_', '-')} 1.0 (" in reason and "1.1 (" in reason for reason in found.values())


def test_an_edit_of_its_code_does_so_under_the_same_version(project: Path, site: Path) -> None:
    module = site / "nightshift_hurry.py"
    before = module.read_text()
    module.write_text(before.replace("COST = 0.02", "COST = 0.03"))
    try:
        assert set(stale(project)) == {"rlpd"}
    finally:
        module.write_text(before)


def test_a_node_with_another_version_of_a_package_is_refused(installed: Path) -> None:
    here = version_check.versions("slider")
    assert version_check.mismatch_error(here, "slider") is None
    other = version_check.mismatch_error({**here, "nightshift-residual": "nightshift-residual 0.9"}, "slider")
    assert other is not None
    assert "it has nightshift-residual nightshift-residual 1.0" in other.what


def test_its_section_is_checked_strictly_by_its_own_type(installed: Path) -> None:
    raw = merged(small_params(), {**PARAMS, "policy": {**POLICY, "blocks": 0, "depth": 3}})
    with pytest.raises(ConfigError) as error:
        config.validate(raw, Path("params.yaml"))
    assert "policy.blocks: input should be greater than or equal to 1, got 0" in error.value.what
    assert "policy.depth: unknown key (value 3)" in error.value.what


def test_a_policy_whose_package_is_missing_says_what_to_install(finished: Path, site: Path) -> None:
    for module in [name for name in sys.modules if name.startswith("nightshift_residual")]:
        del sys.modules[module]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [folder for folder in sys.path if folder != str(site)])
        with pytest.raises(PluginError) as error:
            policies.load(finished / paths.SFT_POLICY)
    assert "needs the package nightshift-residual 1.0, which is not installed here" in error.value.what
    assert error.value.next_step == "pip install nightshift-residual==1.0"


def declare(folder: Path, package: str, group: str, **entries: str) -> None:
    """What pip leaves of a package with these entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {where}" for name, where in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.mark.parametrize(
    ("group", "look_up", "built_in"),
    [
        ("nightshift.suites", registry.find, "libero_mini"),
        ("nightshift.policies", lambda name: policies.build({"family": name}), "vla"),
        ("nightshift.rewards", lambda name: open_reward(name, ENV), "simulator"),
        ("nightshift.formats", formats.reader, "hdf5"),
    ],
)
def test_a_faulty_package_is_named_with_its_entry_point_and_the_reason(
    tmp_path: Path, group: str, look_up: Any, built_in: str
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('needs a GPU')")
    declare(tmp_path / "one", "their-package", group, theirs="broken:X", odd="json:JSONDecoder.decode")
    declare(tmp_path / "two", "copy-of-it", group, **{built_in: "broken:X"})
    with on_path(tmp_path), on_path(tmp_path / "one"):
        with pytest.raises(
            PluginError, match=r"theirs = broken:X of the package their-package 1\.0 cannot be imp"
        ) as e:
            look_up("theirs")
        assert "RuntimeError: needs a GPU" in e.value.what
        with pytest.raises(PluginError, match=r"odd = .* of the package their-package 1\.0 is not "):
            look_up("odd")
        with on_path(tmp_path / "two"), pytest.raises(PluginError, match=f"the name {built_in} is taken twice") as e:
            look_up(built_in)
        assert "Nightshift itself" in e.value.what
        assert "copy-of-it 1.0" in e.value.what


@pytest.mark.parametrize(
    ("look_up", "expected"),
    [
        (registry.find, ("libero_mini", "slider")),
        (lambda name: policies.build({"family": name}), ("gaussian_mlp", "residual")),
        (lambda name: config.validate(merged(small_params(), {"policy": {"family": name}}), Path("p")), ("residual",)),
        (lambda name: config.validate(merged(small_params(), {"rlpd": {"reward": name}}), Path("p")), ("hurry",)),
        (lambda name: config.validate(merged(small_params(), {"nightly": {"format": name}}), Path("p")), ("csv",)),
        (formats.reader, ("hdf5", "csv")),
    ],
)
def test_an_unknown_name_is_refused_with_all_that_there_are(
    installed: Path, look_up: Any, expected: tuple[str, ...]
) -> None:
    with pytest.raises(NightshiftError) as error:
        look_up("nonsense")
    assert all(name in str(error.value) for name in expected)


def test_a_format_that_only_reads_is_not_written(installed: Path) -> None:
    with pytest.raises(PluginError, match="is not a format with the function write"):
        formats.writer("csv")
    with pytest.raises(DataError, match="the format 'hdf5' is not supported"):
        formats.writer("hdf5")


def test_looking_for_packages_imports_none(installed: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(installed)!r})
from nightshift.envs import registry
from nightshift.project import packages
registry.names()
packages.installed_plug_ins()
assert not set({MODULES!r}) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("content", ["", "block.0,action.0\n"])
def test_the_format_refuses_a_file_without_rows_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text(content)
    (episode,) = formats.reader("csv").list_episodes(tmp_path, "slide")
    with pytest.raises(DataError, match=r"empty\.csv has no row"):
        episode.load()
