"""Commands whose output is cut short by its reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["env", "list"], ["plan"]])
def test_a_reader_that_has_seen_enough_is_no_crash(project: Path, command: list[str]) -> None:
    whole = [sys.executable, "-m", "nightshift", *command]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=project) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before anything is written
        complaint = process.stderr.read().decode()
    assert complaint == ""
    assert process.returncode == 141
