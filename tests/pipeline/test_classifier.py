"""`nightshift classifier` from episodes to MLflow: real simulators of the fake suite, real training, MLflow and DVC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mlflow.entities import Run
from PIL import Image

from nightshift import config, files, policies
from nightshift.adapters import mlflow_tracking
from nightshift.data.decisions import decision_episode
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.fake import TASKS
from nightshift.errors import ConfigError, DataError
from nightshift.pipeline import classifier as commands
from nightshift.pipeline.run import Session
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.rewards import classifier, segments, training
from nightshift.rewards.classifier import SuccessClassifier
from nightshift.rollouts.local import LocalPool
from nightshift.types import Controller, Provenance, RolloutRequest, Trajectory
from tests.conftest import add_store, edit, git, make_project
from tests.rollouts.parts import policy

SETTINGS: dict[str, Any] = {
    "sources": ["goal"],
    "inputs": ["agentview"],
    "ambiguous_steps": 1,
    "precision": 0.75,
    "channels": [8, 16],
    "hidden": 32,
    "dropout": 0.0,
    "steps": 400,
    "batch_size": 32,
    "learning_rate": 1.0e-3,
    "augmentation": {"crop": 0, "jitter": 0.0},
}
CAMERAS = {"names": ["agentview"], "size": 16, "shadows": False}
(TASK,) = (task for task in TASKS if task.name == "near")
STARTS = 120


def played(env: config.Env) -> Iterator[Trajectory]:
    """Successes of the expert and failures of random actions, from the same states."""
    controllers: tuple[Controller, ...] = ("expert", "random")
    requests = [
        RolloutRequest(
            task=TASK.name, split="train", init_state=state, controller=controller, seed=0, cameras=("agentview",)
        )
        for state in range(STARTS)
        for controller in controllers
    ]
    pool = LocalPool(env)
    for _, (trajectory,) in pool.run(requests, snapshot(policy())):
        yield trajectory
    pool.close()


def labelled(trajectory: Trajectory) -> Episode:
    origin = Provenance(
        source=trajectory.request.controller,
        suite=TASK.suite,
        task=TASK.name,
        language=TASK.language,
        split="train",
        init_state=trajectory.request.init_state,
        seed=0,
        versions={},
        commit="abc1234",
    )
    episode = decision_episode(trajectory, origin, discount=1.0)
    return replace(episode, observations={"agentview": episode.observations["agentview"]})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project with 120 successes and 120 failures as an import."""
    root = make_project(tmp_path_factory.mktemp("classifier") / "project")
    add_store(root, migrated_store)
    edit(root, "env", tasks=["near"], cameras=CAMERAS)
    edit(root, "classifier", **SETTINGS)
    git(root, "commit", "-qam", "smaller")
    with files.new_folder(root / paths.IMPORTS / "goal") as folder:
        store = EpisodeStore(folder)
        for number, trajectory in enumerate(played(config.load(root / paths.PARAMS).env)):
            store.put(f"{number:05d}", labelled(trajectory))
    return root


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """The same after `nightshift classifier train` and `evaluate`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        with Session(made, kind="classifier") as session:
            commands.train(session)
            commands.evaluate(session)
    return made


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy without a classifier; the test runs inside it."""
    root = tmp_path / "project"
    shutil.copytree(made, root, symlinks=True, ignore=shutil.ignore_patterns("models", "cache", "reports"))
    monkeypatch.chdir(root)
    return root


def run_of(root: Path, stage: str) -> Run:
    client = mlflow_tracking.connect(root)
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`{mlflow_tracking.STAGE}` = '{stage}'")
    return found


def test_it_tells_success_from_failure_and_keeps_its_precision_on_episodes_it_has_not_seen(trained: Path) -> None:
    made = classifier.load(trained / paths.CLASSIFIER)
    assert made.calibration["precision"]["low"] >= SETTINGS["precision"]
    found = json.loads((trained / paths.CLASSIFIER_REPORT / "classifier.json").read_text())
    counts = found["confusion"]["overall"]
    assert counts["true_positives"] + counts["false_negatives"] == STARTS * 0.2
    assert counts["false_positives"] + counts["true_negatives"] == 2 * STARTS * 0.2, "before success, and failures"
    assert counts["precision"]["rate"] > 0.7, "one third is chance"
    assert counts["recall"]["rate"] > 0.5
    assert counts["recall"]["rate"] > 3 * counts["false_positive_rate"]["rate"]


def test_the_evaluation_is_of_no_start_that_was_trained_or_calibrated_on(trained: Path) -> None:
    starts = classifier.load(trained / paths.CLASSIFIER).starts
    found = json.loads((trained / paths.CLASSIFIER_REPORT / "classifier.json").read_text())
    assert sorted(set(starts.values())) == ["calibration", "test", "train"]
    assert found["episodes"] == 2 * list(starts.values()).count("test")


def test_mlflow_has_the_numbers_the_model_and_the_pictures(trained: Path) -> None:
    training_run, evaluation = run_of(trained, "classifier-train"), run_of(trained, "classifier-evaluate")
    assert (training_run.info.status, evaluation.info.status) == ("FINISHED", "FINISHED")
    assert training_run.data.metrics["classifier/calibration/precision_low"] >= SETTINGS["precision"]
    assert training_run.data.params["classifier.precision"] == "0.75"
    found = json.loads((trained / paths.CLASSIFIER_REPORT / "classifier.json").read_text())["confusion"]["overall"]
    for measure in ("precision", "recall", "false_positive_rate"):
        assert evaluation.data.metrics[f"classifier/test/{measure}"] == pytest.approx(found[measure]["rate"])
        assert evaluation.data.metrics[f"classifier/test/{measure}_low"] == pytest.approx(found[measure]["low"])
    assert evaluation.data.metrics["classifier/test/false_positives"] == found["false_positives"]
    assert evaluation.data.tags["nightshift.classifier"] == classifier.name_of(trained / paths.CLASSIFIER)
    client = mlflow_tracking.connect(trained)
    files_logged = {one.path for one in client.list_artifacts(evaluation.info.run_id, "classifier")}
    assert files_logged >= {f"classifier/{name}" for name in ("classifier.json", "confusion.md", "examples.png")}
    model = {one.path for one in client.list_artifacts(training_run.info.run_id, "classifier")}
    assert "classifier/classifier.safetensors" in model


def test_the_contact_sheet_shows_pictures_of_right_verdicts(trained: Path) -> None:
    pixels = np.asarray(Image.open(trained / paths.CLASSIFIER_REPORT / "examples.png").convert("RGB")).astype(int)
    red = (pixels[..., 0] > 60) & (pixels[..., 1] < 10) & (pixels[..., 2] < 10)
    assert red.sum() > 8 * 100, "the goal is a red square in every picture"
    table = (trained / paths.CLASSIFIER_REPORT / "confusion.md").read_text()
    assert table.splitlines()[2].startswith("| overall | ")


def test_dvc_tracks_the_classifier_and_git_takes_its_pointer(trained: Path) -> None:
    pointer = yaml.safe_load((trained / "models" / "classifier.dvc").read_text())
    assert pointer["outs"][0]["path"] == "classifier"
    assert "models/classifier.dvc" in git(trained, "status", "--short", "--untracked-files=all")
    assert "safetensors" not in git(trained, "status", "--short", "--untracked-files=all")


def trained_briefly(settings: config.Classifier, found: Sequence[segments.Segment], seed: int) -> SuccessClassifier:
    torch.manual_seed(0)
    network = SuccessClassifier.from_config(settings, segments.shapes([one.episode for one in found]))
    training.train(network, found, settings, seed, lambda step, loss: None)
    return network


def by_part(root: Path, settings: config.Classifier) -> dict[segments.Part, list[segments.Segment]]:
    episodes = list(EpisodeStore(root / paths.IMPORTS / "goal"))
    return segments.by_part(episodes, segments.split(episodes, settings, seed=0), settings.ambiguous_steps)


def test_the_same_seed_gives_the_same_weights(made: Path) -> None:
    settings = config.load(made / paths.PARAMS).classifier.model_copy(
        update={"steps": 5, "augmentation": config.Augmentation(crop=2, jitter=0.2)}
    )
    found = by_part(made, settings)["train"]
    one, same, other = (trained_briefly(settings, found, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_target_out_of_reach_leaves_no_classifier_and_says_what_was_reached(project: Path) -> None:
    edit(project, "classifier", precision=0.99, steps=20)
    with (
        Session(project) as session,
        pytest.raises(DataError, match=r"no threshold reaches a precision of 99% on 36 successes") as refusal,
    ):
        commands.train(session)
    assert "takes 381 successes to show that, and there are 36: record more episodes" in refusal.value.next_step
    assert not paths.CLASSIFIER.exists()


def test_an_episode_from_a_state_that_is_set_aside_for_validation_by_now_is_refused(project: Path) -> None:
    edit(project, "states", validation_share=0.9)
    with Session(project) as session, pytest.raises(DataError, match=r"begins at training state \d+ of near, which is"):
        commands.train(session)
    assert not paths.CLASSIFIER.exists()


def test_shuffled_labels_reach_no_precision(made: Path) -> None:
    """The negative control: what the network memorises of the training episodes does not pass the calibration."""
    settings = config.load(made / paths.PARAMS).classifier.model_copy(update={"steps": 200})
    random = np.random.default_rng(0)
    shuffled = {
        part: [
            replace(one, success=bool(label))
            for one, label in zip(own, random.permutation([one.success for one in own]), strict=True)
        ]
        for part, own in by_part(made, settings).items()
    }
    network = trained_briefly(settings, shuffled["train"], seed=0)
    with pytest.raises(DataError, match="no threshold reaches a precision of 75%"):
        training.calibrated(network, shuffled["calibration"], settings, starts={})


def test_a_policy_is_recorded_with_the_cameras_that_it_does_not_see(project: Path) -> None:
    with files.new_folder(paths.SFT_POLICY) as folder:
        policies.save(policy(), folder)
    with Session(project) as session:
        first = commands.record(session, paths.SFT_POLICY, episodes=4, temperature=0.5)
        second = commands.record(session, paths.SFT_POLICY, episodes=2, temperature=0.5)
    assert (first["near"][1], second["near"][1]) == (4, 2)
    (store,) = (EpisodeStore(folder) for folder in paths.ROLLOUTS.iterdir())
    episodes = list(store)
    assert [episode.provenance.init_state for episode in episodes] == list(range(6)), "each state is played once"
    assert all(episode.observations["agentview"].shape[1:] == (16, 16, 3) for episode in episodes)
    assert len({episode.provenance.seed for episode in episodes}) == 6, "every episode has noise of its own"
    assert sum(episode.success for episode in episodes) == first["near"][0] + second["near"][0]


def test_imports_stand_for_every_import_among_the_sources(project: Path) -> None:
    one, every = (
        config.load(project / paths.PARAMS).classifier.model_copy(update={"sources": named})
        for named in (("goal",), ("imports", "goal"))
    )
    assert commands._identity(every) == commands._identity(one)


def test_a_camera_that_is_not_recorded_is_refused_before_anything_is_played(project: Path) -> None:
    edit(project, "classifier", inputs=["agentview", "wrist"])
    with Session(project) as session, pytest.raises(ConfigError, match="has wrist, which env"):
        commands.record(session, paths.SFT_POLICY, episodes=1, temperature=1.0)
    with Session(project) as session, pytest.raises(ConfigError, match=r"cameras of the episodes are: agentview"):
        commands.train(session)


def test_an_evaluation_without_a_classifier_says_how_to_get_one(project: Path) -> None:
    with Session(project) as session, pytest.raises(DataError, match="no success classifier in models/classifier"):
        commands.evaluate(session)
