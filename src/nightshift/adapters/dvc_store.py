"""DVC as the one cache of results: which are fresh, why one is stale, and recording new ones.

The only file that imports dvc.
"""

from __future__ import annotations

import contextlib
import functools
import graphlib
import heapq
import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift.errors import CacheError
from nightshift.project import graph, paths
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import Repo
    from dvc.stage import Stage

NEVER_RUN = "never run"
REGISTRY = "registry"
"""In dvc.yaml the value in `meta` of the stages that read or write the registry."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """Example: StageStatus(name="rloo", reasons=("params.yaml: rloo.temperature 0.1 → 0.12",), follows=("sft",))"""

    name: str
    reasons: tuple[str, ...]
    """Why its recorded result no longer stands, in words."""
    follows: tuple[str, ...]
    """Stale stages that it gets its inputs from."""
    skipped: bool = False
    """Whether it is a training stage that is not chosen."""

    @property
    def fresh(self) -> bool:
        return not self.reasons and not self.follows


@dataclass(frozen=True, kw_only=True)
class StageTransaction:
    """A stage between `begin` and `commit`. Its inputs were recorded before it ran, so later edits are not."""

    stage: Stage


def cache_folder(root: Path) -> Path:
    """Where DVC keeps the results of a project; without the seconds that opening the project takes."""
    from dvc.config import Config

    graph.check_pointers(root)
    with _translate_errors():
        settings = Config(dvc_dir=str(root / paths.DVC))
    return Path(settings["cache"].get("dir") or root / paths.DVC / "cache")


PATIENCE_SECONDS = 3600.0
"""Of what has worked for hours: a push of many demos may take as long."""


class DvcStore:
    """One project's dvc.yaml, dvc.lock and cache."""

    def __init__(self, root: Path, *, patience: float = 0.0) -> None:
        """`patience`: how many seconds another DVC command, such as `dvc push`, is waited for."""
        from dvc.repo import Repo
        from dvc.ui import ui

        logging.getLogger("dvc").setLevel(logging.ERROR)  # no bars
        ui.error_console.quiet = True  # no spinners
        graph.check_pointers(root)
        with _translate_errors():
            self._repo: Repo = Repo(str(root))
        self._root = root.resolve()
        self._patience = patience

    def close(self) -> None:
        self._repo.close()

    def status(self, skipped: Collection[str] = ()) -> list[StageStatus]:
        """Every stage in graph order; `skipped` names the training stages that are not chosen."""
        with self._locked() as repo:
            statuses: list[StageStatus] = []
            stale: set[str] = set()
            above = _above(repo)
            _share_reads(above)
            for stage in _in_order(above):
                name = stage.addressing
                status = StageStatus(
                    name=name,
                    reasons=tuple(self._reasons(stage)),
                    follows=tuple(other.addressing for other in above[stage] if other.addressing in stale),
                    skipped=name in skipped,
                )
                statuses.append(status)
                if not status.fresh and not (status.skipped and self._stays_skipped(stage)):
                    stale.add(name)
            return statuses

    def _stays_skipped(self, stage: Stage) -> bool:
        """Whether its recorded output says that it was skipped: it will say so again, whatever its inputs are."""
        marked = all((self._root / str(out) / paths.SKIPPED).exists() for out in stage.outs)
        return marked and not stage.changed_outs()

    def reasons(self, name: str) -> tuple[str, ...]:
        """Why this stage alone is not as dvc.lock records it; empty when it is fresh."""
        with self._locked():
            return tuple(self._reasons(self._stage(name)))

    def begin(self, name: str, check: Callable[[], None]) -> StageTransaction:
        """Record the stage's inputs as they are now and remove its outputs, as `dvc repro` does. The outputs stay if
        `check` raises an error, because these inputs are not those of the run."""
        with self._locked():
            stage = self._stage(name)
            stage.save_deps()
            check()
            stage.remove_outs(ignore_remove=False, force=False)
            return StageTransaction(stage=stage)

    def commit(self, transaction: StageTransaction) -> None:
        """Record the stage's outputs as made from the inputs it began with, in dvc.lock and in the run-cache."""
        with self._locked():
            self._record_outputs(transaction.stage)

    def record(self, name: str) -> None:
        """Record the outputs that are in place as made from the inputs that are here: another machine made them."""
        with self._locked():
            stage = self._stage(name)
            stage.save_deps()
            self._record_outputs(stage)

    def restore(self, name: str) -> bool:
        """Bring back the outputs if this stage ran before with the same inputs; False if it never did."""
        from dvc.stage.cache import RunCacheNotFoundError
        from dvc_data.hashfile.hash_info import HashInfo

        with self._locked():
            stage = self._stage(name)
            if not _restorable(stage):
                return False
            if not stage.deps_cached():
                stage.save_deps()
                for out in stage.outs:
                    out.hash_info = HashInfo()  # or DVC would take those of dvc.lock, which are of other inputs
            try:
                self._repo.stage_cache.restore(stage, dry=True)  # outputs go only where others take their place
            except RunCacheNotFoundError:
                return False
            stage.remove_outs(ignore_remove=False, force=False)
            self._repo.stage_cache.restore(stage)
            stage.save()
            self._record(stage)
            return True

    def track(self, path: Path) -> Path:
        """Put data that no stage makes into the cache, as `dvc add` does; returns the .dvc file for git."""
        with self._locked() as repo:
            (stage,) = repo.add(str(self._root / path))
            return Path(stage.path).relative_to(self._root)

    def pull(self, pointers: Sequence[Path]) -> list[Path]:
        """Fetch data of .dvc files that is missing here from DVC's remote; returns the pointers whose data changed.

        Data that was imported from another repository or address (`dvc import`, `dvc import-url`) becomes its newest.
        """
        changed = []
        with _translate_errors():
            for pointer in pointers:
                (stage,) = self._repo.stage.collect(str(self._root / pointer))
                before = [(out.hash_info.value, out.exists) for out in stage.outs]
                if stage.is_import:
                    self._repo.update([str(self._root / pointer)])
                elif not all(out.exists for out in stage.outs):
                    self._repo.pull([str(self._root / pointer)])
                (stage,) = self._repo.stage.collect(str(self._root / pointer))
                if [(out.hash_info.value, out.exists) for out in stage.outs] != before:
                    changed.append(pointer)
        return changed

    def share_cache(self, folder: Path) -> None:
        """Use the cache of another project from now on; recorded in the local configuration, which git ignores."""
        with _translate_errors():
            with self._repo.config.edit("local") as settings:
                settings.setdefault("cache", {})["dir"] = str(folder)
            root = self._repo.root_dir
            self._repo.close()
            from dvc.repo import Repo

            self._repo = Repo(root)

    def check_out(self) -> None:
        """Bring every output and import that dvc.lock and .dvc files name from the cache, as far as it has them."""
        with _translate_errors():
            self._repo.checkout(force=True, allow_missing=True)

    def digests(self, name: str) -> dict[str, str]:
        """The md5 that dvc.lock records for each output of a stage."""
        with self._locked():
            return {str(out): str(out.hash_info.value) for out in self._stage(name).outs}

    def read_file(self, revision: str, path: Path) -> bytes:
        """A file of a DVC output as it was at a git revision; "workspace" is the folder as it is."""
        from dvc.api import DVCFileSystem

        rev = None if revision == "workspace" else revision
        with _translate_errors(), contextlib.closing(self._repo):
            content: bytes = DVCFileSystem(str(self._root), rev=rev).read_bytes(path.as_posix())
            return content

    def _record_outputs(self, stage: Stage) -> None:
        stage.save_outs()
        stage.md5 = stage.compute_md5()
        self._record(stage)

    def _record(self, stage: Stage) -> None:
        if _restorable(stage):
            self._repo.stage_cache.save(stage)
        stage.commit()
        stage.dump(update_pipeline=False)

    def _stage(self, name: str) -> Stage:
        (stage,) = self._repo.stage.collect(name)
        return stage

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Repo]:
        with _translate_errors(), contextlib.ExitStack() as held:
            self._lock(held)
            yield self._repo

    def _lock(self, held: contextlib.ExitStack) -> None:
        from dvc.lock import LockError
        from dvc.repo import lock_repo

        deadline, told = time.monotonic() + self._patience, False
        while True:
            try:
                held.enter_context(lock_repo(self._repo))  # it tries for some seconds itself
            except LockError:
                if time.monotonic() >= deadline:
                    raise
                if not told:
                    console.print("waiting for another DVC command in this project")
                told = True
            else:
                return

    def _reasons(self, stage: Stage) -> Iterator[str]:
        if not any(dep.hash_info for dep in stage.deps):
            yield NEVER_RUN
            return
        for entry in stage.status().get(stage.addressing, []):
            if not isinstance(entry, dict):
                yield f"{paths.DVC_YAML}: its command changed"
                continue
            for path, change in entry.get("changed deps", {}).items():
                if isinstance(change, dict):
                    yield from (
                        f"{path}: {words}" for section in change for words in _changed_keys(stage, path, section)
                    )
                else:
                    yield f"{self._kind(stage, path)}{path} {_INPUT_WORDS.get(change, change)}"
            for path, change in entry.get("changed outs", {}).items():
                yield f"output {path} {_OUTPUT_WORDS.get(change, change)}"

    def _kind(self, stage: Stage, path: str) -> str:
        """What to call a dependency: an output or an import is an input, the rest is code."""
        if path in _params_files(stage):
            return ""
        data = {str(paths.IMPORTS), *(str(out) for other in self._repo.index.stages for out in other.outs)}
        return "input " if path in data else "code "


_OUTPUT_WORDS = {"deleted": "is missing", "modified": "was changed by hand", "not in cache": "is not in the cache"}
_INPUT_WORDS = {"deleted": "is missing", "modified": "changed", "new": "is new"}


def _params_files(stage: Stage) -> dict[str, ParamsDependency]:
    """params.yaml, versions.yaml: the files of which a stage depends on some keys."""
    from dvc.dependency.param import ParamsDependency

    return {str(dep): dep for dep in stage.deps if isinstance(dep, ParamsDependency)}


def _changed_keys(stage: Stage, path: str, section: str) -> Iterator[str]:
    """Which keys of a section of a params file differ from dvc.lock, and how."""
    dep = _params_files(stage)[path]
    recorded = _flatten(section, dict(dep.hash_info.value or {}).get(section))
    actual = _flatten(section, dep.read_params().get(section))
    for key in sorted(recorded.keys() | actual.keys()):
        if key not in recorded:
            yield f"{key} is new"
        elif key not in actual:
            yield f"{key} is gone"
        elif recorded[key] != actual[key]:
            yield f"{key} {recorded[key]} → {actual[key]}"


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {} if value is None else {prefix: value}
    return {key: leaf for name, part in value.items() for key, leaf in _flatten(f"{prefix}.{name}", part).items()}


def _restorable(stage: Stage) -> bool:
    """False for a stage that reads or writes the registry, which DVC does not see: it has to run."""
    return REGISTRY not in (stage.meta or {}).values()


def _above(repo: Repo) -> dict[Stage, list[Stage]]:
    """The stages of dvc.yaml, in its order, each with those whose outputs it reads; tracked data (.dvc files) is left
    out. DVC's own graph is the same, and takes longer to import (networkx) than to build."""
    from dvc.stage import PipelineStage

    stages = [stage for stage in repo.index.stages if isinstance(stage, PipelineStage)]
    makers = {stage: _makers(stage, repo.index.outs_trie) for stage in stages}
    return {stage: [other for other in stages if other in makers[stage]] for stage in stages}


def _makers(stage: Stage, outs: Any) -> set[Stage]:
    """The stages that write what this one reads: the same path, a path within it or one around it."""
    keys = [dep.fs.parts(dep.fs_path) for dep in stage.deps]
    around = [node.value for key in keys for node in outs.prefixes(key)]
    within = [out for key in keys if outs.has_subtrie(key) for out in outs.values(prefix=key)]
    return {out.stage for out in (*around, *within)}


def _in_order(above: Mapping[Stage, Sequence[Stage]]) -> Iterator[Stage]:
    """Each after those above it, and otherwise in the order of dvc.yaml."""
    stages = list(above)
    position = {stage: index for index, stage in enumerate(stages)}
    sorter = graphlib.TopologicalSorter(above)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " → ".join(stage.addressing for stage in reversed(error.args[1]))
        raise CacheError(f"the stages of {paths.DVC_YAML} go in a circle: {circle}", _NO_CIRCLE) from None
    ready: list[int] = []
    while sorter.is_active():
        for stage in sorter.get_ready():
            heapq.heappush(ready, position[stage])
        stage = stages[heapq.heappop(ready)]
        yield stage
        sorter.done(stage)


_NO_CIRCLE = "take one of them out of the deps of the stage before it"


def _share_reads(stages: Iterable[Stage]) -> None:
    """Read params.yaml once and hash each input once: DVC does it again for every stage that names them, which is most
    of the time that a status takes. The stages are forgotten with the lock, and so is what was read."""
    from dvc.dependency import Dependency, ParamsDependency

    hashes: dict[tuple[str, str], Callable[[], Any]] = {}
    contents: dict[str, Callable[[], Any]] = {}
    for dep in (dep for stage in stages for dep in stage.deps):
        if type(dep) is Dependency:
            dep.get_hash = hashes.setdefault((dep.fs_path, dep.hash_name), functools.cache(dep.get_hash))
        elif type(dep) is ParamsDependency:
            whole = ParamsDependency(dep.stage, dep.fs_path)
            read = contents.setdefault(dep.fs_path, functools.cache(whole.read_params))
            dep.read_params = functools.partial(_chosen, read, tuple(dep.params))


def _chosen(read: Callable[[], Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """The values of these dotted names; a name that the file does not have is left out."""
    whole = read()
    found: dict[str, Any] = {}
    for key in keys:
        with contextlib.suppress(KeyError, TypeError):
            found[key] = functools.reduce(operator.getitem, key.split("."), whole)
    return found if keys else dict(whole)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn DVC's errors into ours."""
    from dvc.exceptions import DownloadError, DvcException, NotDvcRepoError
    from dvc.lock import LockError
    from dvc.rwlock import RWLockFileCorruptedError
    from dvc.scm import SCMError

    try:
        yield
    except LockError as error:
        next_step = "wait for it; if nothing runs, rm -f .dvc/tmp/lock .dvc/tmp/rwlock"
        raise CacheError("another DVC command is working in this project", next_step) from error
    except NotDvcRepoError as error:
        raise CacheError("the project has no .dvc folder", "git checkout -- .dvc") from error
    except RWLockFileCorruptedError as error:
        raise CacheError(f"DVC's lock file is damaged: {error}", "rm -f .dvc/tmp/rwlock") from error
    except SCMError as error:
        raise CacheError(f"git has no such revision: {error}", "nightshift dataset ls shows the versions") from error
    except FileNotFoundError as error:
        raise CacheError(
            f"{error.filename or error} is not there or not in the cache", "dvc pull, or dvc checkout"
        ) from error
    except DownloadError as error:
        raise CacheError(
            f"{error.amount} files could not be fetched from DVC's remote",
            "check its address and keys (dvc remote list, docs/production.md) and run again: nothing is lost",
        ) from error
    except DvcException as error:
        raise CacheError(f"DVC: {error}", "dvc doctor and dvc status -v tell more") from error
