"""Prefect servers that a command starts, and what is said of those that do not start."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows import server as prefect_server
from flows.server import LOG, check_port, temporary_server
from nightshift.errors import ProjectError


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    LOG.parent.mkdir()
    return tmp_path


def test_nobody_takes_the_port_of_a_server_that_is_starting() -> None:
    with temporary_server() as server:
        port = urlsplit(server.url).port
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


def test_a_server_that_does_not_start_says_why(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a_file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(project / "a_file"))
    with temporary_server() as server, pytest.raises(ProjectError, match=r"ended with status 1(.|\n)*FileExistsError"):
        server.wait()


def test_a_port_that_is_taken_is_told_with_the_next_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProjectError, match=f"port {port} is in use") as refused:
            check_port(port, "ui")
    assert refused.value.next_step == f"nightshift ui --port {port + 1}"


def test_an_address_that_this_machine_does_not_have_is_no_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_server, "_HOST", "192.0.2.1")  # of documentation
    with pytest.raises(ProjectError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_port(0, "ui")


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EACCES, "this user may not listen on port 80"),
        (errno.EMFILE, r":80 cannot be listened on: .*Too many open"),
    ],
)
def test_other_reasons_why_nothing_listens_are_not_called_a_port_in_use(
    number: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, who may run this test, is not refused a port."""

    def refused(_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(ProjectError, match=sentence):
        check_port(80, "ui")
