"""DVC decides what is fresh; these tests use a real DVC in a git repository of their own."""

from __future__ import annotations

import contextlib
import io
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dvc import output
from dvc.dependency import param
from dvc.repo import Repo
from dvc.ui import ui
from rich.console import Console

from nightshift.adapters.dvc_store import DvcStore
from nightshift.errors import CacheError, ProjectError
from nightshift.project.versions import versions
from tests.command import dvc
from tests.conftest import REPOSITORY, git

DVC_YAML = """
stages:
  make:  {cmd: mkdir -p out && cp src/code.py out/x, deps: [src/code.py], params: [seed], outs: [out]}
  train: {cmd: cat out/x params.yaml > model, deps: [out], params: [rloo], outs: [model]}
  act:   {cmd: cp model receipt, deps: [model], outs: [receipt], meta: {writes: registry}}
"""


def unchanged() -> None:
    """The inputs are those of the run."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three stages: `make` from code, `train` from its output, `act` with an effect that DVC does not see."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text((REPOSITORY / ".dvc/config").read_text())
    (tmp_path / "src").mkdir()
    (tmp_path / "src/code.py").write_text("one")
    (tmp_path / "params.yaml").write_text("seed: 0\nrloo: {rate: 1.0, groups: 2}\n")
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / ".gitignore").write_text("/out\n/model\n/receipt\n/.dvc/cache\n/.dvc/tmp\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "start")
    return tmp_path


def work(store: DvcStore) -> dict[str, str]:
    """What the pipeline does, with shell commands for stages."""
    done = {}
    for name in ("make", "train", "act"):
        if not store.reasons(name):
            done[name] = "cached"
        elif store.restore(name):
            done[name] = "restored"
        else:
            transaction = store.begin(name, unchanged)
            subprocess.run(str(transaction.stage.cmd), shell=True, check=True)
            store.commit(transaction)
            done[name] = "ran"
    return done


def stale(store: DvcStore) -> dict[str, tuple[str, ...]]:
    return {status.name: status.reasons + status.follows for status in store.status() if not status.fresh}


def test_stages_come_in_graph_order_and_say_that_they_never_ran(toy: Path) -> None:
    statuses = DvcStore(toy).status()
    assert [s.name for s in statuses] == ["make", "train", "act"]
    assert all(s.reasons == ("never run",) for s in statuses)


def test_order_and_parents_are_those_of_dvcs_own_graph_however_the_file_is_ordered(toy: Path) -> None:
    """Parents by the same folder, by a part of it, and by a folder around it."""
    (toy / "dvc.yaml").write_text("""
stages:
  last:   {cmd: "true", deps: [all, single], outs: [end]}
  inner:  {cmd: "true", deps: [out/x], outs: [single]}
  outer:  {cmd: "true", deps: [parts], outs: [all]}
  second: {cmd: "true", outs: [parts/two]}
  first:  {cmd: "true", outs: [parts/one]}
  make:   {cmd: "true", deps: [src/code.py], outs: [out]}
""")
    found = {status.name: status.follows for status in DvcStore(toy).status()}
    assert list(found) == ["second", "first", "outer", "make", "inner", "last"]
    graph = Repo(str(toy)).index.graph
    assert {name: set(above) for name, above in found.items()} == {
        stage.addressing: {above.addressing for above in graph.successors(stage)} for stage in graph
    }


def test_stages_that_go_in_a_circle_are_named(toy: Path) -> None:
    (toy / "dvc.yaml").write_text(DVC_YAML.replace("deps: [src/code.py]", "deps: [src/code.py, model]"))
    with pytest.raises(CacheError, match=r"dvc\.yaml go in a circle: make → train → make"):
        DvcStore(toy).status()


def test_a_status_reads_a_file_once_however_many_stages_name_it(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy / "dvc.yaml").write_text(DVC_YAML.replace("deps: [out]", "deps: [out, src/code.py]"))
    store = DvcStore(toy)
    work(store)
    read: list[str] = []
    parse, build = param.load_path, output.build

    def parsing(path: str, *rest: Any, **named: Any) -> Any:
        read.append(path)
        return parse(path, *rest, **named)

    def building(odb: Any, path: str, *rest: Any, **named: Any) -> Any:
        read.append(path)
        return build(odb, path, *rest, **named)

    monkeypatch.setattr(param, "load_path", parsing)
    monkeypatch.setattr(output, "build", building)
    assert stale(store) == {}
    assert [read.count(str(toy / name)) for name in ("params.yaml", "src/code.py")] == [1, 1]
    (toy / "src/code.py").write_text("two")
    (toy / "params.yaml").write_text("seed: 1\nrloo: {rate: 1.0, groups: 2}\n")
    assert stale(store)["make"] == ("code src/code.py changed", "params.yaml: seed 0 → 1"), "nothing is kept for long"


def test_what_we_commit_dvc_repro_finds_up_to_date_and_the_other_way_round(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    assert "up to date" in dvc(toy, "repro")
    (toy / "src/code.py").write_text("two")
    dvc(toy, "repro", "-q")
    assert stale(store) == {}


def test_a_changed_number_is_named_and_stales_only_its_stage_and_those_below(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    (toy / "params.yaml").write_text("seed: 0\nrloo: {rate: 3.0, groups: 2}\n")
    assert stale(store) == {"train": ("params.yaml: rloo.rate 1.0 → 3.0",), "act": ("train",)}


def test_a_changed_version_is_named_and_stales_only_the_stages_that_name_the_package(toy: Path) -> None:
    stages = DVC_YAML.replace("params: [rloo]", "params: [rloo, {versions.yaml: [torch]}]")
    (toy / "dvc.yaml").write_text(stages.replace("params: [seed]", "params: [seed, {versions.yaml: [numpy]}]"))
    (toy / "versions.yaml").write_text("numpy: 2.1.0\ntorch: 2.13.0\n")
    store = DvcStore(toy)
    work(store)
    (toy / "versions.yaml").write_text("numpy: 2.1.0\ntorch: 2.14.0\n")
    assert stale(store) == {"train": ("versions.yaml: torch 2.13.0 → 2.14.0",), "act": ("train",)}
    assert work(store) == {"make": "cached", "train": "ran", "act": "cached"}, "the model is the same"
    (toy / "versions.yaml").write_text("numpy: 2.1.0\ntorch: 2.13.0\n")
    assert work(store)["train"] == "restored"


def test_tracked_data_is_an_input_and_no_stage(toy: Path) -> None:
    (toy / "dvc.yaml").write_text(DVC_YAML.replace("deps: [src/code.py]", "deps: [src/code.py, data/imports]"))
    (toy / "data/imports/kitchen").mkdir(parents=True)
    (toy / "data/imports/kitchen/episode").write_text("one")
    store = DvcStore(toy)
    assert store.track(Path("data/imports/kitchen")) == Path("data/imports/kitchen.dvc")
    assert [status.name for status in store.status()] == ["make", "train", "act"]
    work(store)
    assert "up to date" in dvc(toy, "repro")
    (toy / "data/imports/kitchen/episode").write_text("two")
    assert stale(store)["make"] == ("input data/imports changed",)


def test_no_bar_or_spinner_of_dvc_flashes_by_on_a_terminal(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setitem(ui.__dict__, "error_console", Console(file=terminal, force_terminal=True))
    monkeypatch.setattr("sys.stderr", terminal)
    store = DvcStore(toy)
    work(store)
    (toy / "data").mkdir()
    (toy / "data/report.html").write_text("one")
    store.track(Path("data/report.html"))
    assert terminal.getvalue() == ""


def test_changed_code_input_and_missing_output_are_told_apart(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    (toy / "src/code.py").write_text("two")
    (toy / "out/x").write_text("tampered")
    (toy / "receipt").unlink()
    found = stale(store)
    assert found["make"] == ("code src/code.py changed", "output out was changed by hand")
    assert "input out changed" in found["train"]
    assert "output receipt is missing" in found["act"]


def test_an_old_number_put_back_restores_instead_of_running(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    first = (toy / "model").read_text()
    params = (toy / "params.yaml").read_text()
    (toy / "params.yaml").write_text(params.replace("1.0", "3.0"))
    assert work(store) == {"make": "cached", "train": "ran", "act": "ran"}
    (toy / "params.yaml").write_text(params)
    assert work(store) == {"make": "cached", "train": "restored", "act": "ran"}, "what acts on the world acts again"
    assert (toy / "model").read_text() == first


def test_a_deleted_output_comes_back_from_the_cache(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    (toy / "model").unlink()
    assert work(store)["train"] == "restored"


def test_outputs_stay_where_no_others_can_be_restored(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    params = (toy / "params.yaml").read_text()
    (toy / "params.yaml").write_text(params.replace("1.0", "3.0"))
    assert not store.restore("train")
    assert (toy / "model").exists()


def test_inputs_that_are_not_those_of_the_run_leave_the_outputs_where_they_are(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)

    def edited() -> None:
        raise ProjectError("params.yaml was edited")

    with pytest.raises(ProjectError):
        store.begin("make", edited)
    assert (toy / "out").exists()


def test_an_edit_made_while_a_stage_runs_leaves_it_stale(toy: Path) -> None:
    store = DvcStore(toy)
    transaction = store.begin("make", unchanged)
    (toy / "out").mkdir()
    (toy / "out/x").write_text("one")
    (toy / "src/code.py").write_text("edited meanwhile")
    store.commit(transaction)
    assert stale(store)["make"] == ("code src/code.py changed",)


def test_a_locked_project_is_a_sentence(toy: Path) -> None:
    store = DvcStore(toy)
    with store._locked(), pytest.raises(CacheError, match="another DVC command is working in this project"):
        DvcStore(toy).status()


def test_a_run_waits_until_another_command_is_done(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dvc push` of many demos takes longer than the three seconds for which DVC itself waits."""
    store = DvcStore(toy)
    held = contextlib.ExitStack()
    held.enter_context(store._locked())
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(DvcStore(toy, patience=300.0).reasons, "make")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=5)
        held.close()
        assert waiting.result(timeout=60) == ("never run",)
    assert capsys.readouterr().out.count("waiting for another DVC command") == 1


def test_a_dataset_can_be_read_as_it_was_at_a_tag(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    git(toy, "add", "-A")
    git(toy, "commit", "-qm", "first data")
    git(toy, "tag", "v1")
    (toy / "src/code.py").write_text("two")
    work(store)
    assert store.read_file("v1", Path("out/x")) == b"one"
    assert store.read_file("workspace", Path("out/x")) == b"two"
    assert [v.revision for v in versions(toy, Path("out"))] == ["workspace", "v1"]
    assert len({v.md5 for v in versions(toy, Path("out"))}) == 2


def test_an_unknown_file_or_revision_is_a_sentence(toy: Path) -> None:
    store = DvcStore(toy)
    work(store)
    with pytest.raises(CacheError):
        store.read_file("nowhere", Path("out/x"))
    with pytest.raises(CacheError):
        store.read_file("workspace", Path("out/none"))
