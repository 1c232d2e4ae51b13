"""What a stage leaves on a compute node besides its outputs: a receipt that says what it was computed from.

node   nightshift stage sft ──▶ outputs, .state/metrics/sft-….jsonl, .state/receipts/sft.json
       nightshift pack ────────▶ results.tar with all of these, each under its path in the project
home   nightshift adopt results.tar   (pipeline/adopt.py)
node   tar -xf results.tar, where another node goes on
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, ValidationError

from nightshift import config, files
from nightshift.adapters.tracking import artifacts
from nightshift.errors import DataError
from nightshift.pipeline.run import (
    Session,
    definition,
    fingerprint,
    remove_checkpoints,
    run_stage,
    sections,
    states_to_resume,
    versions,
)
from nightshift.project import checksums, paths

_TarMode = Literal["w", "w:gz", "w:bz2", "w:xz"]
_COMPRESSED: Mapping[str, _TarMode] = {
    ".gz": "w:gz",
    ".tgz": "w:gz",
    ".bz2": "w:bz2",
    ".xz": "w:xz",
}


class Receipt(config.Section):
    """A stage that ran on a compute node."""

    stage: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """A sha256; it names the file of the metrics."""
    params: Mapping[str, Any]
    """The sections of params.yaml that the stage reads."""
    versions: Mapping[str, str]
    """Of the packages on the node that the stage computes with."""
    inputs: Mapping[str, str]
    """md5 by path, as in dvc.lock, of code and data before the stage ran."""
    outputs: Mapping[str, str]
    """md5 by path, as in dvc.lock."""
    commit: str
    host: str
    seconds: float
    """Of the last run; one that was resumed took longer in all."""
    skipped: bool
    """Whether it was not in `algorithms`: its outputs say so and hold no policy."""

    @property
    def metrics(self) -> Path:
        return paths.stage_metrics(self.stage, self.fingerprint)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What is in an archive, and what is not."""

    results: Sequence[Receipt]
    current: Collection[str]
    """The stages with a receipt of what is here, also those that were not asked for."""
    outdated: Sequence[str] = ()
    """Stages with a receipt of other params, code or inputs than are here now."""
    unfinished: Mapping[str, Path] = field(default_factory=dict)
    """The folders from which stages without a result resume."""
    needed: Mapping[Path, str] = field(default_factory=dict)
    """What was to be left out and is packed whole, and the stage that has yet to read it."""


def run_with_receipt(stage: str, session: Session) -> Path:
    """Run a stage as `run_stage` does, write its receipt, and remove what it kept to resume."""
    named = definition(stage, session)
    current = fingerprint(stage, session)
    inputs = {path.as_posix(): recorded_md5(session.root, path) for path in named.deps}
    seconds = run_stage(stage, session)
    written = Receipt(
        stage=stage,
        fingerprint=current,
        params=sections(stage, session),
        versions=versions(stage, session),
        inputs=inputs,
        outputs={path.as_posix(): checksums.md5(session.root, path) for path in named.outs},
        commit=session.commit,
        host=socket.gethostname(),
        seconds=round(seconds, 2),
        skipped=session.params.skips(stage),
    )
    path = session.root / paths.stage_receipt(stage)
    files.write_json(path, written.model_dump(mode="json"))
    remove_checkpoints(stage, current, session)
    return path


def read(folder: Path) -> list[Receipt]:
    """Every receipt in a project's folder, or in what `pack` made of it."""
    return [_read(path) for path in sorted((folder / paths.RECEIPTS).glob("*.json"))]


def recorded_md5(root: Path, path: Path) -> str:
    """The md5 of a path as in dvc.lock; of a folder that was left out of an archive the one in its maker's receipt."""
    if files.is_left_out(root / path):
        for receipt in read(root):
            if path.as_posix() in receipt.outputs:
                return receipt.outputs[path.as_posix()]
    return checksums.md5(root, path)


def stale(session: Session) -> list[str]:
    """The stages without a receipt of the params, code and inputs that are here, and those that read what they make."""
    receipts = {receipt.stage: receipt for receipt in read(session.root)}
    return _stale([stage for stage in session.graph if stage != "register"], receipts, session)


def _stale(stages: Sequence[str], receipts: Mapping[str, Receipt], session: Session) -> list[str]:
    """Those of the stages, which are in the order of dvc.yaml. What other stages make is taken as it is."""
    found: list[str] = []
    made_again: set[Path] = set()
    for stage in stages:
        named = session.graph[stage]
        current = stage in receipts and _is_current(receipts[stage], session)
        if not current or made_again & set(named.deps):
            found.append(stage)
            made_again.update(named.outs)
    return found


def _is_current(receipt: Receipt, session: Session) -> bool:
    made = {path: recorded_md5(session.root, Path(path)) for path in receipt.outputs}
    return made == receipt.outputs and receipt.fingerprint == fingerprint(receipt.stage, session)


def verify_outputs(receipt: Receipt, folder: Path) -> None:
    """DataError if an output is missing or not as the stage left it."""
    for path, md5 in receipt.outputs.items():
        if (found := recorded_md5(folder, Path(path))) != md5:
            state = "is missing" if found == checksums.MISSING else f"is damaged: its md5 is {found}, not {md5}"
            raise DataError(
                f"{folder / path}, made by {receipt.stage} on {receipt.host}, {state}",
                f"bring it again, or nightshift stage {receipt.stage} there, which starts anew",
            )


def pack(root: Path, stages: Sequence[str], archive: Path, left_out: Collection[Path] = ()) -> Packed:
    """Write the results of these stages to a tar archive, which is compressed if its suffix says so. Without names all
    whose receipt is current, and what the others resume from. Of the folders in `left_out` the manifest alone if the
    stage that reads it first is done: this node may be gone when another finds that it needs the rest.

    A stage may run meanwhile: what it has not finished has no current receipt. If it leaves one before the archive is
    written, its checkpoints go, and all is packed again.
    """
    session = Session(root)
    _check_left_out(session, left_out)
    with files.staged(archive, []) as temporary:
        while True:
            known = _receipts_on_disk(root)
            packed = _write_archive(temporary, _COMPRESSED.get(archive.suffix, "w"), session, stages, left_out)
            if _receipts_on_disk(root) == known:
                break
        files.sync(temporary)
        files.settle(temporary, archive)
    return packed


def _receipts_on_disk(root: Path) -> set[tuple[str, int, int]]:
    """They change when a stage leaves one, also one with the same content."""
    found = {path.name: path.stat() for path in (root / paths.RECEIPTS).glob("*.json")}
    return {(name, one.st_ino, one.st_mtime_ns) for name, one in found.items()}


def _write_archive(
    path: Path, mode: _TarMode, session: Session, stages: Sequence[str], left_out: Collection[Path]
) -> Packed:
    contents = _contents(session, stages)
    needed = _needed(session, left_out, contents.current)
    with tarfile.open(path, mode) as tar:
        for stage, state in contents.unfinished.items():
            _add_unfinished(tar, stage, state, session.root)
        for receipt in contents.results:
            for one in _packed(receipt, session.root, set(left_out) - set(needed)):
                tar.add(session.root / one, one.as_posix())
    return replace(contents, needed=needed)


def _check_left_out(session: Session, left_out: Collection[Path]) -> None:
    outs = {out for stage in session.graph.values() for out in stage.outs}
    for path in left_out:
        if path not in outs:
            what = f"{path} cannot be left out: no stage has an output of this name"
            raise DataError(what, f"name one as {paths.DVC_YAML} does, such as {paths.DEMOS}")
        if (session.root / path).exists() and not (session.root / path / files.MANIFEST).is_file():
            what = f"{path} cannot be left out: it has no {files.MANIFEST} that could stand for it"
            raise DataError(what, f"pack it too: without --leave-out {path}")


def _needed(session: Session, left_out: Collection[Path], current: Collection[str]) -> dict[Path, str]:
    """Of what is to be left out, that which the stage that reads it first has yet to read, with that stage."""
    readers = {path: [name for name, stage in session.graph.items() if path in stage.deps] for path in left_out}
    return {path: names[0] for path, names in readers.items() if names and names[0] not in current}


def _contents(session: Session, stages: Sequence[str]) -> Packed:
    """One outdated receipt would have all others refused: it is left out, and refused if it is asked for."""
    receipts = {receipt.stage: receipt for receipt in read(session.root)}
    found = {stage: receipts[stage] for stage in session.graph if stage in receipts}
    outdated = _stale(list(found), found, session)
    current = [stage for stage in found if stage not in outdated]
    if stages:
        _check_named(stages, found, outdated, session.root)
        return Packed(results=[found[stage] for stage in stages], current=current)
    unfinished = _unfinished(session, found, outdated)
    if not current and not unfinished:
        if not found:
            _refuse_without_receipts(session.root)
        _refuse_outdated(outdated)
    results = [found[stage] for stage in current]
    return Packed(results=results, current=current, outdated=outdated, unfinished=unfinished)


def _check_named(stages: Sequence[str], found: Mapping[str, Receipt], outdated: Sequence[str], root: Path) -> None:
    if not found:
        _refuse_without_receipts(root)
    for stage in stages:
        if stage not in found:
            raise DataError(f"{stage} has left no receipt; there are {', '.join(found)}", f"nightshift stage {stage}")
        verify_outputs(found[stage], root)
    if refused := [stage for stage in stages if stage in outdated]:
        _refuse_outdated(refused)


def _refuse_without_receipts(root: Path) -> NoReturn:
    raise DataError(f"no stage has left a receipt in {root / paths.RECEIPTS}", "nightshift stage NAME")


def _refuse_outdated(stages: Sequence[str]) -> NoReturn:
    raise DataError(
        f"made of other params, code or inputs than are here now: {', '.join(stages)}",
        f"nightshift stage {' '.join(stages)}, or put back what that was made of",
    )


def _unfinished(session: Session, found: Mapping[str, Receipt], outdated: Sequence[str]) -> dict[str, Path]:
    """The folders from which stages without a current result would resume here."""
    state = session.root / paths.STATE
    begun = [name for name in session.graph if name in outdated or (name not in found and (state / name).is_dir())]
    folders = states_to_resume(begun, session)
    return {stage: folder for stage, folder in folders.items() if any(folder.glob("*"))}


def _add_unfinished(tar: tarfile.TarFile, stage: str, state: Path, root: Path) -> None:
    """What a stage that may be running resumes from, newest checkpoints first; it may remove old ones meanwhile."""
    found = [Path(folder) / name for folder, _, names in os.walk(state) for name in names]
    whole = [path for path in found if not any(part.startswith(".") for part in path.relative_to(state).parts)]
    for path in (*sorted(whole, reverse=True), root / paths.stage_metrics(stage, state.name)):
        with contextlib.suppress(FileNotFoundError):
            tar.add(path, path.relative_to(root).as_posix())


def _packed(receipt: Receipt, root: Path, left_out: Collection[Path]) -> Iterator[Path]:
    """Paths relative to the root. The receipt is last, as a folder's manifest is."""
    outputs = [Path(path) for path in receipt.outputs]
    yield from (path / files.MANIFEST if path in left_out else path for path in outputs)
    if (root / receipt.metrics).exists():
        yield receipt.metrics
        kept = artifacts(root / receipt.metrics, root)
        yield from (path for path in kept if not any(path.is_relative_to(output) for output in outputs))
    yield paths.stage_receipt(receipt.stage)


def _read(path: Path) -> Receipt:
    try:
        return Receipt.model_validate(json.loads(path.read_text()))
    except (ValueError, ValidationError):
        remedy = f"nightshift stage {path.stem} on the node writes it again"
        raise DataError(f"the receipt {path} is damaged", remedy) from None
