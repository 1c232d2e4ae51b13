"""Training is killed for real, again and again, and must end with the weights of a run that nobody touched."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.pipeline.run import Session, run_stage
from nightshift.project import paths
from tests.conftest import add_store, edit, make_project

COMMAND = str(Path(sys.prefix) / "bin" / "nightshift")
STEPS = 1500
"""Of sft: many times what it makes between a checkpoint and its end by a signal."""
WEIGHTS = {"sft": paths.SFT_POLICY / "policy.safetensors", "rloo": paths.RLOO_POLICY / "policy.safetensors"}


def trained(root: Path, stage: str) -> bytes:
    """To the end, in this process, which is sooner there than a new one and knows as little of the killed one."""
    with Session(root) as session:
        run_stage(stage, session)
    return (root / WEIGHTS[stage]).read_bytes()


def checkpoints(root: Path, stage: str) -> set[str]:
    return {path.name for path in (root / ".state" / stage).glob("*/step-*")}


def kill_after_new_checkpoint(root: Path, stage: str, delay: float, look: Callable[[], object] = lambda: None) -> bool:
    """Start the stage and SIGKILL it `delay` seconds after it wrote a checkpoint, and a last `look`; False if it was
    done before that."""
    before = checkpoints(root, stage)
    process = subprocess.Popen(
        [COMMAND, "stage", stage], cwd=root, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not checkpoints(root, stage) - before:
        time.sleep(0.002)
    time.sleep(delay)
    look()
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project whose dataset is made."""
    root = make_project(tmp_path_factory.mktemp("killed") / "project")
    add_store(root, migrated_store)
    edit(root, "sft", steps=STEPS)
    edit(root, "machine", checkpoint_every={"sft_steps": 50, "rloo_iterations": 1})
    edit(root, "rloo", iterations=12)
    with pytest.MonkeyPatch.context() as patch, Session(root) as session:
        enter(root, patch)
        for stage in ("states", "collect", "dataset", "choose"):
            run_stage(stage, session)
    return root


@pytest.fixture
def prepared(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project; the test runs inside it."""
    enter(dataset, monkeypatch)
    return dataset


@pytest.mark.parametrize("stage", ["sft", "rloo"])
def test_resume_after_sigkill_gives_the_same_weights(prepared: Path, stage: str) -> None:
    kills = [kill_after_new_checkpoint(prepared, stage, delay) for delay in (0.0, 0.02)]
    assert any(kills), "the stage was never killed while it worked: give it more steps"
    interrupted = trained(prepared, stage)
    for path in (prepared / ".state" / stage).iterdir():
        path.rename(path.with_name(f"{path.name}-used"))
    assert trained(prepared, stage) == interrupted


def test_a_killed_stage_resumes_its_checkpoint_after_machine_was_changed(prepared: Path) -> None:
    """As one does after running out of memory."""
    edit(prepared, "sft", learning_rate=3.0e-4)
    before = set((prepared / ".state").glob("sft/*"))
    assert kill_after_new_checkpoint(prepared, "sft", 0.0)
    (unfinished,) = set((prepared / ".state").glob("sft/*")) - before
    resumed_at = max(int(path.name.removeprefix("step-")) for path in unfinished.glob("step-*"))
    logged = prepared / paths.stage_metrics("sft", unfinished.name)
    count = len(logged.read_text().splitlines())
    changed = {"microbatch_size": 1024, "checkpoint_every": {"sft_steps": 70, "rloo_iterations": 3}}
    edit(prepared, "machine", **changed)
    resumed = trained(prepared, "sft")
    steps = [json.loads(line)["step"] for line in logged.read_text().splitlines()[count:]]
    assert steps == [step for step in range(70, STEPS, 70) if step > resumed_at] + [STEPS]
    unfinished.rename(unfinished.with_name("done"))
    assert trained(prepared, "sft") == resumed


def test_another_number_never_resumes_this_numbers_checkpoint(prepared: Path) -> None:
    edit(prepared, "sft", learning_rate=5.0e-4)
    before = set((prepared / ".state").glob("sft/*"))
    assert kill_after_new_checkpoint(prepared, "sft", 0.0)
    (unfinished,) = set((prepared / ".state").glob("sft/*")) - before
    contents = {path: path.read_bytes() for path in unfinished.rglob("*.safetensors")}
    edit(prepared, "sft", learning_rate=2.0e-3)
    other = trained(prepared, "sft")
    assert {path: path.read_bytes() for path in unfinished.rglob("*.safetensors")} == contents
    unfinished.rename(unfinished.with_name("out-of-the-way"))
    for path in (prepared / ".state" / "sft").glob("*/step-*"):
        path.rename(path.with_name(f"seen-{path.name}"))
    assert trained(prepared, "sft") == other
