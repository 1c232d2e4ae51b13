"""Transitions inserted per second while a learner samples: our stream and dm-reverb 0.14.0, in turns, in one run.

Both: a writer process and a learner process on this machine, TCP between them, and a thread of the learner that samples
SAMPLES single transitions per second in batches of BATCH: what a learner takes at 8 updates of 256. A transition is
4 kB (a vector of 1000 numbers) or 98 kB (two 128x128 cameras), incompressible, the same arrays on both sides. Clocks
run from the first transition until the last one is confirmed; a few episodes are moved before they start.

Ours is durable twice: the writer spools each episode of TRANSITIONS transitions to disk (fsync) before it is sent, and
the learner commits it to disk (fsync of the file, rename, fsync of the folder) before it acknowledges it; the sampler
reads views of the committed files. Spool and inbox share a disk here; on two machines each has its own. Reverb keeps
everything in memory; of its three ways to write the fastest is used, closed after every episode, which waits until the
server has all of it.

One JSON line per size: {name, ours, peer, ratio, least, most, spread, samples, durability}. Figures are medians over
rounds; `least` and `most` are the ratios of the worst and the best round; `spread` has the slowest and the fastest
round of each; `samples` per second that each sampler got; `durability` our throughput with fsync and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRANSITIONS = 100
BATCH = 64
SAMPLES = 2048
ROUNDS = 5
WARM_UP = 3
EPISODES = {"4kb": 300, "98kb": 100}
RUN = "bench"

Columns = dict[str, NDArray[Any]]


def observations(size: str, seed: int) -> Columns:
    """The observations of an episode; the last one begins no transition."""
    random, steps = np.random.default_rng(seed), TRANSITIONS + 1
    if size == "4kb":
        return {"state": random.standard_normal((steps, 1000)).astype(np.float32)}
    return {name: random.integers(0, 256, (steps, 128, 128, 3), np.uint8) for name in ("front", "wrist")}


def sample_until(stop: threading.Event, batch: Callable[[], int]) -> float:
    """Samples per second until `stop` is set, limited to SAMPLES."""
    count, started = 0, time.perf_counter()
    while not stop.wait(max(0.0, started + count / SAMPLES - time.perf_counter())):
        count += batch()
    return count / (time.perf_counter() - started)


def serve(port: int, batch: Callable[[], int]) -> None:
    """A learner: prints its port, samples until stdin closes, prints the rate."""
    print(json.dumps({"port": port}), flush=True)
    stop = threading.Event()
    rates: list[float] = []
    sampler = threading.Thread(target=lambda: rates.append(sample_until(stop, batch)))
    sampler.start()
    sys.stdin.read()
    stop.set()
    sampler.join()
    print(json.dumps({"samples": rates[0]}), flush=True)


def our_learner(size: str, folder: Path) -> None:
    from nightshift.data.episode import Episode
    from nightshift.stream.inbox import Inbox
    from nightshift.stream.link import LearnerEndpoint
    from nightshift.stream.server import Server
    from nightshift.stream.weights import WeightPublisher

    endpoint = LearnerEndpoint(Inbox(folder / "inbox", run=RUN), WeightPublisher(folder / "weights"))
    server = Server(endpoint)
    random = np.random.default_rng(0)
    loaded: list[Episode] = []

    def batch() -> int:
        loaded.extend(stored.load() for stored in endpoint.inbox.stored_after(len(loaded)))
        if not loaded:
            endpoint.inbox.wait_for_episode(0, 0.1)
            return 0
        picked = [
            (loaded[i // TRANSITIONS], i % TRANSITIONS) for i in random.integers(len(loaded) * TRANSITIONS, size=BATCH)
        ]
        for name in loaded[0].observations:
            np.stack([episode.observations[name][step] for episode, step in picked])
        for name in ("actions", "rewards", "discounts"):
            np.stack([getattr(episode, name)[step] for episode, step in picked])
        return BATCH

    serve(server.port, batch)
    server.close()


def our_writer(size: str, folder: Path, port: int) -> None:
    from nightshift.data.episode import Episode
    from nightshift.stream.sender import Sender
    from nightshift.stream.spool import Spool, SpoolLimits
    from nightshift.stream.tcp_link import TcpLink
    from nightshift.types import Provenance

    spool = Spool(folder / "spool", run=RUN, actor="writer", limits=SpoolLimits(max_episodes=8))
    sender = Sender(spool, TcpLink("127.0.0.1", port))
    steps = TRANSITIONS + 1
    provenance = Provenance(
        source="policy",
        suite="bench",
        task="none",
        language="",
        split="train",
        init_state=None,
        seed=0,
        versions={},
        commit="",
    )
    episodes = [
        Episode(
            observations=observations(size, seed),
            actions=np.zeros((steps, 7), np.float32),
            rewards=np.zeros(steps, np.float32),
            discounts=np.ones(steps, np.float32),
            interventions=np.zeros(steps, np.bool_),
            policy_actions=np.zeros((steps, 7), np.float32),
            policy_versions=np.zeros(steps, np.int64),
            terminated=True,
            truncated=False,
            success=True,
            provenance=provenance,
        )
        for seed in range(4)
    ]

    def write(count: int) -> None:
        for index in range(count):
            spool.put(episodes[index % len(episodes)])
        spool.wait_until_empty()

    report(size, write)
    sender.close()


def peer_learner(size: str, folder: Path) -> None:
    import reverb  # type: ignore[import-not-found]

    table = reverb.Table(
        "transitions",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size=10**6,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table], port=None)
    client = reverb.Client(f"localhost:{server.port}")

    def batch() -> int:
        if not client.server_info()["transitions"].current_size:
            time.sleep(0.01)
            return 0
        return sum(len(sample) for sample in client.sample("transitions", BATCH))

    serve(server.port, batch)
    server.stop()


def peer_writer(size: str, folder: Path, port: int) -> None:
    import reverb

    client = reverb.Client(f"localhost:{port}")
    seen = [observations(size, seed) for seed in range(4)]
    action, reward, discount = np.zeros(7, np.float32), np.float32(0), np.float32(1)

    def write(count: int) -> None:
        for index in range(count):
            columns = seen[index % len(seen)]
            with client.writer(max_sequence_length=1) as writer:
                for step in range(TRANSITIONS):
                    writer.append([*(column[step] for column in columns.values()), action, reward, discount])
                    writer.create_item("transitions", 1, 1.0)

    report(size, write)


def report(size: str, write: Callable[[int], None]) -> None:
    write(WARM_UP)
    started = time.perf_counter()
    write(EPISODES[size])
    print(json.dumps({"inserts": TRANSITIONS * EPISODES[size] / (time.perf_counter() - started)}), flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "our-learner": our_learner,
    "our-writer": our_writer,
    "peer-learner": peer_learner,
    "peer-writer": peer_writer,
}


def measure(python: str, side: str, size: str, folder: Path, *, synced: bool = True) -> dict[str, float]:
    """One round of one side: inserts and samples per second."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        call = [python, __file__, "--size", size, "--folder", scratch, *([] if synced else ["--no-fsync"])]
        learner = subprocess.Popen(
            [*call, "--role", f"{side}-learner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with learner:
            assert learner.stdin and learner.stdout
            port = json.loads(learner.stdout.readline())["port"]
            writer = [*call, "--role", f"{side}-writer", "--port", str(port)]
            inserts = json.loads(subprocess.run(writer, check=True, stdout=subprocess.PIPE, text=True).stdout)
            learner.stdin.close()
            samples = json.loads(learner.stdout.readline())
        return {**inserts, **samples}


def compare(size: str, peer: str, folder: Path) -> dict[str, Any]:
    rounds = [
        {
            "ours": measure(sys.executable, "our", size, folder),
            "peer": measure(peer, "peer", size, folder),
            "unsynced": measure(sys.executable, "our", size, folder, synced=False),
        }
        for _ in range(ROUNDS)
    ]
    ours, theirs, unsynced = ([r[side]["inserts"] for r in rounds] for side in ("ours", "peer", "unsynced"))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    with_fsync, without = statistics.median(ours), statistics.median(unsynced)
    return {
        "name": f"insert_{size}",
        "ours": round(with_fsync),
        "peer": round(statistics.median(theirs)),
        "ratio": round(with_fsync / statistics.median(theirs), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "spread": {"ours": [round(min(ours)), round(max(ours))], "peer": [round(min(theirs)), round(max(theirs))]},
        "samples": {side: round(statistics.median(r[side]["samples"] for r in rounds)) for side in ("ours", "peer")},
        "durability": {
            "fsync": round(with_fsync),
            "no_fsync": round(without),
            "cost": round(1 - with_fsync / without, 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / ".state" / "benchmarks")
    parser.add_argument("--size", choices=EPISODES)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-fsync", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.no_fsync:
        setattr(os, "fsync", lambda descriptor: None)  # noqa: B010
    if options.role:
        ROLES[options.role](options.size, options.folder, *([options.port] if options.port else []))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks import peers

    options.folder.mkdir(parents=True, exist_ok=True)
    reverb = peers.Peer(
        name="reverb",
        alone=("dm-reverb==0.14.0",),
        needs=("tensorflow-cpu==2.15.1", "dm-tree", "portpicker"),  # the last TensorFlow its binary fits
    )
    python = str(peers.python(reverb))
    for size in [options.size] if options.size else EPISODES:
        print(json.dumps(compare(size, python, options.folder)), flush=True)


if __name__ == "__main__":
    main()
