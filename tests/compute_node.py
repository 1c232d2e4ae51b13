"""A compute node to test on: a Python without the packages of the pipeline, no git, and a folder without history."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.conftest import git

HIDDEN = ("dvc", "git", "gymnasium", "mlflow", "prefect", "pynvml", "nvidia_ml_py", "ray", "scmrepo")


def make_site(folder: Path, *hidden: str) -> Path:
    """The installed packages without those a node lacks, by links: imports and metadata of the others are not found."""
    folder.mkdir()
    for entry in (Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages").iterdir():
        name = entry.name.partition("-")[0].partition(".")[0].lower()
        if not name.startswith((*HIDDEN, *hidden)) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


class Node:
    """A folder with the files of a project but no history and no environment, and a bare Python to run it with."""

    def __init__(self, root: Path, site: Path) -> None:
        self.root = root
        self._site = site
        self._python = [sys.executable, "-S"]  # without the packages of this test's own environment
        self._environment = {
            **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
            "PATH": "",
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(site)]),
        }

    def receive(self, project: Path) -> None:
        """Bring what git tracks, as docs/compute_node.md does."""
        self.root.mkdir(parents=True)
        archive = self.root.with_name("job.tar")
        git(project, "archive", "-o", str(archive), "HEAD", ".", ":!.venv")  # a link to this test's environment
        with tarfile.open(archive) as tar:
            tar.extractall(self.root, filter="data")

    def copy(self, root: Path) -> Node:
        """Another node, with the same files."""
        shutil.copytree(self.root, root)
        return Node(root, self._site)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of ours."""
        return self._run("-m", "nightshift", *arguments)

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        return self._run("-c", program)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command of ours that is not waited for."""
        command = [*self._python, "-m", "nightshift", *arguments]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=self.root, env=self._environment, stdout=quiet, stderr=quiet)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._python, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=self._environment, capture_output=True, text=True, check=False, timeout=300
        )
