from __future__ import annotations

import os
from pathlib import Path

import pytest

from nightshift.data import symlinks
from nightshift.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/sub").mkdir(parents=True)
    (tmp_path / "root/inside").write_text("in")
    (tmp_path / "secret").write_text("out")
    return tmp_path / "root"


def test_files_and_links_inside_the_folder_are_followed(root: Path) -> None:
    (root / "sub/link").symlink_to("../inside")
    (root / "folder").symlink_to("sub")
    for name in ("inside", "sub/link", "folder/link", "missing"):
        assert symlinks.check(root / name, root) == root / name


def test_a_link_out_of_the_folder_is_refused_by_name_and_target(root: Path) -> None:
    (root / "sub/link").symlink_to("../../secret")
    (root / "twice").symlink_to("sub/link")
    (root / "up").symlink_to("..")
    for name in ("sub/link", "twice", "up/secret"):
        with pytest.raises(DataError, match=f"{name} is refused: it is a link to .*secret, which is outside of"):
            symlinks.check(root / name, root)


@pytest.mark.parametrize("name", ["../secret", "sub/../../secret", "/etc/passwd"])
def test_a_name_that_leads_out_of_the_folder_is_refused(root: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"root is refused: it refers to \.\./.*, which is outside"):
        symlinks.check(root / name, root)


def test_the_path_that_the_user_names_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("secret")
    (tmp_path / "other").symlink_to("root")
    symlinks.check(tmp_path / "file", tmp_path / "file")
    symlinks.check(tmp_path / "other/inside", tmp_path / "other")


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_own_blobs_only(tmp_path: Path) -> None:
    for repo in ("mine", "other"):
        (tmp_path / repo / "snapshots/0f3a/meta").mkdir(parents=True)
        (tmp_path / repo / "blobs").mkdir()
        (tmp_path / repo / "blobs/abc").write_text("content")
    (tmp_path / "mine/refs").write_text("0f3a")
    root = tmp_path / "mine/snapshots/0f3a"
    (root / "meta/info.json").symlink_to("../../../blobs/abc")
    (root / "refs").symlink_to("../../refs")
    (root / "theirs").symlink_to("../../../other/blobs/abc")
    symlinks.check(root / "meta/info.json", root)
    symlinks.check(root / "meta/info.json", root / "meta")
    for name in ("refs", "theirs"):
        with pytest.raises(DataError, match="is refused: it is a link to"):
            symlinks.check(root / name, root)
    with pytest.raises(DataError, match="which is outside of it"):
        symlinks.check(root / "../../blobs/abc", root)


def test_what_a_reader_would_wait_for_is_refused(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    for name in ("pipe", "dangling", "loop"):
        with pytest.raises(DataError, match=f"{name} is not a file but a broken link, a pipe or a device"):
            symlinks.check(root / name, root)
    with pytest.raises(DataError, match="sub is not a file but a folder"):
        symlinks.check(root / "sub", root)
