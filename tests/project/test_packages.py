"""The installed versions in DVC's cache key. Other versions are metadata in a folder that comes first on the path."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from nightshift import plugins
from nightshift.project import graph, packages, paths
from tests.conftest import REPOSITORY, install

GRAPH = graph.load(REPOSITORY)


def test_the_file_holds_the_release_of_every_package_that_a_stage_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "other", torch="9.8.7+cu130", numba="1.10"))
    found = packages.record(tmp_path, GRAPH)
    assert found["torch"] == "9.8.7", "a build for a GPU computes the same release"
    assert set(found) - set(packages.PLUG_INS) == {
        "hf-libero",
        "mujoco",
        "numba",
        "numpy",
        "robosuite",
        "scipy",
        "torch",
    }
    assert {found[name] for name in packages.PLUG_INS} == {packages.NONE}
    assert yaml.safe_load((tmp_path / paths.VERSIONS).read_text()) == found
    assert found["numba"] == "1.10", "a version is no number"


def test_the_file_is_rewritten_only_when_a_version_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inode() -> int:
        return (tmp_path / paths.VERSIONS).stat().st_ino

    packages.record(tmp_path, GRAPH)
    before = inode()
    packages.record(tmp_path, GRAPH)
    assert inode() == before
    monkeypatch.syspath_prepend(install(tmp_path / "other", mujoco="9.9.9"))
    packages.record(tmp_path, GRAPH)
    assert inode() != before


def test_a_package_that_is_missing_has_a_version_too() -> None:
    assert packages.release("no-such-package") == "none"


def test_what_is_installed_or_removed_while_a_process_runs_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> tuple[str, bool]:
        return packages.release("theirs"), "csv" in plugins.find(plugins.FORMATS)

    monkeypatch.syspath_prepend(tmp_path)
    assert seen() == seen() == ("none", False)
    for version in ("1.0", "1.1"):
        install(tmp_path, theirs=version)
        information = tmp_path / f"theirs-{version}.dist-info"
        (information / "entry_points.txt").write_text(f"[{plugins.FORMATS}]\ncsv = theirs:csv\n")
        assert seen() == seen() == (version, True)
        shutil.rmtree(information)
    assert seen() == ("none", False)


def test_what_a_compute_node_may_lack_is_installed_with_the_extra_pipeline_alone() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    base, extra, dev = (
        {re.split(r"[<>=]", requirement)[0] for requirement in requirements}
        for requirements in (
            project["dependencies"],
            project["optional-dependencies"]["pipeline"],
            project["optional-dependencies"]["dev"],
        )
    )
    assert set(packages.PIPELINE) <= extra
    assert not set(packages.PIPELINE) & base
    computing = set(graph.packages(GRAPH)) - set(packages.PLUG_INS) - {"hf-libero", "robosuite"}
    assert computing <= base, "a stage computes with these"
    assert "nightshift[pipeline,data,production]" in dev, "developers have everything"


def test_tested_releases_are_read_beside_markers_comments_and_builds(tmp_path: Path) -> None:
    lines = ['numpy==2.1; python_version == "3.12"', "torch==2.5.0+cpu  # not 2.6", "# ray==1", "mlflow>=3", ""]
    (tmp_path / paths.CONSTRAINTS).write_text("\n".join(lines))
    assert packages.tested(tmp_path) == {"numpy": "2.1", "torch": "2.5.0"}
