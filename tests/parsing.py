"""DVC parses dvc.yaml, dvc.lock and params.yaml anew for every stage that it is asked about, which takes half of the
time of a run that finds everything cached. In the tests the same text is parsed once. Imported by the tests' process
and by the one that others are forked from."""

from __future__ import annotations

import functools
import pickle
from typing import Any
from unittest import mock

from ruamel.yaml import YAML

_parse = YAML.load


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> bytes:
    return pickle.dumps(_parse(YAML(typ="safe"), text))


def _load(self: YAML, stream: Any) -> Any:
    """A copy, since DVC changes what it has read."""
    plain = self.typ == ["safe"] and isinstance(stream, str)
    return pickle.loads(_parsed(stream)) if plain else _parse(self, stream)


mock.patch.object(YAML, "load", _load).start()
