"""deploy/compose.yaml under a real container engine, in an image that has nothing of its own but the host's /usr."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nightshift.project import paths
from tests.conftest import REPOSITORY, make_project
from tests.ports import free_port
from tests.servers import responds
from tests.test_deploy import DEPLOY
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

IMAGE = "localhost/nightshift-test"
SERVICES = ("nightshift", "ui")
SHARED = ("/usr", "/etc", sys.prefix, sys.base_prefix, str(REPOSITORY))
"""What the image takes from the host, read-only: a registry cannot be asked for a real one everywhere."""
MOST = 32768
"""Of open files and of processes in a container."""
SOMEBODY = 1000
STOPPED = {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of what ended by itself when it was told to; 137 was killed after the grace period."""


class Compose:
    """podman-compose for a project, with images and containers in a folder of their own."""

    def __init__(self, folder: Path, project: Path, runtime: str) -> None:
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = [{_own_limits()}]\n[engine]\nruntime = "{runtime}"\n'
        )
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        self._project = project
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "NIGHTSHIFT_IMAGE": IMAGE,
        }

    def __call__(self, *arguments: str) -> str:
        files = ("-f", "deploy/compose.yaml", "-f", "deploy/shared.yaml")
        return self._done("podman-compose", *files, *arguments)

    def podman(self, *arguments: str) -> str:
        return self._done("podman", *arguments)

    def state(self, service: str) -> dict[str, Any]:
        (container,) = self.podman("ps", "-aq", "--filter", f"label=com.docker.compose.service={service}").split()
        (found,) = json.loads(self.podman("inspect", container))
        return {**found["State"], "RestartCount": found["RestartCount"]}

    def _done(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._project, env=self._environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


def _own_limits() -> str:
    """Podman raises them, for which root in a container lacks the right."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    return ", ".join(f'"{name}={_at_most(number)}"' for name, number in limits.items())


def _at_most(number: int) -> int:
    own, _ = resource.getrlimit(number)
    return MOST if own == resource.RLIM_INFINITY else min(own, MOST)


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    if not shutil.which("podman") or not shutil.which("podman-compose"):
        pytest.skip("no container engine (apt-get install podman; pip install podman-compose)")
    project = make_project(tmp_path / "nightshift")
    (project / paths.STATE).mkdir()
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:  # podman restarts nothing if its path is long
        compose = _engine(Path(folder), project)
        try:
            yield compose
        finally:
            compose("down", "--timeout", "0")
            compose.podman("rmi", "--all", "--force")


def _engine(folder: Path, project: Path) -> Compose:
    """With the first runtime that can start a container here."""
    _write_image(folder / "image.tar")
    trial = ["run", "--rm", "--network=host", *(f"--volume={path}:{path}:ro" for path in SHARED), IMAGE, "true"]
    for runtime in filter(shutil.which, ("crun", "runc")):
        compose = Compose(folder, project, runtime)
        compose.podman("import", str(folder / "image.tar"), IMAGE)
        try:
            compose.podman(*trial)
        except AssertionError as error:
            refused = str(error)
        else:
            return compose
    pytest.skip(f"podman starts no container here: {refused}")


def _write_image(path: Path) -> None:
    with tarfile.open(path, "w") as image:
        for name in ("tmp", "var/tmp", "root", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
            image.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            image.addfile(link)


def install(project: Path) -> dict[str, str]:
    """deploy/compose.yaml with other ports, and the code that is tested; returns the address of each service."""
    (project / "deploy").mkdir()
    content = (DEPLOY / "compose.yaml").read_text()
    addresses = {}
    for service, port in zip(SERVICES, re.findall(r'--port, "(\d+)"', content), strict=True):
        own = free_port()
        content = content.replace(f'--port, "{port}"', f'--port, "{own}"')
        addresses[service] = f"http://127.0.0.1:{own}/"
    (project / "deploy/compose.yaml").write_text(content)
    volumes = [f"{path}:{path}:ro" for path in SHARED]
    shared = {"services": {service: {"volumes": volumes} for service in SERVICES}}
    (project / "deploy/shared.yaml").write_text(yaml.safe_dump(shared))
    (project / "deploy/nightshift.env").write_text(f"PYTHONPATH={os.pathsep.join(sys.path)}\n")
    return addresses


def give_away(folder: Path) -> None:
    """To a user that is not the container's; only root may."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, SOMEBODY, SOMEBODY)


def test_services_in_a_clone_of_another_user_answer_come_back_after_a_kill_and_stop_by_themselves(
    compose: Compose, tmp_path: Path
) -> None:
    addresses = install(tmp_path / "nightshift")
    give_away(tmp_path / "nightshift")
    compose("up", "-d")
    for service, url in addresses.items():
        wait_until(partial(responds, url))
        (main,) = psutil.Process(compose.state(service)["Pid"]).children()
        main.kill()
        main.wait()
        wait_until(partial(responds, url))
        assert compose.state(service)["RestartCount"] == 1
    compose("stop")
    assert {compose.state(service)["ExitCode"] for service in SERVICES} <= STOPPED
    assert not [url for url in addresses.values() if responds(url)], "nothing is left"
