"""Projects to test in: a git repository each, with the real dvc.yaml, the fake environment and small numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import pytest
import yaml
from hypothesis import settings

from nightshift import config, files, spawning
from nightshift.config import merged
from nightshift.project import paths
from tests import forks, workers
from tests.command import Command
from tests.ray_cluster import cluster, forked_workers

if TYPE_CHECKING:
    from nightshift.pipeline.job import Job
    from nightshift.rollouts.base import Pool

# No test depends on how fast the machine is. `make test` draws the same 40 examples every time, so that a rare one
# cannot refuse a change that has nothing to do with it; `make test-all` looks for others (--hypothesis-profile random).
settings.register_profile("random", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repeatable")

TOOLS = ("PREFECT_", "MLFLOW_")
REPOSITORY = Path(__file__).parent.parent
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
for _address in ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):  # tests bring their own
    os.environ.pop(_address, None)
# Each of the tests' projects would compile the control step for itself, which takes twenty seconds of CPU time.
os.environ.setdefault("NUMBA_CACHE_DIR", str(REPOSITORY / paths.LIBERO_CONFIG / "numba"))  # before numba is imported
(REPOSITORY / ".state").mkdir(exist_ok=True)  # Prefect's home lies in it, and Prefect makes one level only

SMALL: dict[str, Any] = {
    "machine": {"workers": 0, "checkpoint_every": {"sft_steps": 20, "rloo_iterations": 1}},
    "env": {"suite": "fake", "tasks": [], "protocol": "openvla-oft", "horizon": 12},
    "states": {"validation_share": 0.02},
    "collect": {"demos_per_task": 4, "attempts": 3, "disturbance": 0.0},
    "sft": {"steps": 300, "batch_size": 32, "learning_rate": 1.0e-3},
    "policy": {"inputs": ["objects", "task"], "hidden": [16], "chunk": 1},
    "rloo": {
        "iterations": 12,
        "groups": 4,
        "group_size": 4,
        "temperature": 0.4,
        "temperature_end": 0.4,
        "minibatch_size": 1024,
        "sampling": {"curriculum_floor": 1.0},
        "validation": {"every": 2},
        "optimizer": {"learning_rate": 2.0e-3, "schedule": "constant"},
        "target_kl": 0.06,
    },
    "evaluate": {"init_states": 10, "films": 0},
}


UNITS = (
    ("pipeline/test_run.py", "pipeline/test_choice.py"),  # a finished project
    ("flows/test_lifecycle.py", "flows/test_pipeline.py", "flows/test_serve.py"),  # a Prefect server
    (  # a Ray of one node
        *("learners/test_ranks.py", "learners/test_gpus.py", "rollouts/test_pool.py", "rollouts/test_bundles.py"),
        *("rollouts/test_stragglers.py", "faults/test_simulator.py", "stream/test_ray_link.py", "stages/test_sft.py"),
    ),
    ("faults/test_cluster.py", "faults/test_killed_driver.py"),  # the head of a Ray of several nodes
    ("pipeline/test_compute_node.py",),
    ("faults/test_kill_and_resume.py",),
    ("stages/test_rlpd.py",),
    ("stages/test_rloo.py",),
    ("envs/test_libero.py",),
    ("faults/test_interrupt.py",),
    ("stages/test_evaluate.py",),
    ("pipeline/test_seeing.py",),
    ("rollouts/test_own_ray.py",),
    ("cli/test_data_commands.py",),
    ("learners/test_fsdp.py",),
    ("pipeline/test_robustness.py",),
    ("adapters/test_mlflow_registry.py",),
    ("pipeline/test_report.py",),
    ("stages/test_register.py",),
    ("policies/openvla_oft/test_stages.py",),
    ("test_extending.py",),
    ("rollouts/test_engine.py",),
    ("algorithms/test_on_policy.py",),
    ("policies/test_families.py",),
    ("stages/test_states.py",),
    ("robots/test_same_run.py",),
    ("policies/test_expert.py",),
    ("policies/test_expert_skills.py",),
)
"""Files whose tests one process runs, since they share what is slow to start, and that are begun first, since they take
longest: begun last, one would run on one core while the other is idle. Every other file is a unit of its own."""
_PLACES = {f"tests/{name}": place for place, unit in enumerate(UNITS) for name in unit}


def pytest_configure(config: pytest.Config) -> None:
    """What is imported from now on stays: garbage collections need not look at its million objects again and again."""
    gc.disable()
    if config.getoption("dist", "no") == "no":  # a process that runs tests, not the one that deals them out
        _prepare_process()


def _prepare_process() -> None:
    import torch

    from tests import disk, parsing, schema  # noqa: F401  they change how this process works

    torch.set_num_threads(1)  # as stages do: a test must not compute otherwise before one than after it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    processes = contextlib.ExitStack()
    config.add_cleanup(processes.close)
    processes.enter_context(workers.forked(specs))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.path.relative_to(REPOSITORY).as_posix(), len(UNITS)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out units instead of files."""
    from xdist.scheduler import LoadFileScheduling

    class LoadUnitScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return f"unit {_PLACES[file]}" if file in _PLACES else file

    return LoadUnitScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def leave_skipped(stage: str) -> None:
    """What a training stage leaves that is not chosen."""
    with files.new_folder(paths.MODELS / stage) as folder:
        files.write_json(folder / paths.SKIPPED, {"skipped": "not in algorithms"})


def section(name: str) -> dict[str, Any]:
    """A copy of a section of the repository's params.yaml: property tests ask for hundreds."""
    return copy.deepcopy(_repository_params()[name])


@functools.cache
def _repository_params() -> dict[str, Any]:
    params: dict[str, Any] = config.read_yaml(REPOSITORY / "params.yaml")
    return params


def small_params() -> dict[str, Any]:
    return merged(copy.deepcopy(_repository_params()), SMALL)


def _write_params(root: Path, params: dict[str, Any]) -> None:
    """With libyaml, where it is there: written in Python, params.yaml takes longer than many a test."""
    (root / "params.yaml").write_text(yaml.dump(params, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))


def make_project(root: Path, *, code: bool = True) -> Path:
    """The files a clone has, in a fresh git repository; source code and environment are this checkout's."""
    first = _first_project().name
    left_out = [] if code else ["src"]
    shutil.copytree(
        first,
        root,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda folder, _: left_out if folder == first else [],
    )
    return root


@functools.cache
def _first_project() -> tempfile.TemporaryDirectory[str]:
    """All others are copies: `git add` takes longer than a test."""
    folder = tempfile.TemporaryDirectory(prefix="project-")
    root = Path(folder.name)
    _write_params(root, small_params())
    copied = ("dvc.yaml", ".gitignore", ".dvcignore", "pyproject.toml", "requirements-simulator.txt", "prefect.yaml")
    for name in copied:
        shutil.copy(REPOSITORY / name, root / name)
    shutil.copytree(REPOSITORY / ".dvc", root / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    shutil.copytree(REPOSITORY / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (root / paths.IMPORTS).mkdir(parents=True)
    shutil.copy(REPOSITORY / paths.IMPORTS / "README.md", root / paths.IMPORTS)
    (root / ".venv").symlink_to(sys.prefix)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "start")
    git(root, "gc", "-q")  # one file of objects to copy in place of hundreds
    return folder


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def install(folder: Path, **versions: str) -> str:
    """A folder that, first on the path, makes other versions of packages look installed; their code is the same."""
    for package, version in versions.items():
        metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(folder)


def edit(root: Path, section: str, **changes: Any) -> None:
    """Change numbers in the project's params.yaml."""
    params = config.read_yaml(root / "params.yaml")
    params[section].update(changes)
    _write_params(root, params)


def choose(root: Path, *algorithms: str) -> None:
    """Change the training stages that run."""
    _write_params(root, {**config.read_yaml(root / "params.yaml"), "algorithms": list(algorithms)})


@pytest.fixture(scope="session")
def migrated_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store to copy into projects: MLflow takes seconds to make one, so that the first of the tests'
    processes makes it for all. The tests of the adapters make theirs anew."""
    from nightshift.adapters import mlflow_tracking

    root = tmp_path_factory.getbasetemp()
    store = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "mlflow.db"
    with filelock.FileLock(store.with_suffix(".lock"), mode=0o600):
        if not store.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(root)
                patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'made.db'}")
                mlflow_tracking.connect(root)
            (root / "made.db").rename(store)
    return store


def add_store(root: Path, migrated_store: Path) -> None:
    """Give a project the MLflow store that its first run would make."""
    (root / paths.MLFLOW_DATABASE).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(migrated_store, root / paths.MLFLOW_DATABASE)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Ray and commands that a test calls in this process leave theirs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None:  # one that Python has not set
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _tools_environment() -> Iterator[None]:
    """A command that a test calls in this process leaves variables of Prefect and MLflow that name its project."""
    before = {name: value for name, value in os.environ.items() if name.startswith(TOOLS)}
    yield
    for name in [name for name in os.environ if name.startswith(TOOLS)]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project; the test runs inside it."""
    root = make_project(tmp_path / "project")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def project_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for tests that ask DVC about no stage: the source code takes nine tenths of the time to copy."""
    root = make_project(tmp_path / "project", code=False)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def params(project: Path) -> config.Params:
    return config.load(project / "params.yaml")


def start_from_scratch(root: Path) -> None:
    """As a run leaves the folder of the stage `start`, which is skipped then."""
    with files.new_folder(root / paths.START) as folder:
        files.write_json(folder / paths.SKIPPED, {"skipped": config.skip_reason(config.START)})


@contextlib.contextmanager
def jobs(root: Path) -> Iterator[Callable[[str], Job]]:
    """Makes a job for a stage of a project, with simulators in this process and metrics in a file."""
    from nightshift.adapters.tracking import JsonlTracker
    from nightshift.pipeline.job import Job
    from nightshift.rollouts.local import LocalPool

    pools: dict[config.Env, Pool] = {}

    def make(stage: str) -> Job:
        if stage == "sft" and not (root / paths.START).exists():
            start_from_scratch(root)
        state = root / ".state" / stage / "test"
        return Job(
            stage=stage,
            fingerprint="test",
            state=state,
            tracker=JsonlTracker(state / "metrics.jsonl"),
            pool=lambda env: pools.setdefault(env, LocalPool(env)),
            machine=config.load(root / "params.yaml").machine,
            commit="abc1234",
        )

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture
def job(project: Path) -> Iterator[Callable[[str], Job]]:
    with jobs(project) as make:
        yield make


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that would be new interpreters are forked from one that has imported the heavy packages."""
    real = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return forks.context() if method == "spawn" else real(method)

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
    monkeypatch.setattr(spawning, "context", forks.context)


@pytest.fixture(scope="session")
def forking() -> Iterator[dict[str, Any]]:
    """Settings of Ray nodes that fork their workers."""
    with forked_workers() as settings:
        yield settings


@pytest.fixture(scope="session")
def _ray_address(forking: dict[str, Any]) -> Iterator[str]:
    with cluster(num_cpus=2, num_gpus=2, **forking) as started:
        yield started.address


@pytest.fixture(scope="module")
def shared_ray(_ray_address: str) -> Iterator[None]:
    """A Ray with two CPUs, and two GPUs that are only counted: starting one takes seconds, so that it serves all
    modules whose tests need none of their own. They join it by its address, and none of their actors stay."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", _ray_address)
        yield
    ray.shutdown()


def nightshift(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a project and wait for it."""
    return Command(root, *arguments, **environment).wait()


def installed_nightshift(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same as a user does: by the installed script, in a new interpreter."""
    return subprocess.run(
        [str(Path(sys.prefix) / "bin" / "nightshift"), *arguments],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
