"""Ctrl-C and SIGTERM: everything ends within seconds and the next run resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import edit, git, make_project

SECONDS = 20


def members(group: int) -> list[str]:
    """Command lines of the processes in a process group."""
    found = subprocess.run(["ps", "-eo", "pgid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.split()[0] == str(group)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_all_workers_and_keeps_its_checkpoints(tmp_path: Path, number: int) -> None:
    root = make_project(tmp_path / "project")
    edit(root, "machine", workers=2)
    edit(root, "rloo", iterations=100_000)
    git(root, "commit", "-qam", "endless")
    command = [str(Path(sys.prefix) / "bin/nightshift"), "run"]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not list(root.glob(".state/rloo/*/step-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        # A terminal sends Ctrl-C to the whole group; a service manager sends SIGTERM to the process.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, message = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped; run again to resume" in message
    time.sleep(3)
    assert not members(process.pid)
    assert list(root.glob(".state/rloo/*/step-*"))
