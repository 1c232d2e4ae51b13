"""What a stage leaves on a compute node besides its outputs: a receipt that says what it was computed from.

node   nightshift stage sft ──▶ outputs, .state/metrics/sft-….jsonl, .state/receipts/sft.json
       nightshift pack ────────▶ results.tar with all of these, each under its path in the project
home   nightshift adopt results.tar   (pipeline/adopt.py)
"""

from __future__ import annotations

import json
import socket
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from nightshift import config, files
from nightshift.adapters.tracking import artifacts
from nightshift.errors import DataError
from nightshift.pipeline.run import Session, definition, fingerprint, run_stage, sections, versions
from nightshift.project import checksums, paths


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


def run_with_receipt(stage: str, session: Session) -> Path:
    """Run a stage as `run_stage` does, and write its receipt."""
    named = definition(stage, session)
    current, inputs = fingerprint(stage, session), _sums(session.root, named.deps)
    seconds = run_stage(stage, session)
    written = Receipt(
        stage=stage,
        fingerprint=current,
        params=sections(stage, session),
        versions=versions(stage, session),
        inputs=inputs,
        outputs=_sums(session.root, named.outs),
        commit=session.commit,
        host=socket.gethostname(),
        seconds=round(seconds, 2),
        skipped=session.params.skips(stage),
    )
    path = session.root / paths.stage_receipt(stage)
    files.write_json(path, written.model_dump(mode="json"))
    return path


def read(folder: Path) -> list[Receipt]:
    """Every receipt in a project's folder, or in what `pack` made of it."""
    return [_read(path) for path in sorted((folder / paths.RECEIPTS).glob("*.json"))]


def verify_outputs(receipt: Receipt, folder: Path) -> None:
    """DataError if an output is missing or not as the stage left it."""
    for path, md5 in receipt.outputs.items():
        if (found := checksums.md5(folder, Path(path))) != md5:
            state = "is missing" if found == checksums.MISSING else f"is damaged: its md5 is {found}, not {md5}"
            raise DataError(
                f"{folder / path}, made by {receipt.stage} on {receipt.host}, {state}",
                f"bring it again, or nightshift stage {receipt.stage} there: it resumes",
            )


def pack(root: Path, stages: Sequence[str], archive: Path) -> list[Receipt]:
    """Write the results of these stages, or of all with a receipt, to a tar archive."""
    chosen = _chosen(root, stages)
    for receipt in chosen:
        verify_outputs(receipt, root)
    with files.staged(archive, []) as temporary:
        with tarfile.open(temporary, "w") as tar:
            for receipt in chosen:
                for path in _packed(receipt, root):
                    tar.add(root / path, path.as_posix())
        files.sync(temporary)
        files.settle(temporary, archive)
    return chosen


def _chosen(root: Path, stages: Sequence[str]) -> list[Receipt]:
    found = {receipt.stage: receipt for receipt in read(root)}
    if not found:
        raise DataError(f"no stage has left a receipt in {root / paths.RECEIPTS}", "nightshift stage NAME")
    for stage in stages:
        if stage not in found:
            raise DataError(f"{stage} has left no receipt; there are {', '.join(found)}", f"nightshift stage {stage}")
    return [found[stage] for stage in stages or found]


def _packed(receipt: Receipt, root: Path) -> Iterator[Path]:
    """Paths relative to the root. The receipt is last, as a folder's manifest is."""
    outputs = [Path(path) for path in receipt.outputs]
    yield from outputs
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


def _sums(root: Path, relative: Sequence[Path]) -> dict[str, str]:
    return {path.as_posix(): checksums.md5(root, path) for path in relative}
