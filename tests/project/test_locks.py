"""Locks between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.errors import DataError
from nightshift.project import locks
from nightshift.project.locks import Claim

HOLD = """
import sys
from pathlib import Path
from nightshift.errors import DataError
from nightshift.project.locks import Claim
claim = Claim(Path(sys.argv[1]), DataError)
print("held", flush=True)
sys.stdin.read()
"""


def refusal(holder: str) -> DataError:
    return DataError(f"held by {holder}")


def test_a_claim_is_held_from_construction_to_release(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "new" / "folder", DataError)
    for _ in range(2):
        with pytest.raises(DataError, match=f"folder is in use by process {os.getpid()}\n"):
            Claim(tmp_path / "new" / "folder", DataError)
    claim.release()
    claim.release()
    Claim(tmp_path / "new" / "folder", DataError).release()


def test_a_claim_that_is_garbage_is_released(tmp_path: Path) -> None:
    claim = Claim(tmp_path, DataError)
    del claim
    Claim(tmp_path, DataError).release()


def test_the_holder_is_named_and_its_lock_ends_with_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        for _ in range(2):  # the first attempt must not erase the holder's name
            with pytest.raises(DataError, match=f"held by {holder.pid}$"):
                locks.acquire(tmp_path / locks.LOCK, refusal)
        assert not locks.was_abandoned(tmp_path / locks.LOCK)
        holder.kill()
        holder.wait()
    assert locks.was_abandoned(tmp_path / locks.LOCK)
    locks.acquire(tmp_path / locks.LOCK, refusal).release()
    assert (tmp_path / locks.LOCK).read_text() == f"{os.getpid()}\n"


USER_OF_A_SCRATCH_FOLDER = """
import os, signal, sys
from pathlib import Path
from nightshift.project.locks import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_scratch_folder_goes_with_its_block_and_one_of_a_killed_process_with_the_next(tmp_path: Path) -> None:
    parent = tmp_path / "scratch"
    program = [sys.executable, "-c", USER_OF_A_SCRATCH_FOLDER, str(parent)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        with locks.scratch(parent) as mine:
            assert (list(mine.iterdir()), (theirs / "weights").exists()) == ([], True)
        assert not mine.exists()
        assert theirs.exists(), "its process is alive"
        other.communicate()
    assert theirs.exists()
    with pytest.raises(ZeroDivisionError), locks.scratch(parent):
        assert not theirs.exists()
        raise ZeroDivisionError
    assert list(parent.iterdir()) == []


def test_a_lock_can_be_released_by_another_thread(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    lock = locks.acquire(tmp_path / locks.LOCK, refusal)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.release).result()
    locks.acquire(tmp_path / locks.LOCK, refusal).release()


def test_a_lock_that_was_released_or_never_held_was_not_abandoned(tmp_path: Path) -> None:
    assert not locks.was_abandoned(tmp_path / locks.LOCK)
    locks.release(locks.acquire(tmp_path / locks.LOCK, refusal))
    assert not locks.was_abandoned(tmp_path / locks.LOCK)


def test_a_process_can_say_that_it_leaves_something_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    locks.release(locks.acquire(path, lambda holder: DataError(holder, "")))
    assert not locks.was_abandoned(path)
    locks.abandon(path)
    assert locks.was_abandoned(path)


def test_a_process_that_leaves_something_unfinished_does_not_take_the_place_of_another_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = locks.acquire(path, lambda holder: DataError(holder, ""))
    path.write_text("another\n")
    locks.abandon(path)
    assert locks.holder(path) == "another"
    lock.release()
