"""Settings of the tools, seen from the processes they are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NICENESS_OF_A_WORKER = """
import os, sys
from pathlib import Path
from nightshift.project import environment
environment.apply(Path(sys.argv[1]))
import ray
from nightshift.cluster.connection import start_ray
start_ray(1)
print(os.nice(0), ray.get(ray.remote(lambda: os.nice(0)).remote()))
"""


def test_a_ray_worker_has_the_priority_of_its_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NICENESS_OF_A_WORKER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    driver, worker = done.stdout.split()
    assert worker == driver
