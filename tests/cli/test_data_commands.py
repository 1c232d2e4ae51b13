"""`nightshift import`, `export` and `dataset stats` as a person meets them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from nightshift import config, files
from nightshift.cli import data_commands, dataset_view
from nightshift.data import dataset_store, importing, sources
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.formats import hdf5, lerobot
from nightshift.data.limits import Limits
from nightshift.data.statistics import Histogram
from nightshift.errors import DataError
from nightshift.pipeline import run
from nightshift.pipeline.job import Job
from nightshift.pipeline.run import Session
from nightshift.project import paths
from nightshift.stages import dataset, sft
from tests.command import dvc
from tests.conftest import edit, git, nightshift
from tests.data import examples
from tests.data.formats.hdf5_files import libero_demo, write_libero
from tests.data.formats.test_rlds_tfrecord import TINY_ARM

COMMAND = str(Path(sys.prefix) / "bin" / "nightshift")


def demo_file(path: Path, count: int = 6, steps: int = 5, **spoiled: dict[str, Any]) -> Path:
    demos = {f"demo_{number}": libero_demo(steps=steps + number % 3, seed=number) for number in range(count)}
    for name, changes in spoiled.items():
        demos[name] |= changes
    return write_libero(path, demos)


def take(path: Path, name: str = "goal", *, skip_broken: bool = False) -> None:
    data_commands.import_episodes(path, "hdf5", name, "", skip_broken=skip_broken)


def with_nan(steps: int = 6) -> dict[str, Any]:
    actions = np.zeros((steps, 7))
    actions[3, 2] = np.nan
    return {"actions": actions}


def test_an_import_is_an_episode_store_with_sums_and_says_how_to_use_it(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = demo_file(tmp_path / "goal.hdf5", demo_2={"rewards": np.zeros(7, np.uint8)})
    take(path)
    printed = capsys.readouterr().out
    assert "data/imports/goal: 5 episodes" in printed
    assert "left out: 1 episode that did not succeed" in printed
    assert "5 episodes: the source has no observation after the last action" in printed
    assert "to train on it, write in params.yaml under dataset:\n  sources: [goal]\n" in printed
    assert printed.endswith("  git add data/imports/goal.dvc\n")
    files.verify_folder(paths.IMPORTS / "goal", "")
    kept = [entry for entry in hdf5.list_episodes(path, "") if "demo_2" not in entry.key]
    store = EpisodeStore(paths.IMPORTS / "goal")
    assert store.keys() == [entry.key for entry in kept]
    for entry in kept:
        examples.assert_same(store.get(entry.key), entry.load())
    assert list((project / ".state" / "import").iterdir()) == []


def test_a_broken_episode_is_refused_with_field_episode_and_step(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", demo_1=with_nan())
    with pytest.raises(DataError, match=r"goal\.hdf5: actions is not finite .*goal\.hdf5#demo_1, step 3") as refusal:
        take(path)
    assert "--skip-broken" in refusal.value.next_step
    assert not (project / paths.IMPORTS / "goal").exists()


def test_an_instruction_that_is_not_valid_unicode_is_refused_with_file_and_episode(
    project: Path, tmp_path: Path
) -> None:
    """It was stored, and every later export ended in a traceback."""
    path = demo_file(tmp_path / "goal.hdf5", count=2)
    with h5py.File(path, "a") as file:
        file["data"].attrs["problem_info"] = json.dumps({"language_instruction": "open \ud800"})
    with pytest.raises(DataError, match=r"goal\.hdf5, demo_0: language is 'open \\ud800', which is not valid Unicode"):
        take(path)
    assert not (project / paths.IMPORTS / "goal").exists()


def test_broken_episodes_can_be_left_out_and_are_listed(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = demo_file(tmp_path / "goal.hdf5", demo_1=with_nan(), demo_4={"dones": np.zeros(9)})
    take(path, skip_broken=True)
    printed = capsys.readouterr().out
    assert "left out: 2 episodes that are broken" in printed
    assert "demo_1, step 3" in printed
    assert "demo_4: dones has 9 steps and actions has 6" in printed
    assert len(EpisodeStore(paths.IMPORTS / "goal").keys()) == 4


def test_a_limit_of_the_user_admits_a_larger_episode(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=1)
    with pytest.raises(DataError, match=r"goal\.hdf5, demo_0 would unpack from") as refusal:
        data_commands.import_episodes(path, "hdf5", "goal", "", skip_broken=False, max_episode_gb=1e-6)
    assert "--max-episode-gb 1" in refusal.value.next_step
    with pytest.raises(DataError, match="an episode cannot have at most -1 GB"):
        data_commands.import_episodes(path, "hdf5", "goal", "", skip_broken=False, max_episode_gb=-1)
    data_commands.import_episodes(path, "hdf5", "goal", "", skip_broken=False, max_episode_gb=1)
    assert len(EpisodeStore(paths.IMPORTS / "goal").keys()) == 1


def test_splits_that_a_dataset_sets_aside_are_left_out(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_commands.import_episodes(TINY_ARM, "rlds", "arm", "", skip_broken=True)
    assert "left out: 1 episode of splits that are not for training" in capsys.readouterr().out
    assert {episode.provenance.split for episode in EpisodeStore(project / paths.IMPORTS / "arm")} == {"train"}


def test_an_import_without_success_is_refused(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=1, demo_0={"rewards": np.zeros(5, np.uint8)})
    with pytest.raises(DataError, match="no successful episodes to train on: 1 that did not succeed"):
        take(path)


def test_an_import_reaches_a_clone_through_git_and_dvc_and_its_dataset_is_fresh_there(
    project: Path, tmp_path: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(migrated_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    take(demo_file(tmp_path / "goal.hdf5", count=10))
    edit(project, "dataset", sources=["goal"])
    assert made_by_stages(project) == {"states": "ran", "collect": "ran", "dataset": "ran"}
    (tmp_path / "remote").mkdir()
    dvc(project, "remote", "add", "-d", "local", str(tmp_path / "remote"))
    git(project, "add", "-A")
    git(project, "commit", "-qm", "an import and its dataset")
    assert "data/imports/goal.dvc" in git(project, "ls-files")
    assert ".safetensors" not in git(project, "ls-files")
    dvc(project, "push")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    monkeypatch.chdir(clone)
    with pytest.raises(DataError, match="there is no source 'goal'") as refusal:
        sources.open_store("goal")
    assert "dvc pull --force data/imports/goal.dvc" in refusal.value.next_step
    dvc(clone, "pull", "--allow-missing")  # the stages below dataset never ran
    files.verify_folder(clone / paths.IMPORTS / "goal", "")
    assert made_by_stages(clone) == dict.fromkeys(("states", "collect", "dataset"), "cached")
    edit(clone, "dataset", validation_share=0.3)
    assert made_by_stages(clone) == {"states": "cached", "collect": "cached", "dataset": "ran"}


def made_by_stages(root: Path) -> dict[str, str]:
    with Session(root) as session:
        return {stage: run.ensure(stage, session).status for stage in ("states", "collect", "dataset")}


def test_an_import_that_is_there_in_part_says_how_to_complete_it(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=1)
    take(path)
    (paths.IMPORTS / "goal.dvc").rename("aside")
    with pytest.raises(DataError, match="data/imports/goal already exists") as refusal:
        take(path)
    assert "dvc add data/imports/goal" in refusal.value.next_step
    Path("aside").rename(paths.IMPORTS / "goal.dvc")
    shutil.rmtree(paths.IMPORTS / "goal")
    with pytest.raises(DataError, match=r"data/imports/goal\.dvc already exists") as refusal:
        take(path)
    assert "dvc pull data/imports/goal.dvc" in refusal.value.next_step


@pytest.mark.parametrize(
    "name", ["", "demos", "rollouts", "imports", "../escape", "a/b", ".hidden", "-dash", "a b", "ü"]
)
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name of an import"):
        importing.Import(path=tmp_path, format="hdf5", name=name)


def test_what_is_there_is_never_overwritten(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=1)
    take(path)
    before = files.identity(paths.IMPORTS)
    with pytest.raises(DataError, match="data/imports/goal already exists"):
        take(path)
    with pytest.raises(DataError, match="does not exist"):
        take(tmp_path / "nothing.hdf5", "other")
    with pytest.raises(DataError, match="the format 'zip' is not supported"):
        data_commands.import_episodes(path, "zip", "other", "", skip_broken=False)
    assert files.identity(paths.IMPORTS) == before


def test_an_import_that_stopped_goes_on_without_decoding_again(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = demo_file(tmp_path / "goal.hdf5", demo_1={"rewards": np.zeros(6, np.uint8)}, demo_3=with_nan(5))
    with pytest.raises(DataError, match="not finite"):
        take(path)
    decoded = []
    load = hdf5.load

    def watched(path: Path, demo: str, task: str, limits: Limits) -> Any:
        decoded.append(demo)
        return load(path, demo, task, limits)

    monkeypatch.setattr(hdf5, "load", watched)
    take(path, skip_broken=True)
    assert decoded == ["demo_3", "demo_4", "demo_5"]


def test_two_imports_of_one_source_do_not_meet(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=2)
    job = importing.Import(path=path, format="hdf5", name="goal")
    with importing.alone(job):
        unfinished = job.state / ".0.safetensors.partial-0123abcd"
        unfinished.touch()
        done = nightshift(project, "import", str(path), "--format", "hdf5", "--name", "other")
        assert done.returncode != 0
        assert "another import of" in done.stderr and "is under way" in done.stderr
        assert unfinished.exists()
    take(path)
    assert not job.state.exists()


def test_a_source_that_changed_is_imported_from_the_start(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", demo_5=with_nan(7))
    with pytest.raises(DataError, match="not finite"):
        take(path)
    write_libero(path, {"demo_0": libero_demo(steps=4, seed=99)})
    take(path)
    (episode,) = EpisodeStore(paths.IMPORTS / "goal")
    np.testing.assert_array_equal(episode.actions[:-1], libero_demo(steps=4, seed=99)["actions"])


def kill_while_importing(root: Path, path: Path, after: int) -> None:
    """SIGKILL the real command once `after` episodes more are on the store."""
    count = len(gathered(root))
    arguments = ["import", str(path), "--format", "hdf5", "--name", "goal"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([COMMAND, *arguments], cwd=root, stdout=quiet, stderr=quiet)
    while process.poll() is None and len(gathered(root)) < count + after:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the import was done before it could be killed: give it more episodes"
    assert not (root / paths.IMPORTS / "goal").exists()


def gathered(root: Path) -> dict[str, int]:
    """The episodes on the store of an import that is under way, and their inodes."""
    return {path.name: path.stat().st_ino for path in (root / ".state" / "import").glob("*/[!.]*.safetensors")}


def test_import_after_sigkills_gives_the_same_bytes(project: Path, tmp_path: Path) -> None:
    path = demo_file(tmp_path / "goal.hdf5", count=80, steps=12)
    kill_while_importing(project, path, after=5)
    kill_while_importing(project, path, after=10)
    before = gathered(project)
    assert len(before) >= 15
    done = nightshift(project, "import", str(path), "--format", "hdf5", "--name", "goal")
    assert done.returncode == 0, done.stderr
    assert "resuming: " in done.stdout
    after = {file.name: file.stat().st_ino for file in (project / paths.IMPORTS / "goal").glob("*.safetensors")}
    assert len(after) == 80
    assert {name: after[name] for name in before} == before, "an episode that was there has been written again"
    interrupted = files.identity(project / paths.IMPORTS / "goal")
    shutil.rmtree(project / paths.IMPORTS / "goal")
    (project / paths.IMPORTS / "goal.dvc").unlink()
    take(path)
    assert files.identity(paths.IMPORTS / "goal") == interrupted


def test_an_import_becomes_a_dataset_and_a_policy(
    project: Path, tmp_path: Path, job: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    take(demo_file(tmp_path / "goal.hdf5", count=10))
    edit(project, "dataset", sources=["goal"])
    edit(project, "policy", inputs=["ee_states", "gripper_states"])
    edit(project, "sft", steps=20)
    params = config.load(project / "params.yaml")
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    made = dataset_store.read(paths.DATASET)
    assert [len(list(made.episodes(part))) for part in dataset_store.SPLITS] == [8, 2]
    origins = {part: {e.provenance.origin for e in made.episodes(part)} for part in dataset_store.SPLITS}
    assert not origins["train"] & origins["validation"]
    learned = np.concatenate([episode.actions[:-1] for episode in made.episodes("train")])
    np.testing.assert_allclose(made.statistics["actions"]["mean"], learned.mean(0), atol=1e-6)
    assert "observations.ee_states" in made.statistics
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)
    assert (paths.SFT_POLICY / "policy.safetensors").exists()
    capsys.readouterr()
    data_commands.stats("", None)
    assert "data/dataset  10 episodes" in capsys.readouterr().out


@pytest.fixture
def made(project: Path, tmp_path: Path, job: Callable[[str], Job]) -> Path:
    """A dataset of 8 training and 2 validation episodes."""
    take(demo_file(tmp_path / "goal.hdf5", count=10))
    dataset.run(job("dataset"), seed=0, dataset=config.Dataset(sources=("goal",), validation_share=0.2))
    return paths.DATASET


@pytest.mark.parametrize(("split", "count"), [("all", 10), ("train", 8), ("validation", 2)])
def test_the_dataset_goes_out_as_lerobot_and_comes_back_the_same(
    made: Path, tmp_path: Path, split: str, count: int
) -> None:
    data_commands.export(tmp_path / "out", "lerobot", split, video=False)
    back = [entry.load() for entry in lerobot.list_episodes(tmp_path / "out", "")]
    dataset_now = dataset_store.read(made)
    wanted = [e for part in dataset_store.SPLITS if split in ("all", part) for e in dataset_now.episodes(part)]
    assert len(back) == count
    for left, right in zip(back, wanted, strict=True):
        examples.assert_same(left, right)


def test_an_export_never_replaces_what_is_there(made: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    with pytest.raises(DataError, match="precious already exists"):
        data_commands.export(tmp_path / "precious", "lerobot", "all", video=False)
    with pytest.raises(DataError, match="there is no split 'test'"):
        data_commands.export(tmp_path / "out", "lerobot", "test", video=False)
    with pytest.raises(DataError, match="the format 'hdf5' is not supported"):
        data_commands.export(tmp_path / "out", "hdf5", "all", video=False)
    with pytest.raises(DataError, match="rlds has no films"):
        data_commands.export(tmp_path / "out", "rlds", "all", video=True)
    assert (tmp_path / "precious" / "file").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_films_are_exported_on_request(made: Path, tmp_path: Path) -> None:
    data_commands.export(tmp_path / "out", "lerobot", "validation", video=True)
    assert len(list((tmp_path / "out" / "videos").rglob("*.mp4"))) == 2 * 2


def test_paths_are_those_of_the_folder_one_stands_in(project: Path, tmp_path: Path) -> None:
    below = project / "data"
    demo_file(below / "goal.hdf5", count=2)
    done = nightshift(below, "import", "goal.hdf5", "--format", "hdf5", "--name", "goal")
    assert done.returncode == 0, done.stderr
    assert (project / paths.IMPORTS / "goal").is_dir()
    shown = nightshift(below, "dataset", "stats", "goal", "--plot", "goal.png")
    assert shown.returncode == 0, shown.stderr
    with Image.open(below / "goal.png") as picture:
        assert min(picture.size) > 200


def test_stats_tell_counts_ranges_and_shares(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take(demo_file(tmp_path / "goal.hdf5"))
    capsys.readouterr()
    data_commands.stats("goal", None)
    printed = capsys.readouterr().out
    for words in (
        "goal  6 episodes, 36 steps",
        "open_the_middle_drawer_of_the_cabinet  6",
        "succeeded      6 of 6  (100.0 %)",
        "interventions  0 of 36  (0.0 %)",
        "actions per episode  5 to 7, median 6, mean 6",
        "return  1 to 1",
        "move x",
        "gripper",
    ):
        assert words in printed


def test_stats_of_what_is_not_there_say_what_is(project: Path, tmp_path: Path) -> None:
    take(demo_file(tmp_path / "goal.hdf5", count=1))
    with pytest.raises(DataError, match="there is no source 'gaol'; there are demos, goal"):
        data_commands.stats("gaol", None)
    with pytest.raises(DataError, match=r"there is no source '\.\./imports/goal'"):
        data_commands.stats("../imports/goal", None)
    with pytest.raises(DataError, match=r"data/demos/manifest\.json is missing"):
        data_commands.stats("demos", None)
    with pytest.raises(DataError, match="there is no data/dataset yet"):
        data_commands.stats("", None)


def test_bars_show_the_smallest_share_and_never_exceed_their_width() -> None:
    assert dataset_view.bar(1.0, 10) == "█" * 10
    assert dataset_view.bar(0.5, 10) == "█" * 5
    assert dataset_view.bar(1e-9, 10) == "▏"
    assert dataset_view.bar(0.0, 10) == ""
    counts = np.array([0, 1, 50, 100])
    assert dataset_view.sparkline(Histogram(edges=np.arange(5.0), counts=counts)) == " ▁▄█"
