"""The units of deploy/ under a real systemd: the instance of a user, in namespaces of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.project import paths
from tests.conftest import make_project
from tests.ports import free_port
from tests.servers import responds
from tests.test_deploy import DEPLOY
from tests.waiting import wait_until

SYSTEMD = Path("/lib/systemd/systemd")
ALONE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")
MANAGER = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system  # as on a machine that systemd has booted
{systemd} --user --log-target=console
exit $?  # or bash would become systemd, and process 1, which it does not want to be for a user
"""
CGROUPS = [Path("/sys/fs/cgroup/systemd") / name for name in ("app.slice", "init.scope")]


def can_run_systemd() -> bool:
    """Not where systemd runs already: a second manager would meddle with its control groups."""
    booted = Path("/run/systemd/system").exists()
    if (
        booted
        or not CGROUPS[0].parent.is_dir()
        or os.geteuid() != 0
        or not SYSTEMD.exists()
        or not shutil.which("unshare")
    ):
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.slow


class Systemd:
    """The manager of one user."""

    def __init__(self, home: Path, process: int) -> None:
        self._home = home
        self._enter = ("nsenter", f"--target={process}", "--mount", "--pid")

    def ctl(self, *arguments: str) -> str:
        """What `systemctl --user` says."""
        told = subprocess.run(
            [*self._enter, "systemctl", "--user", "--no-pager", *arguments],
            env=environment(self._home),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return told.stdout.strip() + told.stderr.strip()

    def shows(self, unit: str, name: str) -> str:
        return self.ctl("show", unit, "--value", f"--property={name}")


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": os.environ["PATH"]}


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    if not can_run_systemd():
        pytest.skip("needs root, and systemd installed but not running")
    (tmp_path / "run").mkdir(mode=0o700)
    with (tmp_path / "systemd.log").open("wb") as log:
        command = [*ALONE, "--kill-child", "bash", "-ec", MANAGER.format(systemd=SYSTEMD)]
        process = subprocess.Popen(command, env=environment(tmp_path), stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or (tmp_path / "run/systemd/private").exists(), 60)
        assert process.poll() is None, (tmp_path / "systemd.log").read_text()
        (inside,) = psutil.Process(process.pid).children()
        yield Systemd(tmp_path, inside.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # all that is in its namespace ends with it
        process.wait()
        for group in CGROUPS:
            with contextlib.suppress(OSError):
                group.rmdir()


def install(name: str, home: Path) -> int:
    """As docs/nights.md says, with another port, and the code that is tested; returns the port."""
    port = free_port()
    units = home / ".config/systemd/user"
    units.mkdir(parents=True)
    (units / name).write_text(re.sub(r"--port \d+", f"--port {port}", (DEPLOY / name).read_text()))
    (home / ".config/nightshift.env").write_text(f'PYTHONPATH="{os.pathsep.join(sys.path)}"\n')
    (make_project(home / "nightshift") / paths.STATE).mkdir()
    return port


@pytest.mark.parametrize("name", ["nightshift.service", "nightshift-ui.service"])
def test_a_unit_runs_comes_back_after_a_kill_and_stops_without_a_failure(
    name: str, systemd: Systemd, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{install(name, tmp_path)}/"
    assert systemd.ctl("daemon-reload") == ""
    assert systemd.ctl("enable", name).startswith("Created symlink")
    assert systemd.ctl("start", name) == ""
    wait_until(lambda: responds(url))
    assert systemd.shows(name, "ActiveState") == "active"
    systemd.ctl("kill", "--signal=SIGKILL", "--kill-whom=main", name)
    wait_until(lambda: systemd.shows(name, "NRestarts") == "1" and responds(url))
    assert systemd.ctl("stop", name) == ""
    assert (systemd.shows(name, "ActiveState"), systemd.shows(name, "Result")) == ("inactive", "success")
    assert not responds(url), "nothing is left"
