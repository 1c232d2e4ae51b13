"""Episodes of other people's RLDS datasets.

RLDS leaves much open, so this is what we make of it. A text that is the same at every step is said of the episode: the
instruction is its language, all others are metadata. Actions in parts are their floating-point parts, end to end in the
order of their names; the other parts are extras. A step without reward, discount or is_terminal is one of reward 0,
discount 1, not terminal, and metadata names what was missing.

By RLDS the action and the reward of a last step say nothing. Many robot datasets reward it all the same, having no
observation after their last action; then the last observation is repeated after it, and metadata says so. An episode
succeeded if its metadata says so; or else, if it terminated and its last transition was rewarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.data import rlds, rlds_rules
from nightshift.data.episode import Episode
from nightshift.data.formats import REPEATED_FINAL
from nightshift.data.formats.tfds_features import Feature
from nightshift.data.formats.tfrecord import Record
from nightshift.data.tensors import Column
from nightshift.errors import DataError

LANGUAGE = "language_instruction"
NOT_IN_SOURCE = "not_in_source"
"""In an episode's metadata: the fields of its steps that the source does not have."""

_INSTRUCTIONS = (LANGUAGE, "natural_language_instruction")
_ACTION = "action/"
_SUCCESS = "episode_metadata/success"
_DEFAULTS = {"reward": np.float32(0), "discount": np.float32(1), "is_terminal": np.False_}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which dataset."""

    dataset: str
    version: str
    split: str


@dataclass(frozen=True, kw_only=True)
class Read:
    """One record, decoded."""

    steps: Mapping[str, Column | list[str]]  # N values each
    about: Mapping[str, Any]  # of the episode: arrays and texts


def check_steps(steps: Mapping[str, Feature], where: str) -> None:
    """Refuse features that are not those of RLDS steps."""
    needed = {"is_first", "is_last"} - set(steps)
    if not any(_is_action(name) and feature.kind != "text" for name, feature in steps.items()):
        needed.add("action")
    if needed:
        raise DataError(f"{where}: steps have no {', '.join(sorted(needed))}", "they are not RLDS steps")
    if wrong := [name for name in rlds_rules.FLAGS if name in steps and steps[name].dtype != "bool"]:
        raise DataError(f"{where}: {', '.join(wrong)} of the steps is not a bool", "they are not RLDS steps")


def check_task(steps: Mapping[str, Feature], task: str, where: str) -> None:
    """Refuse episodes that nothing could name the task of."""
    if not task and not any(_is_instruction(name, feature.kind == "text") for name, feature in steps.items()):
        raise DataError(f"{where} declares no language instruction, so the task is not known", "name the task")


def episode(read: Read, source: Source, task: str, record: Record) -> Episode:
    """`task` names its task, or else the instruction does."""
    texts = {name: values for name, values in read.steps.items() if isinstance(values, list)}
    columns = {name: column for name, column in read.steps.items() if not isinstance(column, list)}
    missing = [name for name in _DEFAULTS if name not in columns]
    columns = _as_rlds_has_them(columns, missing, record.label)
    instruction = _instruction(texts)
    metadata = _metadata(texts, read.about, instruction) | ({NOT_IN_SOURCE: missing} if missing else {})
    if np.any(columns["reward"][-1]):
        columns, metadata[REPEATED_FINAL] = _with_repeated_final(columns), True
    terminated = bool(columns["is_terminal"][-1])
    header = {
        "terminated": terminated,
        "truncated": not terminated,
        "success": _success(columns, read.about, terminated),
        "metadata": metadata,
        "provenance": _provenance(texts[instruction][0] if instruction else "", source, task, record),
    }
    return rlds.from_fields(columns, header, record.label)


def _as_rlds_has_them(columns: dict[str, Column], missing: Sequence[str], where: str) -> dict[str, Column]:
    count = len(columns["is_first"])
    filled = _one_action(columns, where) | {name: np.full(count, _DEFAULTS[name]) for name in missing}
    for name in ("reward", "discount"):
        if filled[name].size == count:
            filled[name] = filled[name].reshape(count)
    rlds_rules.check_order(filled, where)
    return {f"{rlds.FREE}{name}" if name in rlds.OURS_ALONE else name: column for name, column in filled.items()}


def _one_action(columns: dict[str, Column], where: str) -> dict[str, Column]:
    """`columns` with the action [N, A]."""
    parts = {name: column for name, column in sorted(columns.items()) if _is_action(name)}
    chosen = [name for name, part in parts.items() if part.dtype.kind == "f"] or list(parts)
    if len({parts[name].dtype for name in chosen}) > 1:
        kinds = ", ".join(f"{name} is {parts[name].dtype}" for name in chosen)
        raise DataError(f"{where}: the parts of its action do not fit together: {kinds}")
    if "action" in parts:
        whole = parts["action"]
        return {**columns, "action": whole.reshape(len(whole), 1) if whole.ndim == 1 else whole}
    flat = [parts[name].reshape(len(parts[name]), -1) for name in chosen]
    rest = {name: column for name, column in columns.items() if name not in chosen}
    return {**rest, "action": np.concatenate(flat, axis=1)}


def _with_repeated_final(columns: Mapping[str, Column]) -> dict[str, Column]:
    """One more step that sees what the last one saw."""
    longer = {name: np.concatenate([column, column[-1:]]) for name, column in columns.items()}
    for name in ("action", "reward"):
        longer[name][-1] = 0
    longer["is_first"][-1] = False
    longer["is_last"][-2] = False
    longer["is_terminal"][-2] = False
    return longer


def _metadata(texts: Mapping[str, list[str]], about: Mapping[str, Any], instruction: str) -> dict[str, Any]:
    """Of the episode as it is, and the texts of its steps: one if they are all the same."""
    episode = {name.removeprefix("episode_metadata/"): _plain(value) for name, value in about.items()}
    steps = {
        f"steps/{name}": values[0] if len(set(values)) == 1 else values
        for name, values in texts.items()
        if name != instruction
    }
    return {**episode, **steps}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else np.asarray(value).tolist()


def _instruction(texts: Mapping[str, list[str]]) -> str:
    """The name of the text that is the instruction of the episode; "" if it has none."""
    return next((name for name, values in texts.items() if _is_instruction(name, True) and len(set(values)) == 1), "")


def _is_action(name: str) -> bool:
    return name == "action" or name.startswith(_ACTION)


def _is_instruction(name: str, is_text: bool) -> bool:
    return is_text and name.rpartition("/")[2] in _INSTRUCTIONS


def _success(columns: Mapping[str, Column], about: Mapping[str, Any], terminated: bool) -> bool:
    if _SUCCESS in about and not isinstance(about[_SUCCESS], str):
        return bool(np.all(about[_SUCCESS]))
    return terminated and bool(np.any(columns["reward"][-2:-1] > 0))


def _provenance(language: str, source: Source, task: str, record: Record) -> dict[str, Any]:
    if not (task or language):
        raise DataError(f"{record.label} has no language instruction, so its task is not known", "name the task")
    return {
        "source": "rlds",
        "suite": source.dataset,
        "task": task or language,
        "language": language,
        "split": "train" if source.split == "train" else "eval",
        "init_state": None,
        "seed": None,
        "versions": {source.dataset: source.version},
        "commit": "",
        "origin": f"{record.path.name}, record {record.number}",
    }
