"""Other words for the instructions of tasks: YAML files, a list of sentences by task. The n-th has strength n."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from nightshift import config, envs
from nightshift.errors import ConfigError
from nightshift.types import Task

FOLDER = Path(__file__).parent / "sentences"

Paraphrases = Mapping[str, Sequence[str]]


def has(suite: str) -> bool:
    """Whether some come with Nightshift."""
    return all(path.exists() for path in _shipped(suite))


def _shipped(suite: str) -> list[Path]:
    return [FOLDER / f"{name}.yaml" for name in envs.suite(suite).benchmarks()]


@cache
def read(suite: str, file: str | None) -> Paraphrases:
    """From `file`, or from what comes with Nightshift for the suite."""
    if not file and not has(suite):
        raise ConfigError(
            f"Nightshift has no paraphrases of the instructions of {suite}",
            "leave language_instructions out; or, for nightshift robustness, write a YAML file with a list of "
            "sentences for every task and name it in robustness.paraphrases",
        )
    paths = [Path(file)] if file else _shipped(suite)
    return {task: sentences for path in paths for task, sentences in _content(path).items()}


def _content(path: Path) -> Paraphrases:
    if not path.is_file():
        raise ConfigError(f"robustness.paraphrases in params.yaml is {path}, which is no file", "name a YAML file")
    content = config.read_yaml(path)
    if not isinstance(content, dict) or not all(map(_is_list_of_sentences, content.values())):
        raise ConfigError(
            f"{path} is not a list of sentences for every task", "write for example lift_cube: [pick up the cube]"
        )
    return content


def check(paraphrases: Paraphrases, tasks: Iterable[Task], strength: int) -> None:
    """ConfigError if a task has fewer paraphrases than `strength`."""
    for task in tasks:
        there = len(paraphrases.get(task.name, ()))
        if there < strength:
            raise ConfigError(
                f"the paraphrases miss the task {task.name}: there are {there}, and strength {strength} is number "
                f"{strength}",
                "lower the strengths; or, for nightshift robustness, write more sentences (robustness.paraphrases)",
            )


def _is_list_of_sentences(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one.strip() for one in value)
