"""One Prefect server for all flows whose tests do not end it: a new one makes its database first, which takes longer
than most of them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from flows import server
from flows.server import lasting_server
from nightshift.project import paths
from tests.ports import free_port
from tests.waiting import SECONDS


@dataclass(frozen=True)
class PrefectServer:
    url: str
    empty_database: Path
    """As this server made it, for projects whose commands bring servers of their own."""

    def copy_database(self, root: Path) -> None:
        home = root / paths.PREFECT_HOME
        home.mkdir(parents=True, mode=0o700)
        _copy_database(self.empty_database, home / self.empty_database.name)


@pytest.fixture(scope="package")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    root = tmp_path_factory.mktemp("prefect")
    home, empty = root / paths.PREFECT_HOME, root / "prefect.db"
    home.parent.mkdir()
    with contextlib.ExitStack() as stack:
        with (
            contextlib.chdir(root),
            mock.patch.dict(os.environ, PREFECT_HOME=str(home)),
            mock.patch.object(server, "PATIENCE_SECONDS", SECONDS),  # other processes may keep the cores busy
        ):
            url = stack.enter_context(lasting_server(free_port()))
        _copy_database(home / empty.name, empty)
        yield PrefectServer(url, empty)


def _copy_database(source: Path, target: Path) -> None:
    """Of a server that may be using it."""
    with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)
    target.chmod(0o600)
