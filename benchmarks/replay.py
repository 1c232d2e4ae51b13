"""Sampling from replay: our buffer and RLinf 0.3.0's, each in its own process, on the same data, in one run.

TRAJECTORIES trajectories of 100 steps of one environment: two 128x128 cameras, a state vector, actions. Batches of 256.

sample_warm      milliseconds per batch with all data in memory: RLinf's with its cache as large as the buffer, ours
                 with its files open and in the page cache; after WARM_UP batches, which touch 95 % of the images
sample_cold      milliseconds per batch from disk: own caches empty (RLinf's switched off, ours holding one trajectory),
                 and before each batch all files are dropped from the page cache (posix_fadvise DONTNEED), both sides
resident_memory  megabytes of the process (VmRSS) after the warm batches. Ours maps files, whose touched pages count
                 here; `reclaimable` is the part of it that the operating system can reclaim at any time
index_growth     our microseconds per batch of 256 from 100,000 trajectories (ours) and from 100 (peer), in turns. The
                 trajectories have two steps each and share the same images, so that 100,000 fit into memory
index_bare       the same without images: nothing to copy, so it measures the lookup of rows; 100
                 trajectories fit into the processor's cache while 100,000 do not

One JSON line each: {name, ours, peer, ratio, least, most}. `ratio` is how many times better ours is; for the index it
is 100,000 over 100, where 1 is flat. Figures are medians; `least` and `most` are of single batches.

`--trajectories N` makes it small, `--folder` is where the files go (5 and then 10 GB for 500).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 128
STEPS = 100
BATCH = 256
WARM_UP = 300
WARM_BATCHES = 200
COLD_BATCHES = 5
GROWTH = (100, 100_000)


def images(seed: int) -> dict[str, Any]:
    """The STEPS + 1 observations of an episode."""
    rng = np.random.default_rng(seed)
    cameras = {
        name: rng.integers(0, 256, (STEPS + 1, SIDE, SIDE, 3), dtype=np.uint8) for name in ("image", "wrist_image")
    }
    return {**cameras, "state": rng.random((STEPS + 1, 19), dtype=np.float32)}


def columns(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "actions": rng.random((STEPS, 7), dtype=np.float32),
        "rewards": rng.random(STEPS, dtype=np.float32),
        "versions": np.full(STEPS, seed),
        "prev_logprobs": rng.random(STEPS, dtype=np.float32),
    }


class Ours:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer: Any = None

    def _new(self, cache_size: int) -> Any:
        from nightshift.data.replay import TrajectoryReplay

        return TrajectoryReplay(auto_save_path=self.folder, cache_size=cache_size)

    def fill(self, count: int) -> None:
        from nightshift.data.replay import TrajectoryBatch

        with self._new(1) as buffer:
            for seed in range(count):
                steps, seen = columns(seed), images(seed)
                buffer.add_trajectories(
                    [TrajectoryBatch.from_episode_steps(seen, steps, episode=seed, terminated=True, truncated=False)]
                )

    def open(self, *, warm: bool) -> None:
        self.buffer = self._new(100_000 if warm else 1)
        self.buffer.load_checkpoint(self.folder)


class Peer:
    """RLinf's buffer; of its package only what the buffer imports."""

    def __init__(self, folder: Path) -> None:
        import logging
        from types import ModuleType

        import rlinf  # type: ignore[import-not-found]  # noqa: F401

        # Its logger lives in the worker of its scheduler, which needs Ray and a cluster.
        worker: Any = ModuleType("rlinf.scheduler.worker")
        worker.Worker = type("Worker", (), {"logger": logging.getLogger("rlinf")})
        sys.modules["rlinf.scheduler"] = ModuleType("rlinf.scheduler")
        sys.modules["rlinf.scheduler.worker"] = worker
        self.folder = folder
        self.buffer: Any = None

    def _new(self, cache: int, window: int) -> Any:
        from rlinf.data.replay_buffer import TrajectoryReplayBuffer  # type: ignore[import-not-found]

        return TrajectoryReplayBuffer(
            enable_cache=cache > 0,
            cache_size=cache,
            sample_window_size=window,
            auto_save=True,
            auto_save_path=str(self.folder),
        )

    def fill(self, count: int) -> None:
        import torch
        from rlinf.data.embodied_io_struct import Trajectory  # type: ignore[import-not-found]

        buffer = self._new(0, 0)
        for seed in range(count):
            seen = {name: torch.from_numpy(look)[:, None] for name, look in images(seed).items()}
            steps = {name: torch.from_numpy(column)[:, None] for name, column in columns(seed).items()}
            ends = torch.zeros(STEPS, 1, dtype=torch.bool)
            trajectory = Trajectory(
                max_episode_length=STEPS,
                model_weights_id="0",
                terminations=ends,
                truncations=ends.clone(),
                dones=ends.clone(),
                curr_obs={name: look[:-1] for name, look in seen.items()},
                next_obs={name: look[1:] for name, look in seen.items()},
                **steps,
            )
            buffer.add_trajectories([trajectory])
            if seed % 20 == 0:  # its queue of writes has no bound
                time.sleep(0.2)
        buffer.close()

    def open(self, *, warm: bool) -> None:
        count = len(list(self.folder.glob("*.pt")))
        self.buffer = self._new(count if warm else 0, count)
        self.buffer.load_checkpoint(str(self.folder))


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory() -> dict[str, float]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssFile")}


def measure(side: Ours | Peer) -> dict[str, Any]:
    """Runs in a process of its own: first from disk, then from memory."""
    side.open(warm=False)
    side.buffer.sample(1)  # whatever is compiled or imported when first used
    cold = []
    for _ in range(COLD_BATCHES):
        drop_from_page_cache(side.folder)
        cold.append(timed(lambda: side.buffer.sample(BATCH)))
    side.buffer = None
    gc.collect()
    side.open(warm=True)
    for path in side.folder.iterdir():  # into the page cache, for whoever reads files
        path.read_bytes()
    for _ in range(WARM_UP):
        side.buffer.sample(BATCH)
    warm = [timed(lambda: side.buffer.sample(BATCH)) for _ in range(WARM_BATCHES)]
    return {"cold": cold, "warm": warm, "memory": memory()}


def growth(seen: dict[str, Any]) -> Iterator[list[float]]:
    """Seconds per batch for each size in GROWTH, in turns; every trajectory sees the same."""
    from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay

    for column in seen.values():
        column.flags.writeable = False  # what cannot change is not copied
    buffers = [TrajectoryReplay() for _ in GROWTH]
    for buffer, count in zip(buffers, GROWTH, strict=True):
        for number in range(count):
            steps = {"actions": np.zeros((2, 7), np.float32), "rewards": np.zeros(2, np.float32)}
            buffer.add_trajectories(
                [TrajectoryBatch.from_episode_steps(seen, steps, episode=number, terminated=True, truncated=False)]
            )
    gc.collect()
    gc.freeze()
    for _ in range(WARM_BATCHES):
        yield [timed(lambda buffer=buffer: buffer.sample(BATCH)) for buffer in buffers]  # type: ignore[misc]


def run(side: str, folder: Path, count: int) -> dict[str, Any]:
    """Fill and measure one side in processes of its own; what it printed."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks import peers

    interpreter = sys.executable if side == "ours" else str(peers.python(peers.RLINF))
    environment = {name: value for name, value in os.environ.items() if side == "ours" or name != "PYTHONPATH"}
    figures: dict[str, Any] = {}
    for step in ("fill", "measure"):
        command = [interpreter, __file__, "--side", side, step, "--folder", str(folder), "--trajectories", str(count)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        figures = json.loads(printed)
    shutil.rmtree(folder)
    return figures


def line(name: str, ours: list[float], peer: list[float], scale: float, **more: Any) -> None:
    mine, theirs = (statistics.median(values) * scale for values in (ours, peer))
    spread = {"least": round(min(ours) * scale, 3), "most": round(max(ours) * scale, 3)}
    theirs_spread = {"peer_least": round(min(peer) * scale, 3), "peer_most": round(max(peer) * scale, 3)}
    figures = {"ours": round(mine, 3), "peer": round(theirs, 3), "ratio": round(theirs / mine, 2)}
    print(json.dumps({"name": name, **figures, **spread, **theirs_spread, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        name, step = options.side
        side = Ours(options.folder) if name == "ours" else Peer(options.folder)
        print(json.dumps(side.fill(options.trajectories) if step == "fill" else measure(side)))
        return
    looks = {name: look[:3].copy() for name, look in images(0).items()}
    for name, seen in (("index_growth", looks), ("index_bare", {"state": looks["state"]})):
        small, large = zip(*growth(seen), strict=True)
        line(name, list(large), list(small), 1e6, ratio=round(statistics.median(large) / statistics.median(small), 2))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="replay-benchmark-") as folder:
        figures = {side: run(side, Path(folder) / side, options.trajectories) for side in ("ours", "peer")}
    line("sample_warm", figures["ours"]["warm"], figures["peer"]["warm"], 1e3)
    line("sample_cold", figures["ours"]["cold"], figures["peer"]["cold"], 1e3)
    ours, peer = (figures[side]["memory"] for side in ("ours", "peer"))
    line("resident_memory", [ours["VmRSS"]], [peer["VmRSS"]], 1.0, reclaimable=round(ours["RssFile"]))


if __name__ == "__main__":
    main()
