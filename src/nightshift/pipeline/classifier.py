"""The success classifier by hand: record episodes, train it, evaluate it.

It is no stage: a person looks at its mistakes before its rewards train a policy, and then names it in `rlpd.reward`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nightshift import config, envs, files, policies
from nightshift.adapters.mlflow_tracking import MlflowTracker
from nightshift.data import sources
from nightshift.data.decisions import decision_episode
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.splits import check_none_from_validation, planned_training_states, split_training_states
from nightshift.errors import ConfigError, DataError
from nightshift.pipeline.run import Session
from nightshift.policies import device
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.reports import classifier as report
from nightshift.rewards import classifier, segments, training
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.rollouts.provenance import provenance
from nightshift.statistics.classification import Confusion
from nightshift.telemetry import progress
from nightshift.types import INSTRUCTION, RolloutRequest, Task

_LOG_EVERY = 20
"""Gradient steps between two losses in MLflow."""
_SEED_DOMAIN = 3
"""Separates these samples of the policy from those of training."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command tells the person."""

    name: str
    threshold: float
    tables: Mapping[str, Confusion]
    frames: Mapping[str, int]
    """By part."""
    pointer: Path | None = None
    """The .dvc file of the classifier, for git."""


def train(session: Session) -> Outcome:
    """Train on the sources, choose the threshold, save the classifier and track it with DVC."""
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    settings, seed = session.params.classifier, session.params.seed
    episodes = _episodes(settings)
    _check(episodes, session.params)
    shapes = segments.shapes(episodes)
    starts = segments.split(episodes, settings, seed)
    found = segments.by_part(episodes, starts, settings.ambiguous_steps)
    segments.check_labels(found["train"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SuccessClassifier.from_config(settings, shapes).to(device.resolve(session.params.machine.device))
        with _tracked(session, "classifier-train", [_identity(settings)]) as tracker:
            with progress.bar("classifier", total=settings.steps) as advance:
                training.train(network, found["train"], settings, seed, _watch(tracker, advance))
            trained = training.calibrated(network, found["calibration"], settings, starts)
            _log(tracker, "calibration", {report.OVERALL: _table(trained, found["calibration"])}, trained.threshold)
            classifier.save(trained, paths.CLASSIFIER)
            tracker.artifact(paths.CLASSIFIER)
    return Outcome(
        name=classifier.name_of(paths.CLASSIFIER),
        threshold=trained.threshold,
        tables={report.OVERALL: _table(trained, found["calibration"])},
        frames={part: sum(len(one.frames) for one in own) for part, own in found.items()},
        pointer=session.store.track(paths.CLASSIFIER),
    )


def evaluate(session: Session) -> Outcome:
    """Judge all episodes of the sources whose starts were in neither training nor calibration."""
    torch.set_num_threads(1)
    settings = session.params.classifier
    trained, name = classifier.load(paths.CLASSIFIER), classifier.name_of(paths.CLASSIFIER)
    episodes = [episode for episode in _episodes(settings) if _is_unseen(episode, trained)]
    if not episodes:
        raise DataError(
            "every episode of classifier.sources was in training or calibration",
            "name the sources that it was trained on (classifier.test_share of them was set aside), or add episodes",
        )
    segments.check(episodes, settings)
    trained.network.check(segments.shapes(episodes), "the episodes")
    trained.check_tasks(sorted({episode.provenance.task for episode in episodes}))
    found = [one for episode in episodes for one in segments.of_episode(episode, trained.ambiguous_steps)]
    network = trained.network.to(device.resolve(session.params.machine.device))
    judged = training.judge(network, found)
    facts = {"classifier": name, "threshold": trained.threshold, "episodes": len(episodes)}
    with _tracked(session, "classifier-evaluate", [name, _identity(settings)]) as tracker:
        tables = report.write(paths.CLASSIFIER_REPORT, judged, network.cameras, facts)
        _log(tracker, "test", tables, trained.threshold)
        tracker.artifact(paths.CLASSIFIER_REPORT)
        tracker.tag({"nightshift.classifier": name})
    frames = {"test": sum(len(one.frames) for one in found)}
    return Outcome(name=name, threshold=trained.threshold, tables=tables, frames=frames)


def record(session: Session, policy: Path, episodes: int, temperature: float) -> dict[str, tuple[int, int]]:
    """Let a policy play from training states, and keep what the cameras saw of successes and failures alike.

    Returns the successes and episodes of each task. States that were played before by the same weights are passed over.
    """
    env, settings = session.params.env, session.params.classifier
    cameras = _cameras(settings, env)
    files.verify_folder(policy, f"name the folder of a policy, such as {paths.SFT_POLICY}")
    player = policies.load(policy)
    store = EpisodeStore(paths.ROLLOUTS / files.sha256(policy / policies.WEIGHTS)[:12])
    tasks = {task.name: task for task in envs.tasks(env)}
    requests = [
        RolloutRequest(
            task=name,
            split="train",
            init_state=state,
            controller="sample",
            seed=_seed_of(session.params.seed, task, state),
            temperature=temperature,
            cameras=tuple(cameras),
        )
        for name, task in tasks.items()
        for state in _unplayed(store, task, session.params.states, episodes)
    ]
    counts = dict.fromkeys(tasks, (0, 0))
    with progress.bar("record", total=len(requests)) as advance:
        for _, (played,) in session.pool(env).run(requests, snapshot(player)):
            if played.valid:
                name = played.request.task
                origin = provenance(played.request, tasks.values(), session.commit)
                store.put(_key(name, played.request.init_state), decision_episode(played, origin, discount=1.0))
                counts[name] = counts[name][0] + played.success, counts[name][1] + 1
            advance(f"{sum(good for good, _ in counts.values())} successes")
    return counts


def _cameras(settings: config.Classifier, env: config.Env) -> list[str]:
    cameras = [name for name in settings.inputs if name != INSTRUCTION]
    missing = [name for name in cameras if name not in env.cameras.names]
    if missing:
        raise ConfigError(
            f"classifier.inputs has {', '.join(missing)}, which env.cameras.names does not",
            "add the camera to env.cameras.names in params.yaml",
        )
    envs.check_cameras(env)
    return cameras


def _unplayed(store: EpisodeStore, task: Task, states: config.States, episodes: int) -> list[int]:
    """Training states in their order: no validation state, and none whose episode is there already."""
    free = [state for state in split_training_states(task, states).train if _key(task.name, state) not in store]
    return free[:episodes]


def _seed_of(seed: int, task: Task, state: int) -> int:
    """Of an episode's own noise."""
    return int(np.random.SeedSequence([seed, _SEED_DOMAIN, task.index, state]).generate_state(1)[0])


def _key(task: str, state: int) -> str:
    return f"{task}-{state:05d}"


def _episodes(settings: config.Classifier) -> list[Episode]:
    return [episode for store in _all_stores(settings) for episode in store]


def _check(episodes: Sequence[Episode], params: config.Params) -> None:
    """DataError for what must not be learned from, before anything is trained."""
    segments.check(episodes, params.classifier)
    states = planned_training_states(params.env, params.states)
    begun = ((f"the episode {episode.label}", episode.provenance) for episode in episodes)
    check_none_from_validation(begun, states, "leave its source out of classifier.sources")


def _all_stores(settings: config.Classifier) -> list[EpisodeStore]:
    return [store for source in sources.resolved(settings.sources) for store in _stores(source)]


def _stores(source: str) -> list[EpisodeStore]:
    if source != sources.ROLLOUTS:
        return [sources.open_store(source)]
    folders = sorted(folder for folder in paths.ROLLOUTS.glob("[!.]*") if folder.is_dir())
    if not folders:
        raise DataError(f"{paths.ROLLOUTS} has no episodes", "nightshift classifier record")
    return [EpisodeStore(folder) for folder in folders]


def _identity(settings: config.Classifier) -> str:
    """Of the episodes of all sources."""
    found = [files.identity(store.folder) for store in _all_stores(settings)]
    return hashlib.sha256("".join(found).encode()).hexdigest()


def _is_unseen(episode: Episode, trained: Trained) -> bool:
    return trained.starts.get(segments.start_of(episode), "test") == "test"


def _table(trained: Trained, found: Sequence[segments.Segment]) -> Confusion:
    return training.confusion(training.judge(trained.network, found), trained.threshold)


@contextmanager
def _tracked(session: Session, name: str, inputs: Sequence[str]) -> Iterator[MlflowTracker]:
    """A run of MLflow under the one of the pipeline."""
    sections = {"seed": session.params.seed, "classifier": session.params.classifier.model_dump(mode="json")}
    key = json.dumps([name, sections, *inputs], sort_keys=True)
    with session.tracking.stage(name, hashlib.sha256(key.encode()).hexdigest(), sections) as tracker:
        yield tracker


def _watch(tracker: MlflowTracker, advance: progress.Advance) -> training.Watch:
    def watch(step: int, loss: float) -> None:
        advance(f"loss {loss:.4f}")
        if step % _LOG_EVERY == 0:
            tracker.log({"classifier/loss": loss}, step)

    return watch


def _log(tracker: MlflowTracker, part: str, tables: Mapping[str, Confusion], threshold: float) -> None:
    """Counts, precision and recall with the ends of their intervals, overall and by task."""
    metrics = {"classifier/threshold": threshold}
    for name, table in tables.items():
        prefix = f"classifier/{part}" if name == report.OVERALL else f"classifier/{part}/{name}"
        for measure, value in table.to_json().items():
            if isinstance(value, dict):
                ends = {"": value["rate"], "_low": value["low"], "_high": value["high"]}
                metrics |= {f"{prefix}/{measure}{end}": found for end, found in ends.items()}
            elif value is not None:
                metrics[f"{prefix}/{measure}"] = float(value)
    tracker.log(metrics, step=0)
