"""A compute node to test on: a Python without the packages of the pipeline, no git, and a folder without history."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.handover import hand_over, take_over

HIDDEN = ("av", "dvc", "git", "gymnasium", "mlflow", "prefect", "pynvml", "nvidia_ml_py", "ray", "scmrepo")


def make_site(folder: Path, *hidden: str) -> Path:
    """The installed packages without those a node lacks, by links: imports and metadata of the others are not found."""
    folder.mkdir()
    for entry in (Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages").iterdir():
        name = entry.name.partition("-")[0].partition(".")[0].lower()
        if not name.startswith((*HIDDEN, *hidden)) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


_PYTHON = [sys.executable, "-S"]
"""Without the packages of this test's own environment."""
_IMPORTED = ("torch._dynamo", "scipy.stats", "pydantic", "yaml", "safetensors.numpy", "typer", "rich.progress")


@contextlib.contextmanager
def forking_python(site: Path) -> Iterator[str]:
    """A bare Python that has imported torch and forks a process for every command; yields its address."""
    with tempfile.TemporaryDirectory(prefix="node-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        server = subprocess.Popen(
            [*_PYTHON, "-c", f"from tests.compute_node import serve; serve({number})"],
            cwd=Path(__file__).parent.parent,
            env={"PYTHONPATH": str(site)},
            pass_fds=[number],
        )
        yield address
        server.kill()
        server.wait()


def serve(listener: int) -> None:
    """Run nightshift for every connection, in a fork, and answer with its exit status."""
    for package in _IMPORTED:
        importlib.import_module(package)
    gc.freeze()  # a garbage collection in a fork would copy all of this
    with socket.socket(fileno=listener) as accepting:
        while True:
            connection, _ = accepting.accept()
            pid = os.fork()
            if not pid:
                status = _nightshift(take_over(connection))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # taking a process apart that shares its memory costs more than most commands
            with connection:
                connection.sendall(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _nightshift(arguments: Sequence[str]) -> int:
    """Run the command of the project in this folder; returns its exit status."""
    sys.argv = ["nightshift", *arguments]
    sys.path.insert(0, str(Path("src").absolute()))
    try:
        runpy.run_module("nightshift", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class Node:
    """A folder with the files of a project but no history and no environment, and a bare Python to run it with: a new
    one for every command, or the one at the address `python`."""

    def __init__(self, root: Path, site: Path, python: str | None = None) -> None:
        self.root = root
        self._site = site
        self._address = python
        self._environment = {
            **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
            "PATH": "",
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(site)]),
        }

    def receive(self, project: Path) -> None:
        """Bring what git tracks, as docs/compute_node.md does."""
        from nightshift import files
        from tests.conftest import git

        self.root.mkdir(parents=True)
        archive = self.root.with_name(f"{self.root.name}.tar")
        git(project, "archive", "-o", str(archive), "HEAD", ".", ":!.venv")  # a link to this test's environment
        with tarfile.open(archive) as tar:
            files.extract(tar, self.root)

    def copy(self, root: Path) -> Node:
        """Another node, with the same files."""
        shutil.copytree(self.root, root)
        return self.another(root)

    def another(self, root: Path) -> Node:
        """A node like this one, on which nothing is yet."""
        return Node(root, self._site, self._address)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of ours."""
        return self._forked(self._address, *arguments) if self._address else self._run("-m", "nightshift", *arguments)

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        return self._run("-c", program)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command of ours, in a new interpreter, that is not waited for."""
        command = [*_PYTHON, "-m", "nightshift", *arguments]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=self.root, env=self._environment, stdout=quiet, stderr=quiet)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_PYTHON, *arguments],
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def _forked(self, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with (
            socket.socket(socket.AF_UNIX) as server,
            open(os.devnull) as nothing,
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
        ):
            server.settimeout(300)
            server.connect(address)
            streams = [file.fileno() for file in (nothing, stdout, stderr)]
            hand_over(server, arguments, self._environment, str(self.root), streams)
            with server.makefile("rb") as answer:
                status: int = pickle.load(answer)
            written = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
        return subprocess.CompletedProcess(arguments, status, *written)
