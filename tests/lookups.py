"""What MLflow looks up once in a process, a second each: imported by the process that others are forked from."""

from __future__ import annotations

from mlflow.store.db import utils
from mlflow.utils import requirements_utils

from tests import schema  # noqa: F401  it keeps what was found

utils._get_latest_schema_revision()
requirements_utils._init_modules_to_packages_map()
