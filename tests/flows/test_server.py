"""Prefect servers that a command starts, and what is said of those that do not start."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows.server import LOG, temporary_server
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
