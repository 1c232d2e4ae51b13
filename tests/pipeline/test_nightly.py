"""A night: new demos from a folder and from a real DVC remote, the champion as the start, a commit of the versions."""

from __future__ import annotations

import os
import shutil
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nightshift import config
from nightshift.adapters.dvc_store import DvcStore
from nightshift.data import importing, sources
from nightshift.errors import DataError
from nightshift.pipeline import nightly, notify
from nightshift.pipeline.run import Session, stale, statuses
from nightshift.project import paths, quiet_nights
from tests.cli.test_data_commands import demo_file, take, with_nan
from tests.command import dvc
from tests.conftest import edit, git, nightshift
from tests.data.formats.test_hil_serl import dump, run_of
from tests.receiver import SECRET, receiving


@pytest.fixture
def inbox(project: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    edit(project, "nightly", inbox=str(folder))
    return folder


def deliver(path: Path, **spoiled: object) -> None:
    """A file that was put into the inbox a while ago."""
    demo_file(path, count=3, **spoiled)  # type: ignore[arg-type]
    os.utime(path, (0, 0))


def brought_in(project: Path) -> list[str]:
    return [note.sentence for note in nightly.prepare(project)]


def test_an_inbox_may_be_in_the_home_folder(project: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(inbox.parent))
    edit(project, "nightly", inbox=f"~/{inbox.name}")
    deliver(inbox / "kitchen.hdf5")
    assert brought_in(project) == ["imported kitchen: 3 episodes"]


def test_every_file_of_the_inbox_is_imported_once_under_its_name_and_tracked_by_dvc(project: Path, inbox: Path) -> None:
    deliver(inbox / "kitchen v2.hdf5")
    assert brought_in(project) == ["imported kitchen_v2: 3 episodes"]
    assert (project / paths.IMPORTS / "kitchen_v2.dvc").exists()
    assert brought_in(project) == []
    deliver(inbox / "more.hdf5")
    assert brought_in(project) == ["imported more: 3 episodes"]
    assert sources.resolved(["imports"]) == ["kitchen_v2", "more"]


def test_a_file_that_has_changed_since_it_was_imported_is_told_every_night_until_it_has_another_name(
    project: Path, inbox: Path
) -> None:
    deliver(inbox / "recording.hdf5")
    brought_in(project)
    demo_file(inbox / "recording.hdf5", count=5)
    os.utime(inbox / "recording.hdf5", (1, 1))
    told = "recording.hdf5 is not what the import recording was made of: rename it, and it is taken"
    assert brought_in(project) == brought_in(project) == [told]
    (inbox / "recording.hdf5").rename(inbox / "day_2.hdf5")
    assert brought_in(project) == ["imported day_2: 5 episodes"]


def remove(name: str) -> None:
    """As docs/data.md says."""
    shutil.rmtree(paths.IMPORTS / name)
    (paths.IMPORTS / f"{name}.dvc").unlink()


@pytest.mark.parametrize("count", [3, 5], ids=["copied again", "another recording"])
def test_a_file_that_was_imported_again_by_hand_is_what_its_import_was_made_of_until_it_changes(
    project: Path, inbox: Path, count: int
) -> None:
    deliver(inbox / "recording.hdf5")
    brought_in(project)
    demo_file(inbox / "recording.hdf5", count=count)
    os.utime(inbox / "recording.hdf5", (1, 1))
    (told,) = brought_in(project)
    remove("recording")
    take(inbox / "recording.hdf5", "recording")
    assert brought_in(project) == []
    os.utime(inbox / "recording.hdf5", (2, 2))
    assert brought_in(project) == [told]


def test_nothing_is_said_of_a_file_whose_import_was_replaced_by_one_of_another_origin(
    project: Path, inbox: Path, tmp_path: Path
) -> None:
    deliver(inbox / "recording.hdf5")
    brought_in(project)
    os.utime(inbox / "recording.hdf5", (1, 1))
    remove("recording")
    take(demo_file(tmp_path / "elsewhere.hdf5", count=2), "other")
    (paths.IMPORTS / "other").rename(paths.IMPORTS / "recording")
    DvcStore(project).track(paths.IMPORTS / "recording")  # as `dvc pull` brings another clone's
    assert brought_in(project) == []
    remove("recording")
    take(tmp_path / "elsewhere.hdf5", "recording")
    assert brought_in(project) == []


def test_a_night_names_the_task_of_files_that_do_not(project: Path, inbox: Path) -> None:
    edit(project, "nightly", format="hil-serl")
    os.utime(dump(inbox / "ram.pkl", run_of(3, first=0)), (0, 0))
    (told,) = brought_in(project)
    assert told.startswith("could not import ram.pkl: ") and "name of its task" in told
    edit(project, "nightly", task="insert_ram")
    assert brought_in(project) == ["imported ram: 1 episodes"]


def test_a_long_name_is_cut_and_stays_one_of_its_own() -> None:
    one, other = (nightly.import_name(Path("x" * 240 + ending)) for ending in ("1", "2"))
    assert len(one) == len(other) == importing.LONGEST_NAME
    assert one != other


def test_what_cannot_be_imported_is_said_and_does_not_keep_the_rest_from_being_imported(
    project: Path, inbox: Path
) -> None:
    (inbox / "a.hdf5").write_bytes(b"no hdf5")
    os.utime(inbox / "a.hdf5", (0, 0))
    demo_file(inbox / "b.hdf5", count=1)  # written just now
    deliver(inbox / "c.hdf5", demo_1=with_nan())
    broken, unfinished, done = brought_in(project)
    assert broken.startswith("could not import a.hdf5: ")
    assert unfinished == "b.hdf5 is still being written: the next night takes it"
    assert done == "imported c: 2 episodes; left out: 1 that are broken"
    edit(project, "nightly", inbox="nowhere")
    assert brought_in(project) == ["nightly.inbox nowhere is not a folder"]


def test_people_are_told_of_demos_that_cannot_be_brought_in_and_the_page_of_nights_says_so(
    project: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to do is true of the pipeline alone then."""
    inbox.rmdir()
    monkeypatch.setattr(nightly, "statuses", lambda root: [])
    sentence = f"nightly.inbox {inbox} is not a folder"
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        idle = nightly.play(project, lambda: None, lambda _: None)
    (message,) = messages
    assert message["title"] == "Nightshift: new demos could not be brought in"
    assert message["message"].startswith(sentence)
    (night,) = quiet_nights.read(project)
    assert night.why == idle == f"{nightly.NOTHING_TO_DO_WITHOUT}: {sentence}"


def test_a_night_with_nothing_to_do_commits_what_an_earlier_one_could_not(
    project: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(inbox / "goal.hdf5")
    assert brought_in(project) == ["imported goal: 3 episodes"]
    monkeypatch.setattr(nightly, "statuses", lambda root: [])
    told: list[str] = []
    assert nightly.play(project, lambda: None, told.append) == nightly.NOTHING_TO_DO
    assert told[-1].startswith("committed dvc.lock, report and imports as ")
    assert "data/imports/goal.dvc" in git(project, "show", "--stat", "HEAD")


def test_an_import_that_was_interrupted_before_dvc_tracked_it_is_tracked_by_the_next_night(
    project: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(inbox / "goal.hdf5")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DvcStore, "track", interrupted)
        brought_in(project)
    assert (project / paths.IMPORTS / "goal").is_dir()
    assert brought_in(project) == ["tracked goal, whose import was interrupted"]
    assert "data/imports/goal.dvc" in (nightly.conclude(project) and git(project, "show", "--stat", "HEAD"))
    assert brought_in(project) == []


def test_a_dangling_link_and_a_file_that_vanishes_do_not_end_the_night(
    project: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inbox / "a.hdf5").symlink_to(inbox / "nowhere.hdf5")
    os.utime(inbox / "a.hdf5", (0, 0), follow_symlinks=False)
    deliver(inbox / "b.hdf5")
    dangling, done = brought_in(project)
    assert dangling == f"could not import a.hdf5: {inbox / 'a.hdf5'} does not exist; give a file or folder that does"
    assert done == "imported b: 3 episodes"
    (inbox / "a.hdf5").unlink()
    (inbox / "c").mkdir()
    os.utime(inbox / "c", (0, 0))
    listed = Path.rglob
    renamed = inbox / "c" / ".demo.hdf5.Qx4v2a"  # rsync has renamed it since it was listed
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [*listed(self, pattern), renamed])
    assert brought_in(project) == ["c is still being written: the next night takes it"]


def test_two_files_that_would_be_the_same_import_are_told(project: Path, inbox: Path) -> None:
    deliver(inbox / "a b.hdf5")
    deliver(inbox / "a_b.hdf5")
    told = "a b.hdf5 and a_b.hdf5 would both be the import a_b: one is taken, so rename the other"
    assert brought_in(project) == ["imported a_b: 3 episodes", told]
    assert brought_in(project) == [told]


def test_a_night_that_git_refuses_to_commit_is_told_and_does_not_fail(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / paths.DVC_LOCK).write_text("schema: '2.0'\n")
    (project / ".git/index.lock").touch()
    said: list[str] = []
    ran: list[bool] = []
    with receiving() as (address, messages):
        monkeypatch.setenv(notify.ADDRESSES, address)
        assert not nightly.play(project, lambda: ran.append(True), said.append)
    assert ran == [True]
    assert said[-1].startswith("not committed: git refused to commit dvc.lock: ")
    assert [message["title"] for message in messages] == ["Nightshift: the versions of a night are not committed"]


def test_an_import_that_git_names_is_pulled_from_a_real_remote(project: Path, tmp_path: Path) -> None:
    edit(project, "nightly", pull=True)
    take(demo_file(tmp_path / "goal.hdf5", count=2), "goal")
    dvc(project, "remote", "add", "-d", "folder", str(tmp_path / "remote"))
    dvc(project, "push")
    shutil.rmtree(project / paths.IMPORTS / "goal")
    shutil.rmtree(project / ".dvc/cache")
    assert brought_in(project) == ["pulled goal from DVC's remote"]
    assert sources.open_store("goal").keys()
    assert brought_in(project) == []
    shutil.rmtree(project / paths.IMPORTS / "goal")
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(tmp_path / "remote")
    (sentence,) = brought_in(project)
    assert sentence.startswith("could not pull goal: ")


def test_an_import_from_another_repository_becomes_its_newest_version(project: Path, tmp_path: Path) -> None:
    edit(project, "nightly", pull=True)
    other = tmp_path / "other"
    (other / "goal").mkdir(parents=True)
    (other / ".venv").symlink_to(project / ".venv")
    git(tmp_path, "init", "-q", "other")
    dvc(other, "init", "-q")
    publish(other, "one")
    dvc(project, "import", "-q", str(other), "goal", "-o", str(paths.IMPORTS / "goal"))
    assert brought_in(project) == []
    publish(other, "two")
    assert brought_in(project) == ["pulled goal from DVC's remote"]
    assert (project / paths.IMPORTS / "goal" / "episode").read_text() == "two"


def publish(repository: Path, content: str) -> None:
    (repository / "goal" / "episode").write_text(content)
    dvc(repository, "add", "-q", "goal")
    git(repository, "add", "goal.dvc", ".gitignore", ".dvc")
    git(repository, "commit", "-qm", content)


def test_a_night_commits_the_lock_and_new_imports_and_nothing_else(project: Path, inbox: Path) -> None:
    deliver(inbox / "goal.hdf5")
    brought_in(project)
    (project / "README.md").write_text("not yet committed")
    git(project, "add", "README.md")
    (project / paths.DVC_LOCK).write_text("schema: '2.0'\n")
    (project / paths.REPORT).parent.mkdir(exist_ok=True)
    (project / paths.REPORT_POINTER).write_text("outs: []\n")
    assert nightly.conclude(project).startswith("committed dvc.lock, report and imports as ")
    shown = git(project, "show", "--stat", "--format=%s", "HEAD").splitlines()
    assert shown[0].startswith("nightly 20")
    assert [line.split("|")[0].strip() for line in shown if "|" in line] == [
        *("data/imports/goal.dvc", "dvc.lock", "reports/report.html.dvc")
    ]
    assert "README.md" in git(project, "diff", "--cached", "--name-only"), "what a person staged stays staged"
    assert nightly.conclude(project) == ""
    edit(project, "nightly", commit=False)
    (project / paths.DVC_LOCK).write_text("stages: {}\n")
    assert nightly.conclude(project) == ""


def test_a_night_that_left_no_version_commits_nothing(project: Path) -> None:
    edit(project, "nightly", pull=True)  # a change that is a person's to commit
    before = git(project, "rev-parse", "HEAD")
    assert nightly.conclude(project) == ""
    assert git(project, "rev-parse", "HEAD") == before


def test_no_number_of_nightly_is_in_a_cache_key(project: Path) -> None:
    before = stale(statuses(project))
    edit(project, "nightly", inbox="elsewhere", format="rlds", pull=True, commit=False)
    assert stale(statuses(project)) == before
    assert "nightly" not in (project / "dvc.yaml").read_text()


def test_all_imports_as_a_source_need_one(project: Path) -> None:
    assert config.load(project / "params.yaml").dataset.sources == ("demos",)
    with pytest.raises(DataError, match=r"dataset\.sources is imports, and there are none"):
        sources.resolved(["imports"])


@pytest.mark.parametrize(
    ("lock", "server", "sentence"),
    [
        ("<<<<<<< HEAD\n", "", "dvc.lock"),
        ("schema: '2.0'\n", "http://127.0.0.1:9/api", "no Prefect server answers at PREFECT_API_URL="),
    ],
    ids=["damaged dvc.lock", "no Prefect"],
)
def test_a_night_that_fails_before_its_flow_begins_is_told_once_and_kept(
    project: Path, lock: str, server: str, sentence: str
) -> None:
    (project / paths.DVC_LOCK).write_text(lock)
    with receiving() as (address, messages):
        done = nightshift(project, "nightly", NIGHTSHIFT_NOTIFY=address, PREFECT_API_URL=server)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    (message,) = messages
    assert message["title"] == "Nightshift: the run failed"
    assert sentence in message["message"]
    (night,) = quiet_nights.read(project)
    assert night.outcome == "failed"
    assert sentence in night.why


def test_the_words_of_a_foreign_error_are_not_on_the_page_of_all_nights_and_its_traceback_says_nothing_untrue(
    project: Path,
) -> None:
    error = OSError(f"postgresql://me:{SECRET}@database/mlflow refused")
    nightly.failed(project, datetime.now(UTC), error)
    nightly.failed(project, datetime.now(UTC), error)
    (night,) = quiet_nights.read(project)
    assert (night.outcome, night.why) == ("failed", "OSError: the log says more")
    assert SECRET not in (project / paths.QUIET_NIGHTS).read_text()
    assert "told" not in "".join(traceback.format_exception(error)), "nobody was"


def test_a_night_that_another_run_is_in_the_way_of_is_kept_and_told_to_nobody(project: Path) -> None:
    with receiving() as (address, messages), Session(project):
        done = nightshift(project, "nightly", NIGHTSHIFT_NOTIFY=address)
    assert done.returncode == 1
    assert messages == []
    (night,) = quiet_nights.read(project)
    assert (night.outcome, night.why) == ("refused", f"another run (process {os.getpid()}) is working in {project}")


def test_only_the_newest_quiet_nights_are_kept_and_a_damaged_line_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet_nights, "KEPT", 3)
    for number in range(3):
        nightly.missed(tmp_path, f"{number} h late")
    path = tmp_path / paths.QUIET_NIGHTS
    path.write_text(path.read_text().replace("1 h", '"') + '{"started": "20')
    nightly.missed(tmp_path, "3 h late")
    kept = [night.why for night in quiet_nights.read(tmp_path)]
    assert kept == [f"a night was missed: {number} h late" for number in (0, 2, 3)]
    nightly.missed(tmp_path, "4 h late")
    assert len(path.read_text().splitlines()) == 3


def test_the_command_says_that_there_is_nothing_to_do(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: {}\n")  # a pipeline without stages is fresh
    done = nightshift(project, "nightly")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing to do: no new demos")
    (night,) = quiet_nights.read(project)
    assert (night.outcome, night.why) == ("idle", nightly.NOTHING_TO_DO)
