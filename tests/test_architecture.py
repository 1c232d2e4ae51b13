"""The drawings on docs/architecture.md are true: the rows are the import contract, and the graph is dvc.yaml."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise

import yaml

from nightshift import config
from nightshift.data import formats
from nightshift.policies import families
from nightshift.project import graph, paths
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
ROWS, GRAPH = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("", "mermaid"))  # type: ignore[index]
OUTSIDE = {"adapters"}
"""Of the rows, as the page says."""


def drawn_rows() -> list[set[str]]:
    """The names of every row; a line that begins with │ continues the row above it."""
    rows: list[set[str]] = []
    for line in ROWS.splitlines():
        names = set(re.findall(r"[a-z_.]+", re.split(r"   +", line.removeprefix("  │ "))[0]))
        if not names:
            continue
        if line.startswith("  │ "):
            rows[-1] |= names
        else:
            rows.append(names)
    return rows


def layers() -> list[set[str]]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]
    assert contract["type"] == "layers"
    return [{name.strip().removeprefix("nightshift.") for name in row.split("|")} for row in contract["layers"]]


def test_the_rows_are_the_layers_of_the_import_contract() -> None:
    assert drawn_rows() == layers()


def test_every_package_and_module_is_in_a_row() -> None:
    source = REPOSITORY / "src" / "nightshift"
    top = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name.partition(".")[0] for row in layers() for name in row} == {
        *(top - {"__init__", "__main__"} - OUTSIDE),
        *("flows", "tasks"),
    }
    for name in (name for row in layers() for name in row if name not in ("flows", "tasks")):
        path = source.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def drawn_arrows() -> set[tuple[str, str]]:
    lines = [re.sub(r"\[.*?\]", "", line).strip() for line in GRAPH.splitlines()[1:]]
    return {pair for line in lines for pair in pairwise(re.split(r" -+\.?-*> ", line))}


def test_the_arrows_between_stages_are_the_inputs_and_outputs_of_dvc_yaml() -> None:
    stages = graph.load(REPOSITORY)
    made = {out: name for name, stage in stages.items() for out in stage.outs}
    expected = {(made[dep], name) for name, stage in stages.items() for dep in stage.deps if dep in made}
    expected |= {("imports", name) for name, stage in stages.items() if paths.IMPORTS in stage.deps}
    described = yaml.safe_load((REPOSITORY / paths.DVC_YAML).read_text())["stages"]
    for name, stage in described.items():
        match stage.get("meta"):
            case {"reads": store}:
                expected.add((store, name))
            case {"writes": store}:
                expected.add((name, store))
    assert drawn_arrows() == expected


def test_what_config_accepts_by_name_is_what_there_is() -> None:
    assert set(config.FAMILIES) == set(families.FAMILIES)
    assert set(config.FORMATS) == set(formats.MODULES)
