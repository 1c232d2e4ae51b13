"""Other words for the instructions of tasks: YAML files, a list of sentences by task. The n-th has strength n."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from nightshift import config
from nightshift.errors import ConfigError
from nightshift.types import Task

FOLDER = Path(__file__).parent / "sentences"

Paraphrases = Mapping[str, Sequence[str]]


@cache
def read(suite: str, file: str | None) -> Paraphrases:
    """From `file`, or from the one that comes with Nightshift for the suite."""
    path = Path(file) if file else FOLDER / f"{suite}.yaml"
    if not file and not path.exists():
        raise ConfigError(
            f"Nightshift has no paraphrases of the instructions of {suite}",
            "write a YAML file with a list of sentences for every task, and name it in robustness.paraphrases",
        )
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
                "add sentences to the file of robustness.paraphrases, or lower the strengths",
            )


def _is_list_of_sentences(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)
