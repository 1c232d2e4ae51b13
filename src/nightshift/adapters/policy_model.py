"""The model code that MLflow stores beside the weights: loading it runs this file and unpickles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from nightshift import policies


class PolicyModel(PythonModel):  # type: ignore[misc]
    """Observations by name, each [B, D], to actions [B, 7]."""

    def load_context(self, context: Any) -> None:
        self.policy = policies.load(Path(context.artifacts["policy"]))

    # MLflow reads annotations of `model_input` as a schema of its own; the signature says it all.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        observations = {name: np.asarray(value, dtype=np.float32) for name, value in model_input.items()}
        return self.policy.act(observations)


set_model(PolicyModel())
