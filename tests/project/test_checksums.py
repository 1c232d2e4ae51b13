"""md5 sums as DVC computes them: compared with a real DVC."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from nightshift.adapters.dvc_store import DvcStore
from nightshift.project import checksums, paths
from tests.conftest import REPOSITORY, git


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".dvc").mkdir()
    shutil.copy(REPOSITORY / ".dvc/config", tmp_path / ".dvc")
    shutil.copy(REPOSITORY / ".dvcignore", tmp_path)
    git(tmp_path, "init", "-q")
    return tmp_path


def test_files_and_folders_have_the_sums_that_dvc_records(root: Path) -> None:
    folder = root / paths.IMPORTS
    counted = ("b.txt", "a/z", "a.txt", "a/deep/er", ".hidden", "a-b/c", "ä")
    ignored = ("README.md", "__pycache__/x", "code.pyc", ".b.txt.swp", "b.txt~", ".b.partial-01", "a/.old.old-2/x")
    for name in (*counted, *ignored):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    assert checksums.md5(root, paths.IMPORTS) == recorded(root, paths.IMPORTS)
    (root / "one.bin").write_bytes(b"\r\n\0" * 1000)
    assert checksums.md5(root, Path("one.bin")) == recorded(root, Path("one.bin"))


def recorded(root: Path, path: Path) -> str:
    entry = yaml.safe_load((root / DvcStore(root).track(path)).read_text())
    return str(entry["outs"][0]["md5"])


def test_what_does_not_count_does_not_change_the_sum_and_what_is_gone_is_missing(root: Path) -> None:
    (root / "folder").mkdir()
    (root / "folder/file").write_text("1")
    before = checksums.md5(root, Path("folder"))
    (root / "folder/__pycache__").mkdir()
    (root / "folder/__pycache__/file.pyc").touch()
    assert checksums.md5(root, Path("folder")) == before
    (root / "folder/file").write_text("2")
    assert checksums.md5(root, Path("folder")) != before
    assert checksums.md5(root, Path("elsewhere")) == checksums.MISSING


def test_a_large_file_is_read_once_until_it_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_LARGE", 8)
    reads: list[Path] = []
    of_content = checksums._md5_of_content

    def counted(path: Path) -> str:
        reads.append(path)
        return of_content(path)

    monkeypatch.setattr(checksums, "_md5_of_content", counted)
    weights = root / "weights"
    weights.write_bytes(b"12345678")
    before = checksums.md5(root, Path("weights"))
    assert checksums.md5(root, Path("weights")) == before
    assert reads == [weights]
    os.utime(weights, ns=(0, 0))
    assert checksums.md5(root, Path("weights")) == before
    weights.write_bytes(b"87654321")
    assert checksums.md5(root, Path("weights")) != before
    assert len(reads) == 3
