"""MLflow imports all of its 67 migrations for every store that it opens, to learn the newest one: more than half of the
time it takes to open a store. In the tests a process does so once."""

from __future__ import annotations

import functools
from unittest import mock

from mlflow.store.db import utils

_newest = functools.cache(utils._get_latest_schema_revision)
mock.patch.object(utils, "_get_latest_schema_revision", _newest).start()
