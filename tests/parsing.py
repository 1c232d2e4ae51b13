"""DVC parses and validates dvc.yaml, dvc.lock and params.yaml anew for every stage that it is asked about, which takes
half of the time of a run that finds everything cached, and keeps the comments of dvc.lock, which has none, for every
stage that it records, which takes a third of the time of a run of small stages. In the tests the same text is parsed
and validated once, and dvc.lock is written by libyaml. Imported by the tests' process and by the one that others are
forked from."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import yaml
from dvc import dvcfile
from dvc.utils import strictyaml
from dvc.utils.serialize import _common
from ruamel.yaml import YAML

_parse = YAML.load
_modify = dvcfile.modify_yaml
_validate = strictyaml.validate
_valid: set[tuple[int, str]] = set()
"""Schemas, which live as long as the process, and texts."""


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> bytes:
    return pickle.dumps(_parse(YAML(typ="safe"), text))


def _load(self: YAML, stream: Any) -> Any:
    """A copy, since DVC changes what it has read."""
    plain = self.typ == ["safe"] and isinstance(stream, str)
    return pickle.loads(_parsed(stream)) if plain else _parse(self, stream)


def _validate_once(data: Any, schema: Any, text: str | None = None, **where: Any) -> Any:
    if text is None:
        return _validate(data, schema, **where)
    if (id(schema), text) not in _valid:
        _validate(data, schema, text=text, **where)
        _valid.add((id(schema), text))
    return data  # DVC takes what it has parsed


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what DVC reads as the same: 12e4 is a string for libyaml, and a number for DVC."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "'" if text[:1].isdigit() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(OrderedDict, yaml.SafeDumper.represent_dict)
_Dumper.add_representer(str, _represent_str)


def _dump(data: Any, stream: TextIO) -> None:
    yaml.dump(data, stream, Dumper=_Dumper, sort_keys=False)


def _read(text: str, _: Any) -> Any:
    return pickle.loads(_parsed(text)) or {}


@contextlib.contextmanager
def _modify_yaml(path: str, fs: Any = None) -> Iterator[Any]:
    plain = Path(path).name == dvcfile.LOCK_FILE
    with _common._modify_data(path, _read, _dump, fs=fs) if plain else _modify(path, fs=fs) as data:
        yield data


mock.patch.object(YAML, "load", _load).start()
mock.patch.object(dvcfile, "modify_yaml", _modify_yaml).start()
mock.patch.object(strictyaml, "validate", _validate_once).start()
