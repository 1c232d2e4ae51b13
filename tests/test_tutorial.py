"""The commands, parameters and links of the pages that people follow exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from typer.core import TyperGroup

from nightshift import config
from nightshift.cli.app import app
from nightshift.config import merged
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
PARAMS = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""Typer has a copy of click of its own."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Every command of a page that is a line of a shell block, without its comment."""
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            yield shlex.split(re.split(r"\s{2,}#|;", line)[0], comments=True)


def nightshift_commands(page: Path) -> list[list[str]]:
    return [words[1:] for words in commands(page) if words[:1] == ["nightshift"]]


def parse(words: list[str]) -> None:
    """As the command line does, without running anything; UsageError if it does not exist."""
    command: Any = typer.main.get_command(app)
    context = None
    while isinstance(command, TyperGroup):
        context = command.make_context("nightshift", list(words), parent=context)
        name, command, words = command.resolve_command(context, words)
    command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("page", [TUTORIAL, REPOSITORY / "README.md"], ids=lambda page: page.name)
def test_every_command_exists_with_these_options_and_arguments(page: Path) -> None:
    found = nightshift_commands(page)
    assert len(found) > 5
    for words in found:
        parse(words)


def test_a_command_option_or_argument_that_does_not_exist_is_noticed() -> None:
    wrong = (["fly"], ["report", "--everything"], ["promote"], ["predict", "--episodes", "many"], ["env", "paint"])
    for words in wrong:
        with pytest.raises(UsageError):
            parse(words)


def test_the_tutorial_goes_through_a_run_a_night_a_promotion_and_a_rollback() -> None:
    used = {words[0] for words in nightshift_commands(TUTORIAL)}
    assert used >= {"run", "plan", "report", "import", "nightly", "serve", "models", "promote", "rollback", "env"}


def test_the_numbers_of_the_tutorial_are_valid_params_and_its_files_exist() -> None:
    for block in blocks(TUTORIAL, "yaml"):
        config.validate(merged(PARAMS, yaml.safe_load(block)), TUTORIAL)
    for words in commands(TUTORIAL):
        for word in words:
            if re.match(r"(scripts|recipes|deploy)/", word):
                assert (REPOSITORY / word).exists(), word
    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", TUTORIAL.read_text()):
        if name.partition(".")[0] in config.Params.model_fields | {"register": None}:
            assert name in (REPOSITORY / "docs" / "parameters.md").read_text(), name


def test_what_the_sweep_of_the_tutorial_varies_are_parameters() -> None:
    (sweep,) = [words for words in nightshift_commands(TUTORIAL) if words[0] == "sweep"]
    for choice in (word for word in sweep[1:] if "=" in word):
        section, name = choice.partition("=")[0].split(".")
        assert name in PARAMS[section]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_title_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]*(?:#[\w-]+)?)\)", text):
        path, _, title = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not title or title in anchors(there), target
