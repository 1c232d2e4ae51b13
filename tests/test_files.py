import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from nightshift import files
from nightshift.errors import DataError, ProjectError
from tests.waiting import wait_until


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), files.new_folder(target) as folder:
        (folder / "a").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with files.new_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), files.new_folder(target) as folder:
        (folder / "a").write_text("new")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    files.verify_folder(target, "")


def test_a_folder_with_only_its_manifest_is_the_same_by_name_and_says_why_it_cannot_be_read(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    whole = files.identity(tmp_path / "out")
    assert not files.is_left_out(tmp_path / "out")
    (tmp_path / "out" / "a").unlink()
    assert files.is_left_out(tmp_path / "out")
    assert files.identity(tmp_path / "out") == whole
    with pytest.raises(
        DataError, match=r"of the folder only manifest\.json is here, the rest was left out of"
    ) as refusal:
        files.verify_folder(tmp_path / "out", "make it again")
    assert refusal.value.next_step == "bring the folder from where it was made, or make it again"


def test_a_folder_that_was_made_without_files_is_whole(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "out"):
        pass
    assert files.verify_folder(tmp_path / "out", "") == {}


def large_files(folder: Path, count: int, size: int = 2**25) -> list[Path]:
    """Two or more are worth threads; without blocks on the disk."""
    found = [folder / f"{number:03d}" for number in range(count)]
    for path in found:
        with path.open("wb") as stream:
            stream.truncate(size)
    return found


def test_many_files_are_summed_side_by_side_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    met = threading.Barrier(2, timeout=60)

    def digest(path: Path) -> str:
        met.wait()  # which breaks where one file is summed after the other
        return path.name

    paths = large_files(tmp_path, 4)
    assert files.sums(digest, paths) == [path.name for path in paths]


def test_a_file_that_takes_long_is_summed_where_a_signal_interrupts_it(tmp_path: Path) -> None:
    in_thread = {}

    def digest(path: Path) -> str:
        in_thread[path.name] = threading.current_thread() is not threading.main_thread()
        return path.name

    (tmp_path / "huge").mkdir()
    paths = [*large_files(tmp_path / "huge", 1, 2**30), *large_files(tmp_path, 3)[1:]]
    assert files.sums(digest, paths) == ["000", "001", "002"]
    assert in_thread == {"000": False, "001": True, "002": True}


SUMMED_UNTIL_A_SIGNAL = """
import os, sys
from pathlib import Path
from nightshift import files, interrupts

def digest(path):
    os.write(1, f"{path.name}\\n".encode())
    os.read(0, 1)  # until the test closes the pipe
    return path.name

interrupts.handle()
files.sums(digest, sorted(Path(sys.argv[1]).iterdir()))
"""


def is_at_rest(process: int) -> bool:
    """Whether all threads sleep at the same time, so that nothing happens there before something comes from outside:
    between two looks none has run, or its count of switches would differ."""
    looks = [[path.read_text() for path in sorted(Path(f"/proc/{process}/task").glob("*/status"))] for _ in range(2)]
    return looks[0] == looks[1] and all("\nState:\tS" in status for status in looks[0])


def test_a_signal_ends_the_sums_without_those_that_have_not_begun(tmp_path: Path) -> None:
    threads = os.cpu_count() or 1
    large_files(tmp_path, threads + 10)
    command = [sys.executable, "-c", SUMMED_UNTIL_A_SIGNAL, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        begun = [process.stdout.readline()]
        wait_until(lambda: is_at_rest(process.pid))
        process.terminate()
        wait_until(lambda: is_at_rest(process.pid))
        process.stdin.close()
        begun += process.stdout.readlines()
        assert process.stderr.read().endswith("KeyboardInterrupt\n")
    assert len(begun) == threads


def test_a_damaged_file_is_found_among_large_ones(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "out") as folder:
        large_files(folder, 3)
    files.verify_folder(tmp_path / "out", "")
    with (tmp_path / "out" / "001").open("r+b") as stream:
        stream.write(b"x")
    with pytest.raises(DataError, match="001 is damaged"):
        files.verify_folder(tmp_path / "out", "")


def test_a_large_file_is_written_whole_whatever_its_pieces(tmp_path: Path) -> None:
    content = os.urandom(5 * 2**20 + 7)
    files.write_chunks(tmp_path / "a", [content[:3], memoryview(content)[3:], b""])
    assert (tmp_path / "a").read_bytes() == content


def test_what_was_staged_and_not_settled_is_gone(tmp_path: Path) -> None:
    with files.staged(tmp_path / "a", [b"1"]) as temporary:
        assert temporary.read_bytes() == b"1"
        assert not (tmp_path / "a").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "out"
    with files.new_folder(target) as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("1")
    (target / "a").write_text("2") if damage == "change" else (target / "a").unlink()
    with pytest.raises(DataError, match="out/a") as error:
        files.verify_folder(target, "run again")
    assert error.value.next_step == "run again"


def test_a_journal_survives_a_line_cut_short(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    files.append_json(journal, {"n": 1})
    with journal.open("a") as stream:
        stream.write('{"n": ')
    assert files.read_journal(journal) == [{"n": 1}]
    files.append_json(journal, {"n": 2})
    assert files.read_journal(journal) == [{"n": 1}, {"n": 2}]


def test_the_digest_of_a_tree_ignores_interpreter_caches(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = files.identity(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert files.identity(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert files.identity(tmp_path) != before


def bytes_read() -> int:
    """By this process so far, from files of any kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_folder_with_a_manifest_is_identified_without_reading_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "imports" / "kitchen"
    folder.mkdir(parents=True)
    (folder / "big").touch()
    os.truncate(folder / "big", 2**28)
    files.write_json(folder / files.MANIFEST, {"sha256": {"big": "the first"}})
    before = bytes_read()
    first, alone = files.identity(tmp_path), files.identity(folder)
    assert bytes_read() - before < 2**20
    files.write_json(folder / files.MANIFEST, {"sha256": {"big": "the second"}})
    assert files.identity(tmp_path) != first
    assert files.identity(folder) != alone
    (folder / files.MANIFEST).unlink()
    before = bytes_read()
    files.identity(tmp_path)
    assert bytes_read() - before >= 2**28, "without a manifest there is no other way, and the counter counts"


def test_the_identity_of_source_code_is_its_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("1")
    (tmp_path / "gone" / "__pycache__").mkdir(parents=True)
    before = files.identity(tmp_path)
    (tmp_path / "package" / "a.py").write_text("2")
    assert files.identity(tmp_path) != before


KILLED_BETWEEN_TWO_NAMES = """
import os, signal, sys
from pathlib import Path
from nightshift import files
target = Path(sys.argv[1])
rename = Path.rename
def die_after_moving_away(self, other):
    rename(self, other)
    if self == target:
        os.kill(os.getpid(), signal.SIGKILL)
Path.rename = die_after_moving_away
files._exchange = lambda *_: False
with files.new_folder(target) as folder:
    (folder / "a").write_text("new")
"""


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A folder that a kill caught while it was being replaced on a system that cannot exchange names."""
    target = tmp_path / "out"
    with files.new_folder(target) as folder:
        (folder / "a").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_TWO_NAMES, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    return target


def test_a_kill_between_two_names_loses_no_folder(cut: Path) -> None:
    files.verify_folder(cut, "")
    assert (cut / "a").read_text() == "old"
    files.sweep_temporaries(cut.parent)
    assert list(cut.parent.iterdir()) == [cut]


def test_a_rewrite_that_fails_after_such_a_kill_leaves_the_old_folder(cut: Path) -> None:
    with pytest.raises(RuntimeError), files.new_folder(cut):
        raise RuntimeError
    assert (cut / "a").read_text() == "old"
    assert list(cut.parent.iterdir()) == [cut]


def test_where_names_cannot_be_exchanged_a_folder_is_replaced_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    for content in ("old", "new"):
        with files.new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text(content)
    assert (tmp_path / "out" / "a").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_the_new_name_reaches_the_disk_before_the_old_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    with files.new_folder(target) as folder:
        (folder / "a").write_text("old")
    order: list[str] = []
    sync, rmtree = files.sync, shutil.rmtree

    def watched_sync(path: Path) -> None:
        order.append(f"sync {path.name}")
        sync(path)

    def watched_rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        order.append("remove")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(files, "sync", watched_sync)
    monkeypatch.setattr(shutil, "rmtree", watched_rmtree)
    with files.new_folder(target) as folder:
        (folder / "a").write_text("new")
    assert f"sync {tmp_path.name}" in order[order.index("sync a") : order.index("remove")]


WRITE_UNTIL_FULL = """
import sys
from pathlib import Path
from nightshift import files
from nightshift.errors import ProjectError
target = Path(sys.argv[1]) / "out"
try:
    with files.new_folder(target) as folder:
        (folder / "big").write_bytes(b"x" * 4_000_000)
except ProjectError as error:
    sys.exit(0 if "no space left" in error.what and not target.exists() and not list(target.parent.iterdir()) else 3)
sys.exit(4)
"""


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = tmp_path / "write.py"
    script.write_text(WRITE_UNTIL_FULL)
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {small} && {sys.executable} {script} {small}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if "mount:" in done.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    assert done.returncode == 0, done.stderr


def test_a_read_only_folder_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ProjectError, match="cannot be written: Read-only file system"):
        files.write_bytes(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a" / "inside").mkdir(parents=True)
    with pytest.raises(ProjectError, match=r"a is a folder, and not a file\n.*move it"):
        files.write_bytes(tmp_path / "a", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300], ids=["with what a temporary name adds", "by itself"])
def test_a_name_that_is_too_long_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProjectError, match=rf"{name} is too long for the name of a file\n.*use shorter names"):
        files.write_bytes(tmp_path / name, b"1")
    with pytest.raises(ProjectError, match="is too long for the name of a file"), files.new_folder(tmp_path / name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_json_is_written_so_that_diffs_are_small(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": 1, "a": [1]})
    assert (tmp_path / "a.json").read_text().startswith('{\n  "a"')
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1], "b": 1}


def test_a_file_is_linked_or_copied_where_that_cannot_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, linked, copied = (tmp_path / name for name in ("source", "linked", "copied"))
    source.write_text("content")
    files.link_or_copy(source, linked)
    assert linked.samefile(source)

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    files.link_or_copy(source, copied)
    assert copied.read_text() == "content" and not copied.samefile(source)


def test_a_link_never_replaces_a_file(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    source.write_text("new")
    there.write_text("old")
    with pytest.raises(FileExistsError):
        files.link_or_copy(source, there)
    assert there.read_text() == "old"


@pytest.mark.parametrize("is_old", [False, True])
def test_nothing_of_an_archive_lands_outside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """Python before 3.11.4, as Debian 12 has it, knows no filters."""
    if is_old:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "a").write_text("inside")
    for number, name in enumerate(("b/a", "../a")):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            tar.add(tmp_path / "a", name)
    folder = tmp_path / "to" / "here"
    folder.mkdir(parents=True)
    with tarfile.open(tmp_path / "0.tar") as tar:
        files.extract(tar, folder)
    assert (folder / "b/a").read_text() == "inside"
    with tarfile.open(tmp_path / "1.tar") as tar, pytest.raises(tarfile.TarError):
        files.extract(tar, folder)
    assert not (tmp_path / "to/a").exists()
