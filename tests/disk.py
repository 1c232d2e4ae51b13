"""No test cuts the power, so none waits until the disk has what was written: a process that is killed loses none of it,
for that is with the kernel. Imported by the tests' process and by the one that others are forked from."""

from __future__ import annotations

import os
import sqlite3
from typing import Any
from unittest import mock

from sqlalchemy import event
from sqlalchemy.engine import Engine

mock.patch.object(os, "fsync", lambda descriptor: None).start()


@event.listens_for(Engine, "connect")
def _do_not_wait(connection: Any, _: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")
