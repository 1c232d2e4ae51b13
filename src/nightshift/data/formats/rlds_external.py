"""Episodes of RLDS datasets that Nightshift did not write, such as Open X-Embodiment.

RLDS leaves much open; these are our conventions. A text that is the same at every step belongs to the episode: the
instruction becomes its language, other texts become metadata. If the action is a dict, its floating-point parts are
concatenated in the order of their names, and the other parts become extras. A missing discount is 1; metadata lists the
missing fields.

In RLDS the action and the reward of the last step are undefined. Many robot datasets use them nevertheless, because
they have no observation after the last action; then the last observation is repeated, and metadata records that.

An episode is successful if a field `success` or `is_success` of it or of its steps says so; without one, if it
terminated and its last transition has a reward. A dataset without either consists of demonstrations, as for LeRobot:
its episodes count as successful. A missing reward is 1 at the end of a success and else 0. A missing is_terminal is
True at the end of a success; where rewards alone would tell, they have to be 0 before it, since shaped ones never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.data import rlds, rlds_validation
from nightshift.data.episode import Episode
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, common
from nightshift.data.formats.tfds_features import Feature
from nightshift.data.formats.tfrecord import Record
from nightshift.data.tensors import Column
from nightshift.errors import DataError

LANGUAGE = "language_instruction"
NOT_IN_SOURCE = "not_in_source"
"""Metadata key: the step fields that the source does not have."""

_INSTRUCTIONS = (LANGUAGE, "natural_language_instruction")
_ACTION = "action/"
_SUCCESS = ("success", "is_success")
_TEXTS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_DEFAULTS = {"reward": np.float32(0), "discount": np.float32(1), "is_terminal": np.False_}


@dataclass(frozen=True, kw_only=True)
class TfdsSplit:
    """A split of a TFDS dataset."""

    dataset: str
    version: str
    name: str


@dataclass(frozen=True, kw_only=True)
class DecodedRecord:
    """The decoded features of one record."""

    steps: Mapping[str, Column | list[str]]  # N values each
    about: Mapping[str, Any]  # episode-level features: arrays and texts


def check_steps(steps: Mapping[str, Feature], where: str) -> None:
    """Raise DataError if the features are not those of RLDS steps."""
    needed = {"is_first", "is_last"} - set(steps)
    if not any(_is_action(name) and feature.kind != "text" for name, feature in steps.items()):
        needed.add("action")
    if needed:
        raise DataError(f"{where}: steps have no {', '.join(sorted(needed))}", "they are not RLDS steps")
    if wrong := [name for name in rlds_validation.FLAGS if name in steps and steps[name].dtype != "bool"]:
        raise DataError(f"{where}: {', '.join(wrong)} of the steps is not a bool", "they are not RLDS steps")


def check_task(steps: Mapping[str, Feature], task: str, where: str) -> None:
    """Raise DataError if neither the user nor the dataset names the task."""
    if not task and not any(_is_instruction(name, feature.kind == "text") for name, feature in steps.items()):
        raise DataError(
            f"{where} declares no language instruction, so the task is unknown", "name the task: --task NAME"
        )


def episode(read: DecodedRecord, split: TfdsSplit, task: str, record: Record) -> Episode:
    """Convert a record; without `task` the instruction is the name of the task."""
    texts = {name: values for name, values in read.steps.items() if isinstance(values, list)}
    columns = {name: column for name, column in read.steps.items() if not isinstance(column, list)}
    missing = [name for name in _DEFAULTS if name not in columns]
    columns = _as_rlds_fields(columns, missing, record.label)
    instruction = _instruction(texts)
    metadata = _metadata(texts, read.about, instruction) | ({NOT_IN_SOURCE: missing} if missing else {})
    if np.any(columns["reward"][-1]):
        columns, metadata[REPEATED_FINAL] = _with_repeated_final(columns), True
    noted = _noted_success(read)
    success, assumed = _success(columns, missing) if noted is None else (noted, {})
    columns |= _ending(columns, missing, success)
    terminated = bool(columns["is_terminal"][-1])
    header = {
        "terminated": terminated,
        "truncated": not terminated,
        "success": success,
        "metadata": metadata | assumed,
        "provenance": _provenance(texts[instruction][0] if instruction else "", split, task, record),
    }
    return rlds.from_fields(columns, header, record.label)


def _as_rlds_fields(columns: dict[str, Column], missing: Sequence[str], where: str) -> dict[str, Column]:
    count = len(columns["is_first"])
    filled = _one_action(columns, where) | {name: np.full(count, _DEFAULTS[name]) for name in missing}
    for name in ("reward", "discount"):
        if filled[name].size == count:
            filled[name] = filled[name].reshape(count)
    rlds_validation.check_order(filled, where)
    return {
        f"{rlds.EXTRA_FIELDS}{name}" if name in rlds.NIGHTSHIFT_FIELDS else name: column
        for name, column in filled.items()
    }


def _one_action(columns: dict[str, Column], where: str) -> dict[str, Column]:
    """`columns` with a single action array [N, A]."""
    parts = {name: column for name, column in sorted(columns.items()) if _is_action(name)}
    chosen = [name for name, part in parts.items() if part.dtype.kind == "f"] or list(parts)
    if len({parts[name].dtype for name in chosen}) > 1:
        kinds = ", ".join(f"{name} is {parts[name].dtype}" for name in chosen)
        raise DataError(f"{where}: the parts of its action have different dtypes: {kinds}")
    if "action" in parts:
        return {**columns, "action": common.action_matrix(parts["action"], f"{where}: action")}
    flat = [parts[name].reshape(len(parts[name]), -1) for name in chosen]
    rest = {name: column for name, column in columns.items() if name not in chosen}
    return {**rest, "action": np.concatenate(flat, axis=1)}


def _with_repeated_final(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Append a step that repeats the last observation."""
    longer = {name: np.concatenate([column, column[-1:]]) for name, column in columns.items()}
    for name in ("action", "reward"):
        longer[name][-1] = 0
    longer["is_first"][-1] = False
    longer["is_last"][-2] = False
    longer["is_terminal"][-2] = False
    return longer


def _metadata(texts: Mapping[str, list[str]], about: Mapping[str, Any], instruction: str) -> dict[str, Any]:
    """The metadata of the episode, and the texts of its steps (a single text if all steps have the same)."""
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
    """The name of the feature with the instruction; "" if there is none."""
    return next((name for name, values in texts.items() if _is_instruction(name, True) and len(set(values)) == 1), "")


def _is_action(name: str) -> bool:
    return name == "action" or name.startswith(_ACTION)


def _is_instruction(name: str, is_text: bool) -> bool:
    return is_text and name.rpartition("/")[2] in _INSTRUCTIONS


def _noted_success(read: DecodedRecord) -> bool | None:
    """What the source itself says of the episode, or of some of its steps; None if it says nothing."""
    notes = [
        _is_true(values)
        for name, values in (*read.about.items(), *read.steps.items())
        if name.rpartition("/")[2] in _SUCCESS
    ]
    readable = [note for note in notes if note is not None]
    return all(readable) if readable else None


def _is_true(values: Any) -> bool | None:
    """Whether a note is true at one step at least; None if it is a text that says neither yes nor no."""
    if isinstance(values, str | list):
        found = [_TEXTS.get(text.lower()) for text in ([values] if isinstance(values, str) else values)]
        return None if None in found else any(found)
    return bool(np.any(values))


def _success(columns: Mapping[str, Column], missing: Sequence[str]) -> tuple[bool, dict[str, bool]]:
    """Whether an episode that has no note on it succeeded, and metadata that says so if that is assumed."""
    if "reward" in missing:
        return True, {SUCCESS_ASSUMED: True}
    is_sparse = not np.any(columns["reward"][:-2])
    ended = is_sparse if "is_terminal" in missing else bool(columns["is_terminal"][-1])
    return ended and bool(np.any(columns["reward"][-2:-1] > 0)), {}


def _ending(columns: Mapping[str, Column], missing: Sequence[str], success: bool) -> dict[str, Column]:
    """What the source does not say about the end: the reward of the last transition, and whether the task ended."""
    ends = {"reward": slice(-2, -1), "is_terminal": slice(-1, None)}
    filled = {name: columns[name].copy() for name in ends if name in missing}
    for name, column in filled.items():
        column[ends[name]] = success
    return filled


def _provenance(language: str, split: TfdsSplit, task: str, record: Record) -> dict[str, Any]:
    if not (task or language):
        raise DataError(
            f"{record.label} has no language instruction, so its task is unknown", "name the task: --task NAME"
        )
    return {
        "source": "rlds",
        "suite": split.dataset,
        "task": task or language,
        "language": language,
        "split": "train" if split.name == "train" else "eval",
        "init_state": None,
        "seed": None,
        "versions": {split.dataset: split.version},
        "commit": "",
        "origin": f"{record.path.name}, record {record.number}",
    }
