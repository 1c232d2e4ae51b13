"""python -m tests.soak --minutes 60 --seed 0 --folder FOLDER"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb nightly runs for a while and check that nothing is lost.")
    parser.add_argument("--minutes", type=float, default=60.0, help="no cycle begins later than this")
    parser.add_argument("--cycles", type=int, default=10**6, help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the faults and their moments")
    parser.add_argument("--folder", type=Path, help="for projects, soak.log and soak.json; a new one if not given")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nightshift-soak-"))
    figures = soak(folder, seed=options.seed, minutes=options.minutes, cycles=options.cycles)
    return 1 if figures.failed else 0


if __name__ == "__main__":
    sys.exit(main())
