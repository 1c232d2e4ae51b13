"""docs/security.md: what a run on one machine listens on, leaves behind, and never writes down."""

from __future__ import annotations

import contextlib
import re
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.pipeline import notify
from nightshift.project import paths
from tests.command import FAILING, Command
from tests.conftest import REPOSITORY, add_store, choose, edit, make_project
from tests.receiver import SECRET, receiving

SECRETS = {
    "NIGHTSHIFT_TOKEN": "s3cret-link",
    "NIGHTSHIFT_ROBOT_TOKEN": "s3cret-robot",
    "PREFECT_API_AUTH_STRING": "me:s3cret-client",
    "PREFECT_SERVER_API_AUTH_STRING": "me:s3cret-server",
    "MLFLOW_TRACKING_PASSWORD": "s3cret-tracking",
    "PGPASSWORD": "s3cret-database",
    "AWS_SECRET_ACCESS_KEY": "s3cret-bucket",
}
"""What a user's environment may hold."""


class Watched:
    """A run of the pipeline with Ray and a Prefect server of its own, which fails: what it listened on, and printed."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.listening: set[str] = set()
        self.programs: set[str] = set()
        self.prefect: set[int | None] = set()
        """What its Prefect server answers to somebody without a password."""
        command = Command(root, "run", program=FAILING, **SECRETS, **{notify.ADDRESSES: address})
        self.pid = command.pid
        while command.is_running():
            self._look(command.pid)
            time.sleep(0.1)
        ended = command.wait()
        self.code = ended.returncode
        self.printed = ended.stdout + ended.stderr

    def _look(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            run = psutil.Process(pid)
            for process in [run, *run.children(recursive=True)]:
                self._note(process)

    def _note(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            self.listening.update(address.ip for address in listening)
            command = " ".join(process.cmdline())
            if listening:
                self.programs.add(command)
            if listening and "flows.server" in command:
                self.prefect.add(answer(f"http://127.0.0.1:{listening[0].port}/api/admin/version"))


def answer(url: str) -> int | None:
    """The code of an HTTP server's answer; None if it gives none."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Iterator[Watched]:
    root = make_project(tmp_path_factory.mktemp("watched") / "project")
    add_store(root, migrated_store)
    choose(root)
    edit(root, "machine", workers=1)
    with receiving() as (address, messages):
        run = Watched(root, address)
    assert "error: the dataset is damaged" in run.printed
    assert [message["title"] for message in messages] == ["Nightshift: the run failed"]
    yield run


@pytest.mark.slow
def test_everything_that_a_run_starts_listens_on_loopback_alone(watched: Watched) -> None:
    assert watched.code == 1, watched.printed
    assert {address.removeprefix("::ffff:") for address in watched.listening} == {"127.0.0.1"}
    for program in ("flows.server", "gcs_server", "raylet"):
        assert [command for command in watched.programs if program in command], program


@pytest.mark.slow
def test_the_prefect_server_of_a_run_admits_nobody_else(watched: Watched) -> None:
    assert watched.prefect - {None} == {401}


@pytest.mark.slow
def test_state_of_a_run_is_for_its_user_alone_and_ray_leaves_nothing(watched: Watched) -> None:
    state = watched.root / paths.STATE
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    databases = [path for path in state.rglob("*.db") if path.is_file()]
    assert {path.name for path in databases} >= {"mlflow.db", "prefect.db"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in databases} == {0o600}
    assert not list(Path("/tmp").glob(f"nightshift-ray-{watched.pid}-*"))


@pytest.mark.slow
def test_no_secret_is_in_a_file_a_database_a_report_or_a_log_of_a_run_that_failed(watched: Watched) -> None:
    assert "Traceback" not in watched.printed
    secrets = [SECRET, *(value.rpartition(":")[2] for value in SECRETS.values())]
    written = {path: path.read_bytes() for path in watched.root.rglob("*") if path.is_file() and not path.is_symlink()}
    assert (watched.root / paths.REPORT) in written, "the run left a report"
    found = [(secret, path) for secret in secrets for path, text in written.items() if secret.encode() in text]
    assert found == []
    assert not [secret for secret in secrets if secret in watched.printed]


def test_the_page_about_security_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (REPOSITORY / "docs" / "security.md").read_text())
    assert named
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
