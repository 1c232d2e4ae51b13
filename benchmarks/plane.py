"""What the data plane costs beyond the work itself, as ratios that a busy machine hardly changes.

deal      a mixed batch of 20 x 256 transitions with two 64x64 cameras / the same rows sampled from each source alone
held      anonymous memory that 200 MB of pictures in an inbox add when they are replayed / those 200 MB
drain     sending one parcel with 50,000 waiting in the spool / with 500 waiting
commit    episodes per second of 4 and of 16 actors at one inbox / of one actor; syncs of the folder per episode
reader    the median of 500 looks into the inbox while 16 actors write / the median time of one commit

One JSON line per name: {name, ratio, …} with the figures behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.mixer import Mixer
from nightshift.data.rate_limiter import RateLimiter, RateLimits
from nightshift.data.replay import TrajectoryReplay, TransitionSpec
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import Ack, Message, MessageHeader, checksum
from nightshift.stream.online_replay import OnlineReplay
from nightshift.stream.spool import Spool, SpoolLimits
from nightshift.types import Provenance

RUN = "bench"
ROUNDS = 7
_PROVENANCE = Provenance(
    source="policy", suite="b", task="b", language="", split="train", init_state=None, seed=0, versions={}, commit=""
)


def an_episode(steps: int, size: int, seed: int) -> Episode:
    random = np.random.default_rng(seed)
    return Episode(
        observations={
            "state": random.standard_normal((steps, 8)).astype(np.float32),
            **{name: random.integers(0, 256, (steps, size, size, 3), np.uint8) for name in ("front", "wrist") if size},
        },
        actions=np.zeros((steps, 7), np.float32),
        rewards=np.zeros(steps, np.float32),
        discounts=np.ones(steps, np.float32),
        interventions=np.zeros(steps, np.bool_),
        policy_actions=np.zeros((steps, 7), np.float32),
        policy_versions=np.zeros(steps, np.int64),
        terminated=True,
        truncated=False,
        success=True,
        provenance=_PROVENANCE,
    )


def a_message(episode: Episode, actor: str, number: int) -> Message:
    episode_id = EpisodeId(RUN, actor, 1, number)
    content = episodes.to_bytes(replace(episode, provenance=replace(_PROVENANCE, origin=episode_id.key)))
    return Message(MessageHeader(episode_id, checksum([content])), content)


def median_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def deal(folder: Path) -> dict[str, Any]:
    def buffer(seed: int) -> TrajectoryReplay:
        replay = TrajectoryReplay(seed=seed)
        replay.add_episodes([an_episode(101, 64, seed + n) for n in range(20)])
        return replay

    online, demos = buffer(0), buffer(100)
    mixer = Mixer({"online": online.source(), "demos": demos.source()}, {"online": 0.5, "demos": 0.5})
    mixed = median_time(lambda: mixer.sample(256, num_batches=20))
    alone = median_time(lambda: (online.sample(128 * 20), demos.sample(128 * 20)))
    return {"ratio": round(mixed / alone, 2), "mixed_ms": round(1e3 * mixed, 1), "alone_ms": round(1e3 * alone, 1)}


def anonymous_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def held(folder: Path) -> dict[str, Any]:
    with Inbox(folder, run=RUN) as inbox:
        for number in range(20):
            inbox.receive(a_message(an_episode(101, 128, number), "arm", number))
        limits = RateLimits.sample_to_insert_ratio(1, min_size_to_sample=1, error_buffer=10**6)
        replay = OnlineReplay(inbox, RateLimiter(limits), TransitionSpec(), seed=0)
        pictures = sum(stored.path.stat().st_size for stored in inbox.stored_after(0))
        before = anonymous_memory()
        for _ in range(50):
            replay.sample(64)
        added = anonymous_memory() - before
    return {"ratio": round(added / pictures, 2), "added_mb": round(added / 1e6), "pictures_mb": round(pictures / 1e6)}


def drain(folder: Path) -> dict[str, Any]:
    def per_parcel(waiting: int) -> float:
        """Seconds per parcel that is read, acknowledged and deleted, over the first 500."""
        sample = a_message(an_episode(2, 0, 0), "arm", 0)
        place = folder / str(waiting) / "waiting"
        place.mkdir(parents=True)
        for number in range(waiting):
            header = MessageHeader(EpisodeId(RUN, "arm", 1, number), sample.header.checksum)
            (place / f"{header.key}.safetensors").write_bytes(sample.payload)
        with Spool(place.parent, run=RUN, actor="arm", limits=SpoolLimits(max_episodes=10**6)) as spool:
            started = time.perf_counter()
            for _ in range(500 // 10):
                for message in spool.unacknowledged(10):
                    spool.handle_ack(Ack(message.header, "accepted"))
            return (time.perf_counter() - started) / 500

    few, many = per_parcel(500), per_parcel(50_000)
    return {"ratio": round(many / few, 2), "us_at_500": round(1e6 * few), "us_at_50000": round(1e6 * many)}


def receive_all(inbox: Inbox, actors: int, each: int) -> float:
    """Episodes per second."""
    batches = [
        [a_message(an_episode(51, 16, 0), f"arm-{actors}-{actor}", n) for n in range(each)] for actor in range(actors)
    ]
    threads = [threading.Thread(target=lambda b=batch: [inbox.receive(m) for m in b]) for batch in batches]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return actors * each / (time.perf_counter() - started)


def commit(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    sync = files.sync
    with Inbox(folder, run=RUN) as inbox:
        for actors in (1, 4, 16):
            syncs: list[Path] = []
            files.sync = lambda path, seen=syncs: (seen.append(path), sync(path))[1]  # type: ignore[misc]
            figures[f"episodes_per_s_{actors}"] = round(receive_all(inbox, actors, 320 // actors))
            figures[f"syncs_per_episode_{actors}"] = round(len(syncs) / 320, 2)
    files.sync = sync
    ratios = {f"ratio_{n}": round(figures[f"episodes_per_s_{n}"] / figures["episodes_per_s_1"], 2) for n in (4, 16)}
    return {**ratios, **figures}


def reader(folder: Path) -> dict[str, Any]:
    with Inbox(folder, run=RUN) as inbox:
        numbers = iter(range(ROUNDS))
        one = median_time(lambda: inbox.receive(a_message(an_episode(51, 16, 0), "one", next(numbers))))
        writer = threading.Thread(target=lambda: receive_all(inbox, 16, 60))
        writer.start()
        looks = []
        for _ in range(500):
            started = time.perf_counter()
            inbox.stored_after(max(len(inbox) - 10, 0))
            looks.append(time.perf_counter() - started)
            time.sleep(0.002)
        writer.join()
    return {
        "ratio": round(statistics.median(looks) / one, 4),
        "median_us": round(1e6 * statistics.median(looks)),
        "ninety_ninth_percentile_us": round(1e6 * statistics.quantiles(looks, n=100)[-1]),
        "commit_us": round(1e6 * one),
    }


BENCHMARKS = {"deal": deal, "held": held, "drain": drain, "commit": commit, "reader": reader}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / ".state" / "benchmarks")
    parser.add_argument("--only", choices=BENCHMARKS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else BENCHMARKS:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            print(json.dumps({"name": name, **BENCHMARKS[name](Path(scratch))}), flush=True)


if __name__ == "__main__":
    main()
