"""Bringing home what a stage computed on a compute node: into place, into dvc.lock and into MLflow.

A result is adopted only if the stage would have computed it here: its params, code and inputs are those of this
project. Other versions of packages have to be accepted by name of an option, and stay on record.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nightshift import files
from nightshift.adapters.tracking import artifacts, flat, replay
from nightshift.errors import DataError, ProjectError
from nightshift.pipeline import receipt as receipts
from nightshift.pipeline.receipt import Receipt
from nightshift.pipeline.run import Session, definition, fingerprint, record_time, sections, versions
from nightshift.project import checksums, paths

NODE = "nightshift.node"
"""Prefix of the tags in MLflow that say where a stage ran and with which versions."""


def adopt(root: Path, source: Path, *, accept_versions: bool) -> list[tuple[Receipt, bool]]:
    """Take over every result in a folder or tar archive; with each receipt whether it is new here.

    All of them are checked before the first is taken over. Doing it again changes nothing.
    """
    with Session(root) as session, _opened(source, session.root) as folder:
        found = {receipt.stage: receipt for receipt in receipts.read(folder)}
        if not found:
            raise DataError(f"{source} has no receipts of stages in {paths.RECEIPTS}", "nightshift pack, on the node")
        for stage in found:
            definition(stage, session)
        ordered = [found[stage] for stage in session.graph if stage in found]
        _check(ordered, folder, session, accept_versions=accept_versions)
        return [(receipt, _take_over(receipt, folder, session)) for receipt in ordered]


@contextlib.contextmanager
def _opened(source: Path, root: Path) -> Iterator[Path]:
    """The folder itself, or what the archive holds."""
    if source.is_dir():
        yield source
        return
    if not source.exists():
        raise DataError(f"{source} does not exist", "name the folder or archive that was brought from the node")
    with tempfile.TemporaryDirectory(dir=root / paths.STATE, prefix="adopt-") as folder:
        try:
            with tarfile.open(source) as tar:
                files.extract(tar, Path(folder))
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{source} is no tar archive, or a damaged one: {error}", "bring it again") from error
        yield Path(folder)


def _check(ordered: Sequence[Receipt], folder: Path, session: Session, *, accept_versions: bool) -> None:
    brought: dict[str, str] = {}
    for receipt in ordered:
        _check_outputs(receipt, session)
        _check_left_out(receipt, folder, session)
        _check_inputs_are_here(receipt, session, brought)
        different = [*_other_params(receipt, session), *_other_inputs(receipt, session, brought)]
        if different:
            raise ProjectError(
                f"{receipt.stage} on {receipt.host} was computed from something else than is here: "
                f"{'; '.join(different)}",
                f"put that back here, or run nightshift stage {receipt.stage} again with what is here",
            )
        receipts.verify_outputs(receipt, folder)
        artifacts(folder / receipt.metrics, folder)  # refuses those outside the folder
        brought |= receipt.outputs
    others = [words for receipt in ordered for words in _other_versions(receipt, session)]
    if others and not accept_versions:
        raise ProjectError(
            f"computed on {ordered[0].host} with other versions than are installed here: "
            f"{', '.join(dict.fromkeys(others))}",
            "--accept-versions records the results as computed here, and keeps those versions in MLflow",
        )


def _check_outputs(receipt: Receipt, session: Session) -> None:
    """Every output is copied over the path of that name here, so a receipt names exactly those of its stage."""
    outs = {path.as_posix() for path in session.graph[receipt.stage].outs}
    named = receipt.outputs.keys()
    if named != outs:
        others = [*(f"{path} more" for path in sorted(named - outs)), *(f"no {path}" for path in sorted(outs - named))]
        raise DataError(
            f"the receipt of {receipt.stage} on {receipt.host} names other outputs than {paths.DVC_YAML}: "
            f"{', '.join(others)}",
            f"nightshift stage {receipt.stage} on the node writes it again, with the {paths.DVC_YAML} that is here",
        )


def _check_left_out(receipt: Receipt, folder: Path, session: Session) -> None:
    for path, md5 in receipt.outputs.items():
        if files.is_left_out(folder / path) and checksums.md5(session.root, Path(path)) != md5:
            raise DataError(
                f"{path}, made by {receipt.stage} on {receipt.host}, was left out of what was brought, and is not here",
                f"adopt it first: nightshift pack {receipt.stage} where it was made; or make it here: nightshift run",
            )


def _check_inputs_are_here(receipt: Receipt, session: Session, brought: Mapping[str, str]) -> None:
    needed = [path for path in session.graph[receipt.stage].deps if path.as_posix() not in brought]
    if missing := [str(path) for path in needed if not (session.root / path).exists()]:
        raise ProjectError(
            f"{receipt.stage} on {receipt.host} was computed from {', '.join(missing)}: missing here",
            "bring the results of the stages before it too, or dvc checkout, or nightshift run up to it",
        )


def _other_params(receipt: Receipt, session: Session) -> Iterator[str]:
    there, here = flat(receipt.params), flat(sections(receipt.stage, session))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            yield f"{paths.PARAMS}: {name} {there.get(name)} there, {here.get(name)} here"


def _other_inputs(receipt: Receipt, session: Session, brought: Mapping[str, str]) -> Iterator[str]:
    """`brought`: md5 of the inputs that are adopted before this stage."""
    deps = [path.as_posix() for path in session.graph[receipt.stage].deps]
    if set(deps) != set(receipt.inputs):
        yield f"{paths.DVC_YAML}: the deps of {receipt.stage}"
        return
    for path, md5 in receipt.inputs.items():
        if md5 != (brought.get(path) or checksums.md5(session.root, Path(path))):
            yield path


def _other_versions(receipt: Receipt, session: Session) -> Iterator[str]:
    for package, here in versions(receipt.stage, session).items():
        if (there := receipt.versions.get(package, "none")) != here:
            yield f"{package} {there} there, {here} here"


def _take_over(receipt: Receipt, folder: Path, session: Session) -> bool:
    """False if it is recorded here already. A kill leaves a stage that is stale, and is adopted by the same command."""
    if not session.store.reasons(receipt.stage) and session.store.digests(receipt.stage) == receipt.outputs:
        return False
    if receipt.skipped:
        _record(receipt, folder, session)
        return True
    current = fingerprint(receipt.stage, session)
    with session.tracking.stage(receipt.stage, current, receipt.params) as tracker:
        metrics = session.root / paths.stage_metrics(receipt.stage, current)
        if (folder / receipt.metrics).exists():
            files.write_bytes(metrics, (folder / receipt.metrics).read_bytes())
            replay(metrics, tracker, folder, receipt.inputs)
        tracker.tag({NODE: receipt.host, f"{NODE}.commit": receipt.commit, f"{NODE}.seconds": f"{receipt.seconds:g}"})
        tracker.tag({f"{NODE}.{package}": version for package, version in receipt.versions.items()})
        record_time(session.root, receipt.stage, receipt.seconds)
        _record(receipt, folder, session)
    return True


def _record(receipt: Receipt, folder: Path, session: Session) -> None:
    """Outputs and receipt into place, then into dvc.lock."""
    for path in receipt.outputs:
        if not files.is_left_out(folder / path):  # else it is here already
            files.replace_by_copy(folder / path, session.root / path)
    files.write_json(session.root / paths.stage_receipt(receipt.stage), receipt.model_dump(mode="json"))
    session.store.record(receipt.stage)
