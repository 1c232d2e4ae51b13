"""Every path of the project, relative to its root. dvc.yaml names the artifacts too; a test compares them."""

from __future__ import annotations

from pathlib import Path

PARAMS = Path("params.yaml")
DVC = Path(".dvc")
DVC_YAML = Path("dvc.yaml")
PREFECT_YAML = Path("prefect.yaml")
DVC_LOCK = Path("dvc.lock")
VERSIONS = Path("versions.yaml")
"""Installed versions of the packages that compute results; generated, and part of DVC's cache key."""
CONSTRAINTS = Path("constraints.txt")
"""Versions of packages that were tested together."""

STATE = Path(".state")
"""Checkpoints in progress, local stores of Prefect, MLflow and Ray: everything git ignores."""

SWEEPS = STATE / "sweep"
"""A folder per commit, with a clone of the project for each trial of a sweep."""
SWEEP_LOCK = SWEEPS / "lock"
TRIAL = STATE / "trial.json"
"""In such a clone: the run in MLflow of the last trial there, and which one that was."""

COPIED_COMMIT = STATE / "commit"
"""In a copy of the project without its history: the commit of the code when it was copied."""

ROBOT_QUESTIONS = STATE / "robot"
"""What a person beside the robot is asked, and the answer."""

INIT_STATES = Path("data/init_states")
DEMOS = Path("data/demos")
IMPORTS = Path("data/imports")
ROLLOUTS = Path("data/rollouts")
"""A folder of episodes per policy that played for the success classifier."""
FAILURES = Path("data/failures")
"""A folder per recorded source: a person's failed episodes, which are no demos. No stage reads them."""
DATASET = Path("data/dataset")
CHOICES = Path("data/algorithms")
"""A file per training stage that can be chosen: whether it is."""
CHAMPION = Path("data/champion")
"""What a run takes from the registry; each folder has a policy, or says why it has none."""
START = CHAMPION / "start"
"""The champion as the start of training."""
OPPONENT = CHAMPION / "opponent"
"""The champion as one more policy of the evaluation, where it has not played the grid."""
CHAMPION_VERSION = "version.json"
"""Beside the champion's policy: which version of the registry it is."""
MODELS = Path("models")
"""A folder per training stage: a policy, and its history if the stage has iterations."""
HISTORY = "history.json"
SKIPPED = "skipped.json"
"""In place of a policy where the training stage was not chosen, or the champion is not needed."""
SFT_POLICY = MODELS / "sft"
RLOO_POLICY = MODELS / "rloo"
RLOO_HISTORY = RLOO_POLICY / HISTORY
RLPD_POLICY = MODELS / "rlpd"
CLASSIFIER = MODELS / "classifier"
"""Of success: made by `nightshift classifier train`, which is no stage."""
CLASSIFIER_REPORT = Path("reports/classifier")
EVALUATION = Path("reports/evaluation")
EVALUATION_REPORT = EVALUATION / "evaluation.json"
EVALUATION_OUTCOMES = EVALUATION / "outcomes.json"
EVALUATION_FIGURE = EVALUATION / "evaluation.png"
EVALUATION_METRICS = EVALUATION / "metrics.json"
EVALUATION_SUCCESS = EVALUATION / "success.csv"
EVALUATION_LEARNING = EVALUATION / "learning.csv"
"""What `dvc metrics` and `dvc plots` show."""
FILMS = "films"
"""Folder of MP4s in an evaluation."""
ROBUSTNESS = Path("reports/robustness")
"""Made by `nightshift robustness`, which is no stage."""
ROBUSTNESS_REPORT = ROBUSTNESS / "robustness.json"
ROBUSTNESS_PAGE = ROBUSTNESS / "robustness.html"
ROBUSTNESS_LOCK = STATE / "robustness.lock"
RECEIPT = Path("reports/registration.json")

REPORT = Path("reports/report.html")
REPORT_POINTER = Path(f"{REPORT}.dvc")
"""By which DVC tracks it."""
NIGHTS = Path("reports/nights")
"""The static site of `nightshift report --all`."""
QUIET_NIGHTS = STATE / "nights.jsonl"
"""Nights that had nothing to do, were missed or refused, or failed."""
RUN_RECORD = STATE / "run.json"
"""What the last run did with each stage."""
REFUSAL_RECORD = STATE / "refusal.json"
"""Why a later run was refused before its first stage."""

MLFLOW_DATABASE = STATE / "mlflow" / "mlflow.db"
MLFLOW_ARTIFACTS = STATE / "mlflow" / "artifacts"
DOWNLOADS = STATE / "downloads"
"""Models of a remote store of MLflow, each while it is read."""
PREFECT_HOME = STATE / "prefect"
ACTOR_SPOOLS = STATE / "actor"  # episodes for learners on other machines
ACTOR_ID = STATE / "actor-id"
"""Tells actors of this folder from those of another machine with the same name."""
TELEOP = STATE / "teleop"
"""A folder per recorded source: the journal of the episode in the making, and films of the others."""
LIBERO_CONFIG = STATE / "libero"
PICTURES = STATE / "pictures"
METRICS = STATE / "metrics"
PLAYED = STATE / "played"
"""A journal per policy, with what it has played in evaluations: later ones do not play that again."""
RECEIPTS = STATE / "receipts"
"""What stages on a compute node leave for `nightshift adopt`."""


def choice(algorithm: str) -> Path:
    """Whether this training stage is chosen: written by `choose`, and an input of the training stage."""
    return CHOICES / f"{algorithm}.json"


def stage_state(stage: str, fingerprint: str) -> Path:
    """Where a stage keeps its checkpoints until it is done."""
    return STATE / stage / short(fingerprint)


def stage_metrics(stage: str, fingerprint: str) -> Path:
    """The metrics of a stage, one JSON line per step; they stay when the stage is done."""
    return METRICS / f"{stage}-{short(fingerprint)}.jsonl"


def imported(name: str) -> Path:
    """What the source was that was imported on this machine under this name."""
    return STATE / "imported" / f"{name}.json"


def stage_receipt(stage: str) -> Path:
    return RECEIPTS / f"{stage}.json"


def port_lock(port: int) -> Path:
    """Held while a run listens on this port of machine.page or machine.listen."""
    return STATE / "ports" / f"{port}.lock"


def robustness_journal(digest: str, weights: str) -> Path:
    """Finished episodes of a policy under perturbations."""
    return STATE / "robustness" / digest / f"{short(weights)}.jsonl"


def played(digest: str) -> Path:
    """Episodes of a policy in evaluations; the digest is of the policy and of how they are played."""
    return PLAYED / f"{short(digest)}.jsonl"


def short(fingerprint: str) -> str:
    """As much of a fingerprint as names a folder."""
    return fingerprint[:16]
