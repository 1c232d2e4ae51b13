"""Training is killed for real, again and again, and must end with the weights of a run that nobody touched."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nightshift.pipeline.run import Session, run_stage
from nightshift.project import paths
from tests.command import KILLED, Command
from tests.conftest import add_store, edit, make_project

STEPS = 900
"""Of sft: many times what it makes between a checkpoint and its end by a signal."""
WEIGHTS = {"sft": paths.SFT_POLICY / "policy.safetensors", "rloo": paths.RLOO_POLICY / "policy.safetensors"}


def trained(root: Path, stage: str) -> bytes:
    """To the end, in this process, which is sooner there than a new one and knows as little of the killed one."""
    with Session(root) as session:
        run_stage(stage, session)
    return (root / WEIGHTS[stage]).read_bytes()


def checkpoints(root: Path, stage: str) -> set[str]:
    return {path.name for path in (root / ".state" / stage).glob("*/step-*")}


def kill_at_a_checkpoint(root: Path, stage: str) -> None:
    """Start the stage, which is killed when it has written one."""
    assert Command(root, "stage", stage, program=KILLED).wait().returncode == -signal.SIGKILL
    assert checkpoints(root, stage)


def kill_after_new_checkpoint(root: Path, stage: str, delay: float, look: Callable[[], object] = lambda: None) -> bool:
    """Start the stage and SIGKILL it `delay` seconds after it wrote a checkpoint, and a last `look`; False if it was
    done before that."""
    before = checkpoints(root, stage)
    command = Command(root, "stage", stage)
    while command.is_running() and not checkpoints(root, stage) - before:
        time.sleep(0.01)
    time.sleep(delay)
    look()
    command.kill()
    return command.wait().returncode == -signal.SIGKILL


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project whose dataset is made."""
    root = make_project(tmp_path_factory.mktemp("killed") / "project")
    add_store(root, migrated_store)
    edit(root, "sft", steps=STEPS)
    edit(root, "machine", checkpoint_every={"sft_steps": 50, "rloo_iterations": 1, "rlpd_decisions": 100})
    edit(root, "rloo", iterations=12)
    with pytest.MonkeyPatch.context() as patch, Session(root) as session:
        enter(root, patch)
        for stage in ("states", "start", "collect", "dataset", "choose"):
            run_stage(stage, session)
    return root


@pytest.fixture(scope="module")
def undisturbed(dataset: Path) -> dict[str, bytes]:
    """The weights, by stage, of trainings that were not killed."""
    with pytest.MonkeyPatch.context() as patch:
        enter(dataset, patch)
        return {stage: trained(dataset, stage) for stage in WEIGHTS}


@pytest.fixture
def prepared(dataset: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project without checkpoints and metrics; the test runs inside it, and what it changes in params.yaml is put
    back."""
    enter(dataset, monkeypatch)
    params = (dataset / paths.PARAMS).read_text()
    for used in (*WEIGHTS, paths.METRICS.name):
        shutil.rmtree(dataset / paths.STATE / used, ignore_errors=True)
    yield dataset
    (dataset / paths.PARAMS).write_text(params)


@pytest.mark.parametrize("stage", ["sft", "rloo"])
def test_resume_after_sigkill_gives_the_same_weights(prepared: Path, undisturbed: dict[str, bytes], stage: str) -> None:
    kill_at_a_checkpoint(prepared, stage)
    kill_after_new_checkpoint(prepared, stage, 0.02)
    assert trained(prepared, stage) == undisturbed[stage]


def test_a_killed_stage_resumes_its_checkpoint_after_machine_was_changed(
    prepared: Path, undisturbed: dict[str, bytes]
) -> None:
    """As one does after running out of memory."""
    kill_at_a_checkpoint(prepared, "sft")
    (unfinished,) = (prepared / ".state").glob("sft/*")
    resumed_at = max(int(path.name.removeprefix("step-")) for path in unfinished.glob("step-*"))
    logged = prepared / paths.stage_metrics("sft", unfinished.name)
    count = len(logged.read_text().splitlines())
    changed = {
        "microbatch_size": 1024,
        "checkpoint_every": {"sft_steps": 70, "rloo_iterations": 3, "rlpd_decisions": 7},
    }
    edit(prepared, "machine", **changed)
    assert trained(prepared, "sft") == undisturbed["sft"]
    lines = [json.loads(line) for line in logged.read_text().splitlines()[count:]]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == [step for step in range(70, STEPS, 70) if step > resumed_at] + [STEPS]


def test_another_number_never_resumes_this_numbers_checkpoint(prepared: Path, undisturbed: dict[str, bytes]) -> None:
    before = (prepared / paths.PARAMS).read_text()
    edit(prepared, "sft", learning_rate=5.0e-4)
    kill_at_a_checkpoint(prepared, "sft")
    (unfinished,) = (prepared / ".state").glob("sft/*")
    contents = {path: path.read_bytes() for path in unfinished.rglob("*.safetensors")}
    (prepared / paths.PARAMS).write_text(before)
    assert trained(prepared, "sft") == undisturbed["sft"]
    assert {path: path.read_bytes() for path in unfinished.rglob("*.safetensors")} == contents
