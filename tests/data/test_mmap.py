from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import mmap
from nightshift.data.episode_store import EpisodeStore
from tests.data import examples

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere numpy maps, and keeps a descriptor")

HOLD_ALL = """
import resource, sys
from pathlib import Path
from nightshift.data.episode_store import EpisodeStore
store = EpisodeStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
episodes = list(store)
assert len(episodes) == 300
assert sum(episode.actions[0, 0] == episode.policy_actions[0, 0] for episode in episodes) == 300
"""

OPEN_TOO_MANY = """
import resource, sys
from pathlib import Path
from nightshift.data import tensors
from nightshift.errors import DataError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(open("/dev/null"))
except OSError:
    pass
try:
    tensors.read(Path(sys.argv[1]))
except DataError as error:
    taken.clear()
    sys.exit(0 if "ulimit -n" in error.next_step and sys.argv[1] in error.what else str(error))
sys.exit("nothing was refused")
"""

MAP_TOO_MUCH = """
import resource, sys
from pathlib import Path
from nightshift.data import tensors
from nightshift.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
try:
    tensors.read(Path(sys.argv[1]))
except DataError as error:
    sys.exit(0 if "map fewer files" in error.next_step and sys.argv[1] in error.what else str(error))
sys.exit("nothing was refused")
"""


def run(script: str, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@linux_only
def test_far_more_episodes_are_held_than_files_may_be_open(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    for number in range(300):
        store.put(f"{number}", examples.make(steps=2, seed=number))
    run(HOLD_ALL, tmp_path)


@linux_only
def test_memory_goes_back_with_the_last_view_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    whole = mmap.view(tmp_path / "a")
    part = whole[10:20].view(np.uint16)
    del whole
    gc.collect()
    assert mappings(tmp_path) == 1
    np.testing.assert_array_equal(part.view(np.uint8), range(10, 20))
    del part
    gc.collect()
    assert mappings(tmp_path) == 0


def test_a_deleted_file_stays_readable_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    content = mmap.view(path)
    path.unlink()
    assert content.tobytes() == b"12345678"
    with pytest.raises(ValueError, match="read-only"):
        content[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        content.flags.writeable = True


def test_an_empty_file_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert mmap.view(tmp_path / "a").size == 0


@linux_only
def test_running_out_of_files_or_memory_is_reported_with_the_limit_to_raise(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    run(OPEN_TOO_MANY, path)
    with path.open("r+b") as stream:
        stream.truncate(2**34)
    run(MAP_TOO_MUCH, path)
